"""Gemma RMSNorm followed by rotary embedding, as the query, key and index projections use it (model.md 2.1, 2.6).

Rounding points (kernels.md C3): the norm is float32 and rounded once to the activation dtype; the rotation reads that rounded
value, computes in float32 and is rounded once more. Pairs are half-split (NeoX): dimension i turns with i + RH, i < RH.

A decode step handles a few thousand numbers here, so the cost is that of the calls: numpy slices and multiplies in half the time of
torch. Its products, sums, quotients and roots are rounded as IEEE 754 asks, so a row's bits depend on nothing else; the sum over a
row, which is not a single operation, stays with `rows.row_sum`.
"""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sm70kernels import rows

Floats = NDArray[np.float32]


def floats(x: Tensor) -> Floats:
    """Return x (any float dtype, any strides) as a float32 array, sharing its memory where it is float32 already."""
    array: Floats = x.float().numpy()
    return array


def norm_and_rotate(parts: Sequence[Floats], weights: Sequence[Tensor], eps: float, cos: Tensor, sin: Tensor) -> list[Tensor]:
    """Return h(rope(h(RMS1p(x; weight)))) of each part, contiguous and in the dtype h of cos.

    RMS1p(x; w) = x * rsqrt(mean(x^2) + eps) * (1 + w). parts f32[M, H_i, D] that share D, in one pass over all heads; weights
    act[D], one a part; cos, sin act[M, RH].
    """
    m, _, d = parts[0].shape
    spans, end = [], 0
    for part in parts:
        spans.append(slice(end, end + part.shape[1]))
        end += part.shape[1]
    x, factor = np.empty((m, end, d), np.float32), np.empty((end, d), np.float32)
    for span, part, weight in zip(spans, parts, weights, strict=True):
        x[:, span], factor[span] = part, floats(weight)
    with np.errstate(all="ignore"):  # infinities and NaN are data
        factor += 1.0
        scale: Floats = rows.row_sum(torch.from_numpy(np.square(x))).numpy()
        scale /= d
        scale += eps
        np.sqrt(scale, out=scale)
        x *= np.reciprocal(scale, out=scale)
        x *= factor
        if cos.dtype != torch.float32:
            x = floats(torch.from_numpy(x).to(cos.dtype))
        _rotate(x, floats(cos), floats(sin))
    if cos.dtype == torch.float32:
        return [torch.from_numpy(x[:, span].copy()) for span in spans]
    return [torch.from_numpy(x[:, span]).to(cos.dtype, memory_format=torch.contiguous_format) for span in spans]


def _rotate(x: Floats, cos: Floats, sin: Floats) -> None:
    """Rotate the first 2 RH dimensions of x [M, H, D] in place by cos, sin [M, RH].

    x'_i = x_i cos_i - x_{i+RH} sin_i and x'_{i+RH} = x_{i+RH} cos_i + x_i sin_i: two rounded products and one sum each.
    """
    half = cos.shape[1]
    turned = x[:, :, : 2 * half]
    swapped = np.concatenate([turned[:, :, half:], turned[:, :, :half]], 2)
    swapped *= np.concatenate([-sin, sin], 1)[:, None]
    np.add(turned * np.concatenate([cos, cos], 1)[:, None], swapped, out=turned)

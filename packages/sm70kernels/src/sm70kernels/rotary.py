"""Gemma RMSNorm followed by rotary embedding, as the query, key and index projections use it (model.md 2.1, 2.6).

Rounding points (kernels.md C3): the norm is float32 and rounded once to the activation dtype; the rotation reads that rounded
value, computes in float32 and is rounded once more. Pairs are half-split (NeoX): dimension i turns with i + RH, i < RH.

A decode step handles a few thousand numbers here, so the cost is that of the calls: numpy's are the cheapest. Its products, sums,
quotients and roots are rounded as IEEE 754 asks and the sum over a row is one dot product (`rows.root_mean_square`), so a row's bits
depend on nothing else.
"""

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sm70kernels import rows
from sm70kernels.rows import Floats

_ONE = np.float32(1.0)


def norm_and_rotate(parts: Sequence[NDArray[Any]], weights: Sequence[Tensor], eps: float, cos: Tensor, sin: Tensor) -> list[Tensor]:
    """Return h(rope(h(RMS1p(x; weight)))) of each part, contiguous and in the dtype h of cos.

    RMS1p(x; w) = x / sqrt(mean(x^2) + eps) * (1 + w). parts [M, H_i, D], float32 or float16, that share D, in one pass over all
    heads; weights act[D], one a part; cos, sin act[M, RH]. Call it under np.errstate(all="ignore").
    """
    dtype = cos.dtype
    counts = tuple([part.shape[1] for part in parts])
    x: Floats = np.concatenate(parts, 1, dtype=np.float32)
    factor: Floats = np.concatenate([rows.floats(weight)[None] for weight in weights])
    factor += _ONE
    x /= rows.root_mean_square(x, eps)
    x *= factor.take(_owners(counts), 0)
    if dtype is not torch.float32:
        x = x.astype(np.float16).astype(np.float32)
    _rotate(x, rows.floats(cos)[:, None, None], rows.floats(sin)[:, None, None])
    turned, end = [], 0
    for count in counts:
        turned.append(rows.tensor(np.ascontiguousarray(x[:, end : end + count]), dtype))
        end += count
    return turned


@cache
def _owners(counts: tuple[int, ...]) -> NDArray[np.int64]:
    """The part that each head belongs to, for parts of so many heads; never written to."""
    return np.repeat(np.arange(len(counts)), counts)


def _rotate(x: Floats, cos: Floats, sin: Floats) -> None:
    """Rotate the first 2 RH dimensions of x [M, H, D] in place by cos, sin [M, 1, 1, RH].

    x'_i = x_i cos_i - x_{i+RH} sin_i and x'_{i+RH} = x_{i+RH} cos_i + x_i sin_i: two rounded products and one sum each.
    """
    m, heads, _ = x.shape
    half = cos.shape[-1]
    pairs = x[:, :, : 2 * half].reshape(m, heads, 2, half)  # a view
    crossed = pairs * sin
    pairs *= cos
    pairs[:, :, 0] -= crossed[:, :, 1]
    pairs[:, :, 1] += crossed[:, :, 0]

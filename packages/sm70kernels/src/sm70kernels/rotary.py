"""Gemma RMSNorm followed by rotary embedding, as the query, key and index projections use it (model.md 2.1, 2.6).

Rounding points (kernels.md C3): the norm is float32 and rounded once to the activation dtype; the rotation reads that rounded
value, computes in float32 and is rounded once more. Pairs are half-split (NeoX): dimension i turns with i + RH, i < RH.
"""

import torch
from torch import Tensor

from sm70kernels import rows


def rms1p(x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    """Return x * rsqrt(mean(x^2) + eps) * (1 + weight) over the last axis as float32 values rounded to `dtype`.

    x [..., D] and weight (broadcast against x, near 0) have any float dtype; the arithmetic is float32.
    """
    y = rows.rms(x.float().contiguous(), eps) * (weight.float() + 1.0)
    return y if dtype == torch.float32 else y.to(dtype).float()


def angles(cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Widen cos, sin [M, RH] to the float32 factors [M, 1, 2 RH] that `rotate` multiplies x and its swapped halves with."""
    c, s = cos.float(), sin.float()
    return torch.cat([c, c], 1).unsqueeze(1), torch.cat([-s, s], 1).unsqueeze(1)


def rotate(x: Tensor, cos2: Tensor, sin2: Tensor) -> Tensor:
    """Rotate the first 2 RH dimensions of x f32[M, H, D] in place; factors from `angles`. Returns x, not rounded.

    x'_i = x_i cos_i - x_{i+RH} sin_i and x'_{i+RH} = x_{i+RH} cos_i + x_i sin_i: two rounded products and one sum each.
    """
    turned = x[..., : cos2.shape[-1]]
    swapped = turned.roll(cos2.shape[-1] // 2, -1)
    turned.mul_(cos2).add_(swapped.mul_(sin2))
    return x

"""Arithmetic shared by the references of the residual-stream and expert ops: rounding points, the per-stream norm, ordered sums.

A model with S residual streams keeps h as [M, S, E]. Every stream has its own mean square and its own slice of the norm weight,
which is stored near 0 and applied as 1 + w.
"""

import torch
from torch import Tensor

from sm70kernels import rows

PLAIN_TERMS = 4
"""Up to this many terms torch adds one after another, whatever the shape; above it, the order depends on column and row count."""


def rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the float32 values x takes when stored as `dtype`: x itself for float32, round-to-nearest-even for float16."""
    return x if dtype == torch.float32 else x.to(dtype).float()


def stored(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return float32 x as `dtype`, without a call when it is float32 already."""
    return x if dtype == torch.float32 else x.to(dtype)


def stream_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return x · rsqrt(mean(x²) + eps) · (1 + weight) per stream: x float32 [M, S, E], weight [S, E] -> float32 [M, S, E], not rounded."""
    return rows.rms(x, eps) * (1.0 + weight.float())


def fold(x: Tensor) -> Tensor:
    """Return the sum of x [M, K, E] over axis 1 as [M, E], added in ascending order from +0."""
    if x.shape[1] <= PLAIN_TERMS:
        return x.sum(1)
    first, *others = x.unbind(1)
    total = first + 0.0
    for term in others:
        total += term
    return total

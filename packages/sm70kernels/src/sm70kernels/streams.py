"""Arithmetic shared by the references of the residual-stream and expert ops: rounding points, the per-stream norm, ordered sums.

A model with S residual streams keeps h as [M, S, E]. Every stream has its own mean square and its own slice of the norm weight,
which is stored near 0 and applied as 1 + w.
"""

from functools import lru_cache

import torch
from torch import Tensor

from sm70kernels import rows

PLAIN_TERMS = 4
"""Up to this many terms torch adds one after another, whatever the shape; above it, the order depends on column and row count."""


@lru_cache(maxsize=1024)
def constant(value: float) -> Tensor:
    """Return `value` as a float32 tensor without axes; never written to.

    torch makes such a tensor of every Python number that an arithmetic call is given, which takes longer than a small call itself.
    """
    return torch.tensor(value, dtype=torch.float32)


def rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the float32 values x takes when stored as `dtype`: x itself for float32, round-to-nearest-even for float16."""
    return x if dtype == torch.float32 else x.to(dtype).float()


def widened(x: Tensor) -> Tensor:
    """Return x in float32, without a call when it is float32 already: that is x itself, not a copy."""
    return x if x.dtype == torch.float32 else x.float()


def stored(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return float32 x as `dtype`, without a call when it is float32 already."""
    return x if dtype == torch.float32 else x.to(dtype)


def stream_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return x · rsqrt(mean(x²) + eps) · (1 + weight) per stream, a new float32 tensor like x, not rounded.

    x float32 [..., S, E]; weight [S, E], or any shape that spreads over x.
    """
    scale = rows.row_sum(x * x).div_(constant(x.shape[-1])).add_(constant(eps)).rsqrt_()
    return (x * scale).mul_(widened(weight) + constant(1.0))


def fold(x: Tensor) -> Tensor:
    """Return the sum of x [M, K, E] over axis 1 as [M, E], added in ascending order from +0."""
    if x.shape[1] <= PLAIN_TERMS:
        return x.sum(1)
    first, *others = x.unbind(1)
    total = first + 0.0
    for term in others:
        total += term
    return total

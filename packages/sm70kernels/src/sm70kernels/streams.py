"""Arithmetic shared by the references of the residual-stream and expert ops: rounding points, the per-stream norm, ordered sums.

A model with S residual streams keeps h as [M, S, E]. Every stream has its own mean square and its own slice of the norm weight,
which is stored near 0 and applied as 1 + w.

All of it works on numpy arrays (sm70kernels.rows says why) and is to be called under np.errstate(all="ignore"): infinities and NaN
are data.
"""

import numpy as np
import torch

from sm70kernels import rows
from sm70kernels.rows import Floats

_ONE = np.float32(1.0)


def rounded(x: Floats, dtype: torch.dtype) -> Floats:
    """Return the float32 values x takes when stored as `dtype`: x itself for float32, round-to-nearest-even for float16."""
    return x if dtype is torch.float32 else x.astype(np.float16).astype(np.float32)


def stream_norm(x: Floats, weight: Floats, eps: float) -> Floats:
    """Return x / sqrt(mean(x²) + eps) · (1 + weight) per stream, a new array like x, not rounded.

    x [..., S, E]; weight [S, E], or any shape that spreads over x.
    """
    y: Floats = x / rows.root_mean_square(x, eps)
    y *= weight + _ONE
    return y


def fold(x: Floats) -> Floats:
    """Return the sum of x [M, K, E] over axis 1 as [M, E], added in ascending order from +0."""
    total: Floats = x[:, 0] + np.float32(0.0)
    for k in range(1, x.shape[1]):
        total += x[:, k]
    return total

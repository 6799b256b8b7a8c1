"""ple_gather: read the hashed rows of the n-gram table shard this rank owns.

    e[m] = concat_j table[rows[m, j] - row_start],  0 where the row lies outside the shard

Each row has one owner, so the sum of e over the ranks is the unsharded result.
"""

import numpy as np
import torch
from torch import Tensor

from sm70kernels import inputs
from sm70kernels.op import EXACT, Derived, Dim, Exact, Op, Spec


def reference(rows: Tensor, table: Tensor, row_start: int) -> Tensor:
    """Return e act [M, J·W], head-major, for rows i64 [M, J] and table act [RW, W]; row_start is the global row of table[0]."""
    local, shard = rows.numpy() - row_start, table.numpy()
    (m, heads), (held, width) = local.shape, shard.shape
    foreign = local.view(np.uint64) >= held  # as unsigned numbers, negative rows are large
    e = shard.take(local, 0, mode="clip")
    if foreign.any():
        # Replaced, not multiplied: the row read in place of a foreign one may hold NaN.
        e[foreign] = 0
    return torch.from_numpy(e.reshape(m, heads * width))


ple_gather = Op(
    "ple_gather",
    reference=reference,
    determinism=EXACT,
    tolerance=Exact(),
    args=dict(rows="i64[M,J]", table="act[RW,W]", row_start="int", e="act[M,JW] out"),
    dims=dict(
        M=Dim(0, 65536, test=(0, 20)),
        J=Spec(16, test=(4, 16)),
        RW=Dim(1, 1 << 40, test=(1, 50)),
        W=Spec(160, test=(4, 6)),
        JW=Derived("J*W"),
    ),
    inputs=dict(rows=inputs.integers(0, 60), row_start=inputs.integers(0, 12)),
    # Gathered rows, not the table: each is read and written once.
    bytes=lambda d, dtype: d["M"] * d["J"] * (8 + 2 * d["W"] * dtype.itemsize),
)

"""ple_gather: read the hashed rows of the n-gram table shard this rank owns.

    e[m] = concat_j table[rows[m, j] - row_start],  0 where the row lies outside the shard

Each row has one owner, so the sum of e over the ranks is the unsharded result.
"""

from torch import Tensor

from sm70kernels import inputs
from sm70kernels.op import EXACT, Derived, Dim, Exact, Op, Spec


def reference(rows: Tensor, table: Tensor, row_start: int) -> Tensor:
    """Return e act [M, J·W], head-major, for rows i64 [M, J] and table act [RW, W]; row_start is the global row of table[0]."""
    local = rows - row_start
    owned = local.clamp(0, table.shape[0] - 1)
    # Replaced, not multiplied: the row read in place of a foreign one may hold NaN.
    return table[owned].masked_fill_((owned != local).unsqueeze(-1), 0.0).flatten(1)


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
)

"""state_copy: copy whole state slots inside a pool, in every layer: snapshots and restores.

Pairs take effect in order: with (a, b) and (b, c) in one call, c ends as the old a.
"""

from torch import Tensor

from sm70kernels import inputs
from sm70kernels.op import EXACT, Dim, Exact, Op


def reference(pool: Tensor, source: Tensor, target: Tensor) -> None:
    """Copy pool[:, source[i]] to pool[:, target[i]] for i ascending; pool u8 [L, SL, W], source and target i32 [N].

    A pair with a negative index is skipped.
    """
    for s, t in zip(source.tolist(), target.tolist(), strict=True):
        if s >= 0 and t >= 0 and s != t:
            pool[:, t] = pool[:, s]


state_copy = Op(
    "state_copy",
    reference=reference,
    launch=None,
    determinism=EXACT,
    tolerance=Exact(),
    args=dict(pool="u8[L,SL,W] inout", source="i32[N]", target="i32[N]"),
    dims=dict(L=Dim(1, 64, test=(1, 3)), SL=Dim(1, 1 << 20, test=(1, 6)), W=Dim(1, 1 << 30, test=(1, 40)), N=Dim(0, 64, test=(0, 6))),
    # Copied slots, not the pool: each is read and written once.
    bytes=lambda d, dtype: d["N"] * (8 + 2 * d["L"] * d["W"]),
    inputs=dict(pool=inputs.integers(0, 255), source=inputs.integers(-1, "SL-1"), target=inputs.integers(-1, "SL-1")),
)

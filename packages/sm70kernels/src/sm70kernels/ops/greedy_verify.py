"""greedy_verify: keep a request's most likely tokens while they agree with its drafts."""

from torch import Tensor

from sm70kernels import acceptance, inputs
from sm70kernels.op import EXACT, Dim, Exact, Op


def reference(target: Tensor, draft: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return (tokens i32 [N, T], count i32 [N]) from target, draft i32 [N, T] and rows i32 [N], 0 .. T.

    target[i, t] is the most likely token after row t; draft[i, t] is the token row t + 1 was computed from (-1: none), which
    target[i, t] judges. count = 1 + the drafts accepted before the first that differs, 0 for a request without rows; tokens from
    count on are -1.
    """
    return acceptance.accept(target, draft, rows)


greedy_verify = Op(
    "greedy_verify",
    reference=reference,
    launch=None,
    determinism=EXACT,
    tolerance=Exact(),
    args=dict(target="i32[N,T]", draft="i32[N,T]", rows="i32[N]", tokens="i32[N,T] out", count="i32[N] out"),
    dims=dict(N=Dim(0, 64, test=(0, 8)), T=Dim(1, 8)),
    inputs=dict(target=inputs.integers(0, 2), draft=inputs.integers(-1, 2), rows=inputs.integers(0, "T")),
)

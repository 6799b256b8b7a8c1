"""moe_route: choose K experts of X for every row, and their weights.

Order is (logit descending, expert id ascending), with -0 equal to +0. Weights are the softmax over the K kept logits, which equals
the softmax over all X renormalised over the kept:

    weight_i = exp(l_i - l_0) / Σ_j exp(l_j - l_0)

A kept logit of -inf has weight exactly 0. A row that holds NaN or +inf, or nothing but -inf, is degenerate: ids 0..K-1, weights 0.
"""

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from sm70kernels import inputs, rows
from sm70kernels.cuda import Kernel
from sm70kernels.op import INV, Dim, Op, Ratio, Spec


@np.errstate(all="ignore")  # infinities and NaN are data
def reference(logits: Tensor, topk: int) -> tuple[Tensor, Tensor]:
    """Return (ids i32 [M, K], weights f32 [M, K]) of logits act [M, X], best first; topk is K."""
    negated = np.negative(rows.floats(logits))
    m, experts = negated.shape
    order = negated.argsort(-1, kind="stable")[:, :topk]  # stable: equal logits keep id order; NaN comes last
    ids = order.astype(np.int32)
    best = negated.take(order + np.arange(0, m * experts, experts)[:, None])
    # The least of a degenerate row is NaN, -inf (a logit of +inf) or +inf (nothing but -inf). Each of them makes every weight NaN; nothing
    # else does.
    weights = np.exp(np.minimum.reduce(negated, -1, keepdims=True) - best)
    weights /= np.add.reduce(weights, -1, keepdims=True)
    degenerate = np.isnan(weights)
    if degenerate.any():
        weights[degenerate] = 0.0
        np.copyto(ids, np.arange(topk, dtype=np.int32), where=degenerate)
    return torch.from_numpy(ids), torch.from_numpy(weights)


KERNEL = Kernel("moe_route")

_SPECIAL = ((float("nan"),), (float("inf"),), (float("-inf"),) * 4, (float("-inf"), float("nan"), float("inf")))


def _logits(draw: inputs.Draw) -> Tensor:
    """Half of the rows in steps of 1/2, so that logits tie, zeros of both signs too; some all negative; some with NaN and infinities."""
    logits = draw.normal(*draw.shape) * 2
    for row in logits:
        if draw.integer(0, 1):
            row.copy_((row * 2).round() / 2)
        if not draw.integer(0, 3):
            row.copy_(-row.abs())
        if not draw.integer(0, 3):
            values = torch.tensor(_SPECIAL[draw.integer(0, len(_SPECIAL) - 1)])
            row[torch.randperm(len(row), generator=draw.generator)[: len(values)]] = values[: len(row)]
        if not draw.integer(0, 9):
            row.fill_(float("-inf"))
    return logits.to(draw.dtype)


def launch(config: None, d: Mapping[str, int], logits: Tensor, topk: int, ids: Tensor, weights: Tensor) -> None:
    """One warp a row and block, so that the few rows of a decode step spread over the multiprocessors."""
    KERNEL(dict(X=d["X"]), d["M"], 32, logits, topk, ids, weights)


moe_route = Op(
    "moe_route",
    reference=reference,
    launch=launch,
    determinism=INV,
    tolerance=Ratio(2.0),
    args=dict(logits="act[M,X]", topk="dim K", ids="i32[M,K] out", weights="f32[M,K] out"),
    dims=dict(
        M=Dim(0, 65536, test=(0, 20)),
        X=Spec(512, test=(8, 16, 40), kernel=(8, 40, 512)),
        K=Dim(1, "min(X, 32)", test=(1, "min(X, 12)")),
    ),
    inputs=dict(logits=_logits),
    shapes=[dict(M=m, X=512, K=10) for m in (1, 5, 40, 64)],
)

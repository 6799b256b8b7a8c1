"""moe_route: choose K experts of X for every row, and their weights.

Order is (logit descending, expert id ascending), with -0 equal to +0. Weights are the softmax over the K kept logits, which equals
the softmax over all X renormalised over the kept:

    weight_i = exp(l_i - l_0) / Σ_j exp(l_j - l_0)

A kept logit of -inf has weight exactly 0. A row that holds NaN or +inf, or nothing but -inf, is degenerate: ids 0..K-1, weights 0.
"""

from functools import cache

import torch
from torch import Tensor

from sm70kernels import inputs
from sm70kernels.op import INV, Dim, Op, Ratio, Spec
from sm70kernels.streams import widened


@cache
def _first(topk: int) -> Tensor:
    """The ids 0 .. topk-1 of a degenerate row; never written to."""
    return torch.arange(topk)


def reference(logits: Tensor, topk: int) -> tuple[Tensor, Tensor]:
    """Return (ids i32 [M, K], weights f32 [M, K]) of logits act [M, X], best first; topk is K."""
    # A stable sort keeps equal logits in id order, and puts NaN, then +inf, first. A degenerate row thus starts with NaN, +inf or -inf,
    # and each of them makes every weight of its softmax NaN; nothing else does. The softmax works row by row.
    values, order = torch.sort(widened(logits), dim=-1, descending=True, stable=True)
    weights = torch.softmax(values.narrow(1, 0, topk), -1)
    degenerate = weights != weights
    ids = torch.where(degenerate, _first(topk), order.narrow(1, 0, topk)).int()
    return ids, weights.masked_fill_(degenerate, 0.0)


moe_route = Op(
    "moe_route",
    reference=reference,
    determinism=INV,
    tolerance=Ratio(2.0),
    args=dict(logits="act[M,X]", topk="dim K", ids="i32[M,K] out", weights="f32[M,K] out"),
    dims=dict(M=Dim(0, 65536, test=(0, 20)), X=Spec(512, test=(8, 16, 40)), K=Dim(1, "X", test=(1, 8))),
    inputs=dict(logits=inputs.normal(2.0)),
)

"""process_logits: temperature, min-p, top-k and top-p, in that order, on rows of logits, in place.

A token is kept when it passes all three; the others become -inf. Tokens are ordered by value descending, then id ascending, so each
filter keeps a prefix of that order:

    min-p: weight >= min_p, with weight = exp(logit - largest) = probability / largest probability
    top-k: the first k
    top-p: the shortest prefix whose share of the weight left by the others reaches top_p
"""

import torch
from torch import Tensor

from sm70kernels import inputs, rows
from sm70kernels.inputs import Draw, Maker
from sm70kernels.op import INV, Dim, Op, Ratio


def _weights(x: Tensor) -> Tensor:
    """Return exp(x - max) of each row [R, V]; 1 for every +inf of a row that has one, 0 for -inf."""
    apart = x - x.amax(-1, keepdim=True)
    # inf - inf: both are the largest.
    return rows.exp(apart.nan_to_num_(nan=0.0, neginf=-torch.inf))


def _filtered(x: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """Return x / temperature, x f32 [R, V] without NaN, with every token that a filter drops at -inf; the vectors are [R, 1]."""
    # Sorted before the division, which can round two logits to one value.
    order = torch.sort(x, dim=-1, descending=True, stable=True)
    scaled = order.values / temperature
    weight = _weights(scaled)
    rank = torch.arange(x.shape[1])
    kept = (weight >= min_p) & ((top_k < 1) | (rank < top_k))
    # Double: the running sum of a large vocabulary must not stall below top_p. cumsum is sequential, so its last value is the total.
    mass = torch.where(kept, weight, 0.0).double()
    running = mass.cumsum(-1)
    kept &= (running - mass < top_p.double() * running[:, -1:]) | (top_p >= 1.0) | (rank == 0)
    return torch.full_like(x, -torch.inf).scatter_(1, order.indices, scaled.masked_fill_(~kept, -torch.inf))


def reference(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> None:
    """Process logits f32 [M, V] in place; temperature, top_p, min_p f32 [M], top_k i32 [M].

    Rows of temperature 0 (greedy) are not touched. Off: top_k < 1 or >= V, top_p >= 1, min_p 0. NaN counts as -inf; a row of -inf
    stays one. The most likely token is always kept.
    """
    sampled = (temperature > 0).nonzero().squeeze(1)
    if sampled.shape[0] == 0 or logits.shape[1] == 0:
        return
    temperature, top_k, top_p, min_p = (x[sampled][:, None] for x in (temperature, top_k, top_p, min_p))
    min_p = min_p.clamp(max=1.0)  # the largest weight is 1, and its token stays
    x = logits.index_select(0, sampled)
    x.masked_fill_(x.isnan(), -torch.inf)
    if bool(((top_k >= 1) & (top_k < x.shape[1])).any() | (top_p < 1.0).any()):
        x = _filtered(x, temperature, top_k, top_p, min_p)
    else:
        x /= temperature
        if bool((min_p > 0).any()):
            x.masked_fill_(_weights(x) < min_p, -torch.inf)
    logits.index_copy_(0, sampled, x)


def _sometimes(off: float, maker: Maker) -> Maker:
    """The value that switches a filter off for half of the rows."""

    def mixed(draw: Draw) -> Tensor:
        made: Tensor = maker(draw)
        return made.masked_fill(torch.rand(draw.shape, generator=draw.generator) < 0.5, off)

    return mixed


process_logits = Op(
    "process_logits",
    reference=reference,
    launch=None,
    determinism=INV,
    tolerance=Ratio(2.0),
    args=dict(logits="f32[M,V] inout", temperature="f32[M]", top_k="i32[M]", top_p="f32[M]", min_p="f32[M]"),
    dims=dict(M=Dim(0, 512, test=(0, 12)), V=Dim(1, 1 << 20, test=(1, 90))),
    inputs=dict(
        logits=inputs.normal(3.0),
        temperature=_sometimes(0.0, inputs.uniform(0.3, 2.0)),
        top_k=_sometimes(0, inputs.integers(-1, "V+1")),
        top_p=_sometimes(1.0, inputs.uniform(0.05, 1.0)),
        min_p=_sometimes(0.0, inputs.uniform(0.0, 0.3)),
    ),
)

"""qsa_select: the tokens a row attends to: its best key blocks and the open block's tail.

Blocks b < visible are ordered by (score descending, b ascending), -0 equal to +0 and NaN after everything else; the first
min(topk, visible) are taken. Written in ascending order: the `ratio` tokens of each taken block, then the tail
visible * ratio .. position, then -1 (kernels.md C11, model.md 2.6.1). visible <= topk takes every block, whatever the scores.

The cut is found by value, without a sort: all scores above the topk-th largest, and of those equal to it the lowest block ids.
"""

import math

import torch
from torch import Tensor

from sm70kernels import inputs
from sm70kernels.op import EXACT, Derived, Dim, Exact, Op, Spec


def reference(scores: Tensor, visible: Tensor, position: Tensor, topk: int, ratio: int) -> Tensor:
    """Return sel i32[M, topk * ratio + ratio - 1] for scores f32[M, NB], visible and position i32[M].

    visible = (position + 1) // ratio blocks are complete at the row; position -1 is a padding row: all -1. Raises ValueError if a
    row that has to choose sees more blocks than there are scores.
    """
    width = topk * ratio + ratio - 1
    column = torch.arange(width, dtype=torch.int32)
    last = position.unsqueeze(1)
    seen = torch.where(position >= 0, visible, 0)
    most = int(seen.max()) if seen.numel() else 0
    if most <= topk:
        return torch.where(column <= last, column, -1)  # blocks in order, then the tail: simply every token
    if most > scores.shape[1]:
        raise ValueError(f"qsa_select: a row sees {most} blocks, scores has {scores.shape[1]}; score every visible block")
    chosen = _best(scores[:, :most], seen, topk)
    rank = torch.where(chosen, chosen.cumsum(1) - 1, topk)  # blocks not taken share a column that is never read as a block
    block = torch.arange(most, dtype=torch.int32).expand(len(chosen), most)
    blocks = column.new_zeros(len(chosen), topk + 1).scatter_(1, rank, block)
    taken = (seen.clamp_max(topk) * ratio).unsqueeze(1)
    token = blocks[:, column // ratio] * ratio + column % ratio
    tail = seen.unsqueeze(1) * ratio + column - taken
    return torch.where(column < taken, token, torch.where(tail <= last, tail, -1))


def _best(scores: Tensor, seen: Tensor, topk: int) -> Tensor:
    """Return bool[M, C]: the first min(topk, seen) blocks of each row in the order above; scores f32[M, C], C > topk."""
    # float64 has room below float32's lowest for -inf proper, and for NaN and unseen blocks under it.
    key = scores.double().nan_to_num_(nan=-math.inf, posinf=math.inf, neginf=-1e300)
    unseen = torch.arange(key.shape[1]) >= seen.unsqueeze(1)
    key.masked_fill_(unseen, -math.inf)
    cut = key.kthvalue(key.shape[1] - topk + 1, dim=1, keepdim=True).values
    above, level = key > cut, key == cut
    room = topk - above.sum(1, keepdim=True)
    return (above | (level & (level.cumsum(1) <= room))) & ~unseen


def _scores(draw: inputs.Draw) -> Tensor:
    """Scores with many ties: a few small multiples of a half, zeros above all, as relu leaves them."""
    return (draw.normal(*draw.shape).round() / 2).clamp_min(0)


def _position(draw: inputs.Draw) -> Tensor:
    """The rows' last tokens: after the visible blocks, 0 to ratio - 1 tokens of the open one."""
    ratio = draw.dims["RATIO"]
    visible: Tensor = draw.made["visible"]
    return visible * ratio + torch.randint(0, ratio, draw.shape, generator=draw.generator).to(draw.dtype) - 1


qsa_select = Op(
    "qsa_select",
    reference=reference,
    launch=None,
    determinism=EXACT,
    tolerance=Exact(),
    args=dict(
        scores="f32[M,NB]",
        visible="i32[M]",
        position="i32[M]",
        topk="dim TOPK",
        ratio="dim RATIO",
        sel="i32[M,W] out",
    ),
    dims=dict(
        M=Dim(0, 8192, test=(0, 20)),
        NB=Dim(0, 1 << 24, test=(0, 40)),
        TOPK=Spec(512, test=(1, 8)),
        RATIO=Spec(4, test=(1, 2, 4)),
        W=Derived("TOPK*RATIO+RATIO-1"),
    ),
    inputs=dict(scores=_scores, visible=inputs.integers(0, "NB"), position=_position),
)

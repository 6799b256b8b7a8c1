"""qsa_select: the tokens a row attends to: its best key blocks and the open block's tail.

Blocks b < visible are ordered by (score descending, b ascending), -0 equal to +0 and NaN after everything else; the first
min(topk, visible) are taken. Written in ascending order: the `ratio` tokens of each taken block, then the tail
visible * ratio .. position, then -1 (kernels.md C11, model.md 2.6.1). visible <= topk takes every block, whatever the scores.

Only rows with visible > topk look at their scores: the others take every token up to their position.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sm70kernels import inputs
from sm70kernels.op import EXACT, Derived, Dim, Exact, Op, Spec


def reference(scores: Tensor, visible: Tensor, position: Tensor, topk: int, ratio: int) -> Tensor:
    """Return sel i32[M, topk * ratio + ratio - 1] for scores f32[M, NB], visible and position i32[M].

    visible = (position + 1) // ratio blocks are complete at the row; position -1 is a padding row: all -1. Raises ValueError if a
    row that has to choose sees more blocks than there are scores.
    """
    last, seen = position.numpy()[:, None], visible.numpy()
    column = np.arange(topk * ratio + ratio - 1, dtype=np.int32)
    sel = np.where(column <= last, column, np.int32(-1))  # blocks in order, then the tail: simply every token
    (choosing,) = ((seen > topk) & (last[:, 0] >= 0)).nonzero()
    if len(choosing):
        seen = seen.take(choosing)[:, None]
        most = int(seen.max())
        if most > scores.shape[1]:
            raise ValueError(f"qsa_select: a row sees {most} blocks, scores has {scores.shape[1]}; score every visible block")
        block = _best(scores.numpy().take(choosing, 0)[:, :most], seen, topk)[:, :, None]
        taken = topk * ratio
        made = np.empty((len(choosing), len(column)), np.int32)
        made[:, :taken] = (block * ratio + column[:ratio]).reshape(-1, taken)
        tail = seen * ratio + column[: ratio - 1]
        made[:, taken:] = np.where(tail <= last.take(choosing)[:, None], tail, -1)
        sel[choosing] = made
    return torch.from_numpy(sel)


def _best(scores: NDArray[np.float32], seen: NDArray[np.int32], topk: int) -> NDArray[np.int64]:
    """Return the first topk blocks of each row in the order above, ascending: [M, topk] of scores f32[M, C], topk < seen [M, 1] <= C."""
    key = -scores
    # A stable sort keeps equal scores in the order of their blocks; numpy sorts NaN to the end, the seen before the unseen there.
    np.copyto(key, np.nan, where=np.arange(key.shape[1]) >= seen)
    best: NDArray[np.int64] = key.argsort(1, kind="stable")[:, :topk]
    best.sort(1)
    return best


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

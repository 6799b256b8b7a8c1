"""qsa_select: the tokens a row attends to: its best key blocks and the open block's tail.

Blocks b < visible are ordered by (score descending, b ascending), -0 equal to +0 and NaN after everything else; the first
min(topk, visible) are taken. Written in ascending order: the `ratio` tokens of each taken block, then the tail
visible * ratio .. position, then -1 (kernels.md C11, model.md 2.6.1). visible <= topk takes every block, whatever the scores.

Only rows with visible > topk look at their scores: the others take every token up to their position.
"""

from functools import cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sm70kernels import inputs
from sm70kernels.op import EXACT, Derived, Dim, Exact, Op, Spec
from sm70kernels.rows import Floats

Tokens = NDArray[np.int32]

_NONE = np.int32(-1)


def reference(scores: Tensor, visible: Tensor, position: Tensor, topk: int, ratio: int) -> Tensor:
    """Return sel i32[M, topk * ratio + ratio - 1] for scores f32[M, NB], visible and position i32[M].

    visible = (position + 1) // ratio blocks are complete at the row; position -1 is a padding row: all -1. Raises ValueError if a
    row that has to choose sees more blocks than there are scores.
    """
    last, seen = position.numpy()[:, None], visible.numpy()
    columns = _columns(topk * ratio + ratio - 1)
    blocks = visible.tolist()
    choosing = [m for m, (v, p) in enumerate(zip(blocks, position.tolist(), strict=True)) if v > topk and p >= 0]
    most = max((blocks[m] for m in choosing), default=0)
    if most > scores.shape[1]:
        raise ValueError(f"qsa_select: a row sees {most} blocks, scores has {scores.shape[1]}; score every visible block")
    if len(choosing) == len(seen) > 0:
        return torch.from_numpy(_choose(scores.numpy()[:, :most], seen[:, None], last, topk, ratio, columns))
    sel = np.where(columns <= last, columns, _NONE)  # blocks in order, then the tail: simply every token
    if choosing:
        sel[choosing] = _choose(scores.numpy()[choosing, :most], seen[choosing, None], last[choosing], topk, ratio, columns)
    return torch.from_numpy(sel)


def _choose(scores: Floats, seen: Tokens, last: Tokens, topk: int, ratio: int, columns: Tokens) -> Tokens:
    """Return the selections i32[M, W] of rows that see more than topk blocks: scores f32[M, C >= seen], seen and last i32[M, 1]."""
    taken = topk * ratio
    sel = np.empty((len(seen), len(columns)), np.int32)
    block = _best(scores, seen, topk)
    block *= ratio
    np.add(block[:, :, None], columns[:ratio], out=sel[:, :taken].reshape(-1, topk, ratio), casting="same_kind")
    tail = seen * ratio + columns[: ratio - 1]
    sel[:, taken:] = np.where(tail <= last, tail, _NONE)
    return sel


def _best(scores: Floats, seen: Tokens, topk: int) -> NDArray[np.int64]:
    """Return the first topk blocks of each row in the order above, ascending: [M, topk] of scores f32[M, C], topk < seen [M, 1] <= C."""
    key = np.negative(scores)
    if len(key) > 1:  # a row that sees fewer than the others
        np.copyto(key, np.nan, where=np.arange(key.shape[1], dtype=np.int32) >= seen)
    # A stable sort keeps equal scores in the order of their blocks; numpy sorts NaN to the end, the seen before the unseen there.
    best: NDArray[np.int64] = key.argsort(1, kind="stable")[:, :topk]
    best.sort(1)
    return best


@cache
def _columns(count: int) -> Tokens:
    """0 .. count - 1; never written to."""
    return np.arange(count, dtype=np.int32)


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

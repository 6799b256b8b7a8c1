"""qsa_score: how well each pooled key block matches a row's index queries.

    score[m, b] = (1 / sqrt(DI)) * sum_h relu(iq[m, h] . key[b])        b < visible[m];   -inf otherwise

Float32 throughout: relu per head before the sum, heads summed as a tree of halves ((h0 + h2) + (h1 + h3) for four), one
multiplication by 1 / sqrt(DI) (kernels.md C10). Scores are +0 at least; a NaN key gives NaN. Key b of a request is entry b % PK of
block block_table[request, b // PK].

Products run on tiles of up to 16 rows that see anything and 64 keys. Rows that select all they see need no scores (qsa_select
ignores them): call with visible = 0 for those, they cost nothing.
"""

from functools import cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sm70kernels import inputs, paging, rows, softmax
from sm70kernels.op import INV, Derived, Dim, Op, Ratio, Spec

_TILE = rows.TILE["decode"]


def reference(iq: Tensor, keys: Tensor, block_table: Tensor, request: Tensor, visible: Tensor) -> Tensor:
    """Return scores f32[M, P * PK] of iq act[M, HI, DI] against keys act[B, PK, DI].

    block_table i32[N, P]; request i32[M] (negative: no keys); visible i32[M] complete blocks the row may see.
    """
    blocks, page, di = keys.shape
    width = block_table.shape[1] * page
    scores = np.full((iq.shape[0], width), -np.inf, np.float32)
    raw, owner, limit = iq.numpy(), request.numpy(), visible.numpy()
    flat = keys.numpy().reshape(-1, di)
    (live,) = ((limit > 0) & (owner >= 0)).nonzero()
    for part, count in softmax.tiles(live, _TILE):
        owners, sees = owner.take(part), limit.take(part)
        columns = -(-min(max(sees.tolist()), width) // softmax.COLUMNS) * softmax.COLUMNS
        if columns == 0:  # an empty block table
            continue
        shared = len(part) > 1 and len(set(owners.tolist())) == 1 and _routes_agree(iq.shape[1], di)
        table = paging.tables(block_table, owners[:1] if shared else owners, 1 + -(-columns // page))
        cells, valid = paging.leading(table, blocks, page, columns)
        got = _tile(torch.from_numpy(raw.take(part, 0)).float(), flat, cells)
        np.copyto(got, -np.inf, where=~(valid & (np.arange(columns) < sees[:, None])))
        scores[part[:count], :columns] = got[:count, :width]
    return torch.from_numpy(scores)


def _tile(queries: Tensor, flat: NDArray[Any], cells: paging.Ints) -> softmax.Floats:
    """Return the scores f32[R, C] of queries f32[R, HI, DI] against rows `cells` [R, C] of flat; [1, C] if all share their keys."""
    r, heads, di = queries.shape
    product = _by_row if len(cells) == r else _by_request
    score = np.empty((r, heads, cells.shape[1]), np.float32)
    for at in range(0, cells.shape[1], softmax.COLUMNS):
        block = slice(at, at + softmax.COLUMNS)
        near = paging.fetch(flat, cells[:, block]).reshape(-1, di)
        score[:, :, block] = product(queries, torch.from_numpy(near).float()).numpy()
    with np.errstate(all="ignore"):  # infinities and NaN are data
        total = _tree(np.maximum(score, 0.0, out=score))
        total *= di**-0.5
    return np.abs(total, out=total)  # relu may leave -0, and a block that matches nothing scores +0


def _by_row(queries: Tensor, near: Tensor) -> Tensor:
    """Dot products f32[R, HI, 64] of queries f32[R, HI, DI], each row with 64 keys of its own: near f32[R * 64, DI]."""
    r, heads, di = queries.shape
    dot = softmax.batched_product(softmax.sizes(_TILE), heads, softmax.COLUMNS, di, True, heads)
    return dot(queries, near.view(r, softmax.COLUMNS, di).transpose(1, 2))


def _by_request(queries: Tensor, near: Tensor) -> Tensor:
    """The same where all rows share their keys: near f32[64, DI]."""
    r, heads, di = queries.shape
    return rows.linear(queries.view(r * heads, di), near, _TILE * heads).view(r, heads, softmax.COLUMNS)


@cache
def _routes_agree(heads: int, di: int) -> bool:
    """Whether both products give the same bits at this shape: only then may a tile's make-up choose between them."""
    generator = torch.Generator().manual_seed(heads * 1_009 + di)
    for _ in range(8):
        queries = torch.randn(_TILE, heads, di, generator=generator)
        near = torch.randn(softmax.COLUMNS, di, generator=generator)
        if not torch.equal(_by_row(queries, near.repeat(_TILE, 1)), _by_request(queries, near)):
            return False
    return True


def _tree(x: softmax.Floats) -> softmax.Floats:
    """Sum x [R, HI, C] over its heads in place, in a tree of halves; of an odd number the middle one waits for the next level."""
    heads = x.shape[1]
    while heads > 1:
        half = heads // 2
        x[:, :half] += x[:, heads - half : heads]
        heads -= half
    return x[:, 0]


qsa_score = Op(
    "qsa_score",
    reference=reference,
    launch=None,
    determinism=INV,
    tolerance=Ratio(2.0),
    args=dict(
        iq="act[M,HI,DI]",
        keys="act[B,PK,DI]",
        block_table="i32[N,P]",
        request="i32[M]",
        visible="i32[M]",
        scores="f32[M,NB] out",
    ),
    dims=dict(
        M=Dim(0, 8192, test=(0, 20)),
        HI=Spec(4, test=(1, 3, 4)),
        DI=Spec(128, test=(16, 20)),
        B=Dim(1, 1 << 24, test=(4, 12)),
        PK=Dim(1, 1024, test=(4, 16)),
        N=Dim(1, 8192, test=(1, 4)),
        P=Dim(0, 1 << 20, test=(0, 9)),
        NB=Derived("P*PK"),
    ),
    inputs=dict(
        block_table=inputs.integers(0, "B-1"),
        request=inputs.integers(0, "N-1"),
        visible=inputs.integers(0, "NB"),
    ),
)

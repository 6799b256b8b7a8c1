"""qsa_score: how well each pooled key block matches a row's index queries.

    score[m, b] = (1 / sqrt(DI)) * sum_h relu(iq[m, h] . key[b])        b < visible[m];   -inf otherwise

Float32 throughout: relu per head before the sum, heads summed as a tree of halves ((h0 + h2) + (h1 + h3) for four), one
multiplication by 1 / sqrt(DI) (kernels.md C10). Scores are +0 at least; a NaN key gives NaN. Key b of a request is entry b % PK of
block block_table[request, b // PK].

Products run on tiles of 16 rows and 64 keys. Rows that select all they see need no scores (qsa_select ignores them): call with
visible = 0 for those, a tile without visible keys costs nothing.
"""

import math
from functools import cache

import numpy as np
import torch
from torch import Tensor

from sm70kernels import inputs, paging, rows, softmax
from sm70kernels.op import INV, Derived, Dim, Op, Ratio, Spec

_TILE = rows.TILE["decode"]


def reference(iq: Tensor, keys: Tensor, block_table: Tensor, request: Tensor, visible: Tensor) -> Tensor:
    """Return scores f32[M, P * PK] of iq act[M, HI, DI] against keys act[B, PK, DI].

    block_table i32[N, P]; request i32[M] (negative: no keys); visible i32[M] complete blocks the row may see.
    """
    m = iq.shape[0]
    width = block_table.shape[1] * keys.shape[1]
    scores = torch.full((m, width), -math.inf)
    if m == 0 or width == 0:
        return scores
    owners, limits = request.tolist(), visible.tolist()
    for at in range(0, m, _TILE):
        part = slice(at, min(at + _TILE, m))
        count = -(-min(max(limits[part]), width) // softmax.COLUMNS)
        if count > 0:
            shared = len(set(owners[part])) == 1 and _routes_agree(iq.shape[1], iq.shape[2])
            who = request[at : at + 1] if shared else rows.pad_rows(request[part], _TILE)
            table = paging.tables(block_table, who, keys.shape[0])
            got = _tile(iq[part], keys, table, visible[part], count * softmax.COLUMNS)
            scores[part, : got.shape[1]] = got[:, :width]
    return scores


def _tile(iq: Tensor, keys: Tensor, table: paging.Ints, visible: Tensor, columns: int) -> Tensor:
    """Return the scores f32[R, columns], columns a multiple of 64, of up to 16 rows.

    table, from paging.tables, has one line if the rows share their keys, else 16.
    """
    r, _, di = iq.shape
    column = np.arange(columns)
    shared = len(table) == 1
    cells, valid = paging.locate(column[None], table, keys.shape[1])
    seen = torch.from_numpy((valid if shared else valid[:r]) & (column < visible.numpy()[:, None]))
    place = torch.from_numpy(cells)
    flat, queries = keys.view(-1, di), rows.pad_rows(iq, _TILE).float()
    parts = []
    for at in range(0, columns, softmax.COLUMNS):
        near = flat.index_select(0, place[:, at : at + softmax.COLUMNS].reshape(-1)).float()
        parts.append(_by_request(queries, near) if shared else _by_row(queries, near))
    # abs: relu keeps -0, and a block that matches nothing scores +0.
    score = _tree(torch.cat(parts, 2)[:r].relu_()).mul_(di**-0.5).abs_()
    return torch.where(seen, score, -math.inf)


def _by_row(queries: Tensor, near: Tensor) -> Tensor:
    """Dot products f32[16, HI, 64] of queries f32[16, HI, DI], each row with 64 keys of its own: near f32[16 * 64, DI]."""
    r, heads, di = queries.shape
    dot = softmax.batched_product(r, heads, softmax.COLUMNS, di, True, heads)
    return dot(queries, near.view(r, softmax.COLUMNS, di).transpose(1, 2))


def _by_request(queries: Tensor, near: Tensor) -> Tensor:
    """The same where all rows share their keys: near f32[64, DI]."""
    r, heads, di = queries.shape
    return rows.linear(queries.view(r * heads, di), near, r * heads).view(r, heads, softmax.COLUMNS)


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


def _tree(x: Tensor) -> Tensor:
    """Sum x [R, HI, C] over its heads in a tree of halves; of an odd number the middle one waits for the next level."""
    while x.shape[1] > 1:
        half = x.shape[1] // 2
        folded = x[:, :half] + x[:, -half:]
        x = folded if x.shape[1] % 2 == 0 else torch.cat([folded, x[:, half : half + 1]], 1)
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

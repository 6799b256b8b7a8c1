"""qsa_score: how well each pooled key block matches a row's index queries.

    score[m, b] = (1 / sqrt(DI)) * sum_h relu(iq[m, h] . key[b])        b < visible[m];   -inf otherwise

Float32 throughout: relu per head before the sum, heads summed as a tree of halves ((h0 + h2) + (h1 + h3) for four), one
multiplication by 1 / sqrt(DI) (kernels.md C10). Scores are +0 at least; a NaN key gives NaN. Key b of a request is entry b % PK of
block block_table[request, b // PK].

Every row multiplies 64 keys at a time by a matrix product of its own, whoever else reads those keys. Rows that select all they see
need no scores (qsa_select ignores them): call with visible = 0 for those, they cost nothing.
"""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sm70kernels import inputs, paging, softmax
from sm70kernels.op import INV, Derived, Dim, Op, Ratio, Spec

_CELLS = 1 << 16
"""Keys, rows times columns, that are scored at a time: what is held of them stays within tens of megabytes."""

_HIDDEN, _ZERO = np.float32(-np.inf), np.float32(0.0)


@np.errstate(all="ignore")  # infinities and NaN are data
def reference(iq: Tensor, keys: Tensor, block_table: Tensor, request: Tensor, visible: Tensor) -> Tensor:
    """Return scores f32[M, P * PK] of iq act[M, HI, DI] against keys act[B, PK, DI].

    block_table i32[N, P]; request i32[M] (negative: no keys); visible i32[M] complete blocks the row may see.
    """
    blocks, page, di = keys.shape
    m, width = iq.shape[0], block_table.shape[1] * page
    limits, owners = visible.tolist(), request.tolist()
    live = [row for row in range(m) if limits[row] > 0 and owners[row] >= 0]
    if not live or width == 0:
        return torch.full((m, width), -torch.inf)
    columns = -(-min(max(limits[row] for row in live), width) // softmax.COLUMNS) * softmax.COLUMNS
    most = max(1, _CELLS // columns)
    queries, owner, limit = iq.numpy(), request.numpy(), visible.numpy()
    flat, numbers = keys.numpy().reshape(-1, di), np.arange(columns)[None]

    def tile(part: slice | list[int], whose: list[int]) -> softmax.Floats:
        """Scores f32[R, columns or width, the smaller] of rows `part` of requests `whose`."""
        shared = len(whose) > 1 and len(set(whose)) == 1  # rows of one prompt read their keys once
        table = paging.tables(block_table, owner[part][:1] if shared else owner[part])
        cells, valid = paging.locate(numbers, table, blocks, page)
        got = _products(queries[part].astype(np.float32, copy=False), flat, cells)
        seen = numbers < limit[part][:, None]
        seen &= valid
        return np.where(seen[:, :width], got[:, :width], _HIDDEN)

    if len(live) == m <= most and columns >= width:  # a decode step: every row has something to score
        return torch.from_numpy(tile(slice(None), owners))
    scores = np.full((m, width), _HIDDEN)
    for at in range(0, len(live), most):
        part = live[at : at + most]
        scores[part, :columns] = tile(part, [owners[row] for row in part])
    return torch.from_numpy(scores)


def _products(queries: softmax.Floats, flat: NDArray[Any], cells: paging.Ints) -> softmax.Floats:
    """Return the scores f32[R, C] of queries f32[R, HI, DI] against rows `cells` [R, C] of flat; [1, C] if all share their keys."""
    (r, heads, di), (sets, columns) = queries.shape, cells.shape
    dot = softmax.rows_product(heads, softmax.COLUMNS, di, True)
    near = paging.fetch(flat, cells.reshape(sets, -1, softmax.COLUMNS)).astype(np.float32, copy=False)
    score = dot(queries[:, None], near.swapaxes(-1, -2))
    total = _tree(np.maximum(score, _ZERO, out=score))
    total *= np.float32(di**-0.5)
    # relu may leave -0, and a block that matches nothing scores +0
    return np.abs(total).reshape(r, columns)


def _tree(x: softmax.Floats) -> softmax.Floats:
    """Sum x [R, NB, HI, 64] over its heads in place, in a tree of halves; of an odd number the middle one waits for the next level."""
    heads = x.shape[2]
    while heads > 1:
        half = heads // 2
        x[:, :, :half] += x[:, :, heads - half : heads]
        heads -= half
    return x[:, :, 0]


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

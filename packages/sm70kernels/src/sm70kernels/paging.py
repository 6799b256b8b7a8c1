"""Where a token lives in a paged pool: block tables, pages and the cells behind them.

A pool is [B, P, ...]: B blocks of P entries. Entry `t` of a request is cell `table[t // P] * P + t % P` of the pool viewed as
[B * P, ...]. A table entry that names no block (negative, or >= B) makes its tokens *masked*, exactly as a negative token does
(kernels.md C5). The cell of a masked token may lie anywhere, outside the pool too: gather with `fetch`, which stays in bounds, and let
nothing that it reads there reach a result.

This is integer work on small arrays in front of every gather: numpy does it in a third of the time of torch.
"""

from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

Ints = NDArray[np.int64]
Blocks = NDArray[np.int32]
Bools = NDArray[np.bool_]


def tables(block_table: Tensor, request: Blocks) -> Blocks:
    """Return the block table of each row: i32[M, P] of block_table i32[N, P] and request [M]; only -1 where request < 0."""
    table: Blocks = block_table.numpy().take(request, 0, mode="clip")
    if min(request.tolist(), default=0) < 0:
        table[request < 0] = -1
    return table


@lru_cache(64)
def _starts(rows: int, width: int) -> Ints:
    """Where each row of a table starts when it lies flat: [rows, 1]; never written to."""
    return np.arange(0, rows * width, max(width, 1))[:rows, None]


def locate(tokens: Ints, table: Blocks, blocks: int, page: int) -> tuple[Ints, Bools]:
    """Return (cell [R, C], valid [R, C]) of tokens i64[R or 1, C] (negative = none) under tables i32[R, P] from `tables`.

    The pool has `blocks` blocks of `page` entries. Tokens past the table's end are masked.
    """
    rows, width = table.shape
    if width == 0:
        return np.zeros((rows, tokens.shape[1]), np.int64), np.zeros((rows, tokens.shape[1]), np.bool_)
    # A shift floors as // does, ten times as fast.
    quotient = tokens // page if page & (page - 1) else tokens >> (page.bit_length() - 1)
    # Beyond a row's table this reads some other entry: the token is masked. As unsigned numbers, negative ones are large.
    block = table.take(quotient if rows == 1 else quotient + _starts(rows, width), mode="clip")
    valid = block.view(np.uint32) < blocks
    valid &= quotient.view(np.uint64) < width
    cell = block - quotient
    cell *= page
    cell += tokens
    return cell, valid


def fetch(pool: NDArray[Any], cell: Ints) -> NDArray[Any]:
    """Return the rows `cell` [...] of pool [X, D]: [..., D]; some row for a cell outside, whose token is masked."""
    return pool.take(cell, 0, mode="clip")

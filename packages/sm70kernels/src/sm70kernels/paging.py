"""Where a token lives in a paged pool: block tables, pages and the cells behind them.

A pool is [B, P, ...]: B blocks of P entries. Entry `t` of a request is cell `table[t // P] * P + t % P` of the pool viewed as
[B * P, ...]. A table entry that names no block (negative, or >= B) makes its tokens *masked*, exactly as a negative token does
(kernels.md C5). A masked token still gets a cell inside the pool, so that a gather stays in bounds; what is read there must never
reach a result.

This is integer work on small arrays in front of every gather: numpy does it in a third of the time of torch.
"""

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]


def tables(block_table: Tensor, request: Tensor, blocks: int) -> Ints:
    """Return the block table of each row, framed for `locate`: [M, 1 + P + 1] of block_table i32[N, P] and request i32[M].

    -1 stands for every entry that names none of the pool's `blocks` blocks, for the frame, and for a whole row where request < 0.
    """
    table, row = block_table.numpy(), request.numpy()
    framed = np.full((len(row), table.shape[1] + 2), -1)
    if len(table):
        framed[:, 1:-1] = table[np.maximum(row, 0)]
        framed[(framed >= blocks) | (row < 0)[:, None]] = -1
    return framed


def locate(tokens: Ints, table: Ints, page: int) -> tuple[Ints, Bools]:
    """Return (cell [R, C], valid [R, C]) of tokens [R or 1, C] (negative = none) under tables [R, 1 + P + 1] from `tables`.

    `page` is the entries a block holds. Tokens past the table's end are masked.
    """
    rows, width = table.shape
    # A shift floors as // does, ten times as fast.
    quotient = tokens // page if page & (page - 1) else tokens >> (page.bit_length() - 1)
    # Tokens before and after the table fall on its frame.
    at = np.minimum(np.maximum(quotient, -1), width - 2) + np.arange(1, rows * width, width)[:, None]
    block = table.take(at)
    cell = (block - quotient) * page
    cell += tokens
    return np.maximum(cell, 0, out=cell), block >= 0

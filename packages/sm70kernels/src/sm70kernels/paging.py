"""Where a token lives in a paged pool: block tables, pages and the cells behind them.

A pool is [B, P, ...]: B blocks of P entries. Entry `t` of a request is cell `table[t // P] * P + t % P` of the pool viewed as
[B * P, ...]. A table entry that names no block (negative, or >= B) makes its tokens *masked*, exactly as a negative token does
(kernels.md C5). A masked token still gets a cell inside the pool, so that a gather stays in bounds; what is read there must never
reach a result.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


def tables(block_table: Tensor, request: Tensor, blocks: int) -> Tensor:
    """Return the block table of each row, framed for `locate`: i64[M, 1 + P + 1] of block_table i32[N, P] and request i32[M].

    -1 stands for every entry that names none of the pool's `blocks` blocks, for the frame, and for a whole row where request is -1.
    """
    n = block_table.shape[0]
    framed = F.pad(block_table, (1, 1, 0, 1), value=-1)
    rows = framed.index_select(0, request % (n + 1))  # -1 % (n + 1) is the row of -1 below the last
    return rows.masked_fill_(rows >= blocks, -1).long()


def locate(tokens: Tensor, table: Tensor, page: int) -> tuple[Tensor, Tensor]:
    """Return (cell i64[R, C], valid bool[R, C]) of tokens i64[R, C] (negative = none) under table i64[R, 1 + P + 1] from `tables`.

    `page` is the entries a block holds. Tokens past the table's end are masked.
    """
    if page & (page - 1):
        quotient = torch.div(tokens, page, rounding_mode="floor")
    else:
        quotient = tokens >> (page.bit_length() - 1)  # the same, twice as fast
    # Tokens before and after the table fall on its frame.
    block = table.gather(1, (quotient + 1).clamp_(0, table.shape[1] - 1))
    return torch.add(tokens, block - quotient, alpha=page).clamp_min_(0), block >= 0

"""Row independence on CPU: the arithmetic every reference uses so that a row's bits do not depend on its neighbours.

torch picks a GEMM kernel, a vector tail and a thread split from the whole shape of a call, so the same row can differ in its
last bits between a batch of one and a batch of nine. Three rules remove that:

* matrix products run on tiles with a fixed number of rows (:data:`TILE`), padded with zero rows;
* transcendental functions see a multiple of 32 elements, at most 32,768 at a time, so neither a scalar tail nor a thread split occurs;
* sums run over the last, contiguous axis.

Every (rows, N, K) product is probed once, on first use: one row at every position of the tile, among random neighbours, must give
the same bits. A shape that fails takes the next method; a shape that fails all of them is refused. Where tiles of 4, 8, 12, ... rows
are found to give the very bits of the full tile, a product uses the smallest that holds its rows.
"""

from collections.abc import Callable, Sequence
from functools import cache
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

TILE = {"decode": 16, "prefill": 64}
"""Rows of one tile by slice kind. Decode and verify rows share a tile; a prefill tile belongs to one request."""

GRANULE = 4
"""Tiles may be cut to a multiple of this many rows where the probe finds that it changes no bits: a lone request costs 4 rows, not 16."""

ELEMENTS = 32_768
"""Largest element-wise call: torch splits longer ones over threads at positions that depend on the length."""

LANES = 32
"""Element-wise calls are padded to this: two AVX-512 vectors of float32, torch's widest unrolled step."""


class RowDependenceError(RuntimeError):
    """No method computes a matrix product of this shape independently of the neighbouring rows."""


def active(counts: Sequence[int]) -> slice | list[int]:
    """Index the entries of counts that are not 0: a slice when they come first, which copies nothing; [] for none."""
    found = [i for i, count in enumerate(counts) if count]
    return slice(0, len(found)) if found and found[-1] == len(found) - 1 else found


def pad_rows(x: Tensor, multiple: int) -> Tensor:
    """Return x [M, ...] with zero rows appended up to a multiple of `multiple`; x itself when none are missing."""
    missing = -x.shape[0] % multiple
    return x if missing == 0 else torch.cat([x, x.new_zeros(missing, *x.shape[1:])])


def _by_linear(x: Tensor, w: Tensor) -> Tensor:
    return F.linear(x, w)


def _by_transpose(x: Tensor, w: Tensor) -> Tensor:
    return torch.mm(w, x.t()).t().contiguous()


def _by_double(x: Tensor, w: Tensor) -> Tensor:
    return F.linear(x.double(), w.double()).float()


_METHODS: tuple[Callable[[Tensor, Tensor], Tensor], ...] = (_by_linear, _by_transpose, _by_double)


class Product(NamedTuple):
    """How products of one shape are computed: `method` on any multiple of `granule` rows up to the tile gives a row the same bits."""

    method: Callable[[Tensor, Tensor], Tensor]
    granule: int


@cache
def product(rows: int, n: int, k: int) -> Product:
    """Choose how x [up to `rows`, k] is multiplied by w [n, k]ᵀ in float32 with row-independent bits.

    The granule is GRANULE where every smaller tile gives the bits of the full one, else `rows`. Raises RowDependenceError naming
    the shape when no method keeps a row's bits even at a constant number of rows.
    """
    generator = torch.Generator().manual_seed(rows * 1_000_003 + n * 1_009 + k)
    w = torch.randn(n, k, generator=generator)
    row = torch.randn(k, generator=generator)
    for method in _METHODS:
        expected = method(_among(row, rows, 0, None), w)[0]
        if not _holds(method, w, row, expected, rows, generator):
            continue
        smaller = range(GRANULE, rows, GRANULE)
        if rows % GRANULE == 0 and all(_holds(method, w, row, expected, size, generator) for size in smaller):
            return Product(method, GRANULE)
        return Product(method, rows)
    raise RowDependenceError(f"linear: no row-independent product for {rows} rows, N={n}, K={k}; use another tile size")


def _among(row: Tensor, rows: int, position: int, generator: torch.Generator | None) -> Tensor:
    """`rows` rows, random or zero, with `row` at `position`."""
    x = torch.zeros(rows, len(row)) if generator is None else torch.randn(rows, len(row), generator=generator)
    x[position] = row
    return x


def _holds(
    method: Callable[[Tensor, Tensor], Tensor], w: Tensor, row: Tensor, expected: Tensor, rows: int, generator: torch.Generator
) -> bool:
    """Whether a tile of `rows` rows gives `row` the expected bits at every position among random neighbours, and among zeros."""
    return torch.equal(method(_among(row, rows, 0, None), w)[0], expected) and all(
        torch.equal(method(_among(row, rows, position, generator), w)[position], expected) for position in range(rows)
    )


def linear(x: Tensor, w: Tensor, rows: int) -> Tensor:
    """Return x [M, K] · w [N, K]ᵀ as float32 [M, N], in tiles of at most `rows` rows (16 decode, 64 prefill).

    float16 inputs are widened first: the product and its sum are float32 and the caller rounds.
    """
    if x.dtype is not torch.float32:
        x = x.float()
    if w.dtype is not torch.float32:
        w = w.float()
    method, granule = product(rows, *w.shape)
    m = x.shape[0]
    if m % granule == 0 and 0 < m <= rows:
        return method(_aligned(x), w)
    padded = pad_rows(x, granule)
    if 0 < padded.shape[0] <= rows:
        return method(_aligned(padded), w)[:m]
    return torch.cat([method(_aligned(tile), w) for tile in padded.split(rows)])[:m]


def _aligned(x: Tensor) -> Tensor:
    """x contiguous and on a 16-byte boundary: some narrow products take another path, with other bits, when it is not."""
    x = x.contiguous()
    return x.clone() if x.data_ptr() % 16 else x


def elementwise(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Apply a float32 element-wise function with bits that do not depend on an element's place in x (any shape)."""
    count = x.numel()
    if count % LANES == 0 and count <= ELEMENTS and x.is_contiguous():
        return function(x)
    flat = x.contiguous().view(-1)
    missing = -count % LANES
    if missing:
        flat = torch.cat([flat, flat.new_zeros(missing)])
    if flat.numel() <= ELEMENTS:
        return function(flat)[:count].view(x.shape)
    return torch.cat([function(part) for part in flat.split(ELEMENTS)])[:count].view(x.shape)


def exp(x: Tensor) -> Tensor:
    """e^x, place-independent."""
    return elementwise(torch.exp, x)


def sigmoid(x: Tensor) -> Tensor:
    """1 / (1 + e^-x), place-independent."""
    return elementwise(torch.sigmoid, x)


def silu(x: Tensor) -> Tensor:
    """x · sigmoid(x), place-independent."""
    return elementwise(F.silu, x)


def softplus(x: Tensor) -> Tensor:
    """log(1 + e^x), x itself above 20, place-independent."""
    return elementwise(F.softplus, x)


def row_sum(x: Tensor) -> Tensor:
    """Sum over the last axis of x [..., K], kept as size 1; at most 32,768 elements a call so that no thread split occurs."""
    k = x.shape[-1]
    if x.numel() <= ELEMENTS and x.is_contiguous():
        return x.sum(-1, keepdim=True)
    flat = x.contiguous().view(-1, k)
    parts = [part.sum(-1, keepdim=True) for part in flat.split(max(1, ELEMENTS // k))]
    return torch.cat(parts).view(*x.shape[:-1], 1)


def rms(x: Tensor, eps: float) -> Tensor:
    """x · rsqrt(mean(x²) + eps) over the last axis, float32 in and out."""
    return x * torch.rsqrt(row_sum(x * x) / x.shape[-1] + eps)

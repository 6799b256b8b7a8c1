"""Softmax attention over a paged K/V pool in fixed blocks of 64 columns: what the attention ops share.

For row r, head h and column block b (64 columns of the selection list, or of the context):

    s_c = (q . k_c) * scale * log2(e)        masked columns: -inf
    m_b = max_c s_c      p_c = 2^(s_c - m_b)     l_b = sum_c p_c          o_b = sum_c p_c v_c
    m = max_b m_b        w_b = 2^(m_b - m)       l = sum_b w_b l_b        o = sum_b w_b o_b / l        lse = m + log2(l)

Sums over b ascend. Everything is float32; with a float16 pool p is rounded to float16 before it meets V, while l sums the
unrounded p (kernels.md C4). Blocks start at column 0 whatever the batch, and a fully masked block has w_b = 0, l_b = 0 and
o_b = 0: it adds exact zeros, so how many blocks are visited, which depends on the longest row of a tile, changes no bit of any row.

A row that reads cells of its own (`selected`) has matrix products of its own, a kv head by 64 columns each: the very same call of
numpy's BLAS for every row, head and block, whatever stands beside them. Rows that share their cells (`causal`) run as one tile of
constant shape. Both kinds of products are probed (`rows_product`, `batched_product`). What surrounds them is numpy: on arrays of
this size a call costs half of torch's or less.
"""

import math
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sm70kernels import paging, rows

Array = NDArray[Any]
Floats = NDArray[np.float32]

COLUMNS = 64
"""Columns of one block: part of the numerics, the same on every device and in every route."""

LOG2E = math.log2(math.e)

FLOOR = -3.0e38
"""Stands for a maximum of -inf, so that -inf - maximum is -inf and not NaN."""

CELLS = 16_384
"""Cells, rows times columns, that `selected` reads at a time: what it holds of K and V stays within tens of megabytes."""

_HIDDEN, _FLOOR, _ZERO, _ONE = np.float32(-np.inf), np.float32(FLOOR), np.float32(0.0), np.float32(1.0)

Product = Callable[[Floats, Floats], Floats]
"""a f32[..., m, k] . b f32[..., k, n]; the leading axes of a and b broadcast."""


def _matmul_by_double(a: Floats, b: Floats) -> Floats:
    product: Floats = np.matmul(a.astype(np.float64), b.astype(np.float64)).astype(np.float32)
    return product


@cache
def rows_product(m: int, n: int, k: int, transposed: bool) -> Product:
    """Return a product a f32[..., m, k] . b f32[..., k, n] in which the bits of a matrix depend neither on place nor on company.

    `transposed`: b is a transposed view of [..., n, k]. np.matmul calls BLAS once for every matrix; that this holds is probed once a
    shape. Raises rows.RowDependenceError naming the shape when neither float32 nor float64 arithmetic qualifies.
    """
    generator = np.random.default_rng((m * 1_009 + n) * 1_009 + k)

    def draw(*shape: int) -> Floats:
        return generator.standard_normal(shape, np.float32)

    def turned(b: Floats) -> Floats:
        return b.swapaxes(-1, -2) if transposed else b

    def results(method: Product) -> Iterator[Floats]:
        """The same matrices alone, then at each of two heads of each row and block; heads lie inside a cell, as a gather leaves them."""
        one, other = draw(m, k), draw(n, k) if transposed else draw(k, n)
        yield method(one, turned(other))
        inner, outer = other.shape
        for blocks, many in ((1, 1), (3, 1), (1, 2), (2, 5), (1, 16)):
            for block, row, h in np.ndindex(blocks, many, 2):
                a, b = draw(many, 2, m, k), draw(blocks, many, inner, 2, outer).swapaxes(2, 3)
                a[row, h], b[block, row, h] = one, other
                yield method(a, turned(b))[block, row, h]
                yield method(a, turned(b[:, row : row + 1]))[block, row, h]

    for method in (np.matmul, _matmul_by_double):
        seen = results(method)
        expected = next(seen)
        if all(np.array_equal(expected, got) for got in seen):
            return method
    raise rows.RowDependenceError(f"attention: no place-independent product [{m},{k}]x[{k},{n}]; use other head sizes")


def _by_double(a: Tensor, b: Tensor) -> Tensor:
    return torch.bmm(a.double(), b.double()).float()


@cache
def batched_product(batch: int, m: int, n: int, k: int, transposed: bool, unit: int) -> Product:
    """Return a product a f32[NB or none, 1, batch, m, k] . b f32[NB, 1, batch, k, n] whose rows do not depend on each other.

    What moves is a group of `unit` rows of a together with the entry of b it meets: the same group in every entry, at every multiple
    of `unit`, among random neighbours must give the same bits. `transposed`: b is a transposed view of [.., n, k]. Probed once a shape,
    like `rows.product`. Raises rows.RowDependenceError naming the shape when neither float32 nor float64 qualifies.
    """
    generator = torch.Generator().manual_seed((m * 1_009 + n) * 1_009 + k)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    group, other = draw(unit, k), draw(n, k) if transposed else draw(k, n)

    def results(method: Callable[[Tensor, Tensor], Tensor]) -> Iterator[Tensor]:
        for entry in range(batch):
            for at in range(0, m, unit):
                a, b = draw(batch, m, k), draw(batch, *other.shape)
                a[entry, at : at + unit], b[entry] = group, other
                yield method(a, b.transpose(1, 2) if transposed else b)[entry, at : at + unit]

    def blockwise(method: Callable[[Tensor, Tensor], Tensor]) -> Product:
        def product(a: Floats, b: Floats) -> Floats:
            """One call a block, each on contiguous entries as in the probe."""
            blocks = len(b)
            dense = torch.from_numpy(np.ascontiguousarray(b.swapaxes(-1, -2) if transposed else b)).reshape(blocks, batch, *other.shape)
            entries = dense.transpose(-1, -2) if transposed else dense
            ours = torch.from_numpy(a).reshape(-1, batch, m, k).expand(blocks, -1, -1, -1)
            return np.stack([method(x, y).numpy()[None] for x, y in zip(ours, entries, strict=True)])

        return product

    for method in (torch.bmm, _by_double):
        seen = results(method)
        expected = next(seen)
        if all(torch.equal(expected, got) for got in seen):
            return blockwise(method)
    raise rows.RowDependenceError(f"attention: no place-independent product for {batch} times [{m},{k}]x[{k},{n}]; use another tile size")


def exp2(x: Tensor) -> Tensor:
    """2^x, place-independent; exactly 1 at 0 and 0 at -inf."""
    return rows.elementwise(torch.exp2, x)


def block_softmax(scores: Floats) -> tuple[Floats, Floats | None, Floats, Floats]:
    """Return (p, w, l, m) of base-2 scores f32[NB, ..., 64], -inf where masked (formulas above); p takes the memory of the scores.

    p f32[NB, ..., 64] and w f32[NB, ..., 1] are relative to the block's and the row's maximum; l f32[..., 1] is merged over the
    blocks in ascending order; m f32[..., 1] is at least FLOOR, so that lse = m + log2(l). A row without columns: p = l = 0. With one
    block w is None: it would be 1, or 0 for a row without columns, which has p = l = 0 already.
    """
    top: Floats = np.maximum.reduce(scores, -1, keepdims=True)
    floor: Floats = np.maximum(top, _FLOOR)
    scores -= floor
    p: Floats = np.exp2(scores, out=scores)
    sums: Floats = np.add.reduce(p, -1, keepdims=True)
    if len(top) == 1:
        return p, None, sums[0], floor[0]
    peak: Floats = np.maximum.reduce(floor, 0)
    w: Floats = np.exp2(top - peak)
    sums *= w
    return p, w, _ascending(sums), peak


def _ascending(parts: Floats) -> Floats:
    """Add parts [NB, ...] up in ascending order, in the memory of the first."""
    total: Floats = parts[0]
    for part in parts[1:]:
        total += part
    return total


def _gather(pool: Tensor, cells: paging.Ints) -> Floats:
    """Return what cells [R, NB * 64] of a pool [B, page, HK, D] hold, in float32: [NB, R, HK, 64, D], a view with heads innermost."""
    _, _, heads, d = pool.shape
    blocks = cells.reshape(len(cells), cells.shape[1] // COLUMNS, COLUMNS).swapaxes(0, 1)
    near = paging.fetch(pool.numpy().reshape(-1, heads * d), blocks).reshape(*blocks.shape, heads, d)
    return near.astype(np.float32, copy=False).swapaxes(2, 3)


Attention = tuple[Floats, Floats]
"""(o [R, HK, T * G, D] normalised, lse [R, HK, T * G, 1])"""


def _attend(
    queries: Floats,
    cells: paging.Ints,
    seen: paging.Bools,
    owned: paging.Bools,
    pools: tuple[Tensor, Tensor],
    products: tuple[Product, Product],
) -> Attention:
    """Attention of R rows with cells of their own, or of T rows that share them (R = 1), HK kv heads with G query heads each.

    queries f32[R, HK, T * G, D], scaled; cells [R, NB * 64] of the pools k, v [B, page, HK, D]; seen [R, T, NB * 64] columns a row
    sees; owned [R, NB * 64] columns whose V may be used at all; products for q . k and p . v.
    """
    r, hk, q, _ = queries.shape
    count, blocks = seen.shape[1], cells.shape[1] // COLUMNS
    scores = products[0](queries, _gather(pools[0], cells).swapaxes(-1, -2))
    hidden = (~seen).reshape(r, count, blocks, COLUMNS).transpose(2, 0, 1, 3)
    np.copyto(scores.reshape(blocks, r, hk, count, q // count, COLUMNS), _HIDDEN, where=hidden[:, :, None, :, None])
    p, w, total, peak = block_softmax(scores)
    if pools[1].dtype is torch.float16:
        p = p.astype(np.float16).astype(np.float32)
    v = _gather(pools[1], cells)

    def weigh(v: Floats) -> Floats:
        parts = products[1](p, v)
        if w is not None:
            parts *= w
        return _ascending(parts)

    # A masked column meets p = 0: nothing, if its V is finite. Memory nobody owns may hold anything, and would show.
    o = weigh(v)
    if not math.isfinite(np.vdot(o, o)):
        foreign = (~owned).reshape(r, blocks, COLUMNS).swapaxes(0, 1)
        np.copyto(v, _ZERO, where=foreign[:, :, None, :, None])
        o = weigh(v)
        if count > 1 and not math.isfinite(np.vdot(o, o)):
            # A token's own infinity or NaN belongs to the rows that see it. The others get the same product, hence the same bits,
            # over a V without what they do not see: they must not know how far the slice goes on.
            for row in range(count):
                mine = np.where(hidden[:, :, row][:, :, None, :, None], _ZERO, v)
                rows = slice(row * (q // count), (row + 1) * (q // count))
                o[:, :, rows] = weigh(mine)[:, :, rows]
    o += _ZERO  # a block of masked columns adds zeros of any sign: -0 becomes +0, with or without it
    # The largest p and its block's w are 1, so l >= 1, or 0 for a row without columns: o is 0 then, and lse = m + log2(0) = -inf.
    o /= np.maximum(total, _ONE)
    lse: Floats = np.log2(total)
    lse += peak
    return o, lse


def _queries(q: Array, scale: float) -> Floats:
    """Return q times scale * log2(e) in float32."""
    result: Floats = np.multiply(q, np.float32(scale * LOG2E), dtype=np.float32)
    return result


@np.errstate(all="ignore")  # infinities and NaN are data
def selected(
    q: Tensor, sel: Tensor, request: Tensor, k_cache: Tensor, v_cache: Tensor, block_table: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """Attention of each row over its own selection.

    q act[M, HQ, D]; sel i32[M, W] token numbers, each at most once a row, negative = none; request i32[M] rows of block_table
    i32[N, P]; caches [B, page, HK, D]. Returns (o f32[M, HQ, D] normalised, lse f32[M, HQ] base 2).
    """
    m, hq, d = q.shape
    blocks, page, hk, _ = k_cache.shape
    group = hq // hk
    products = rows_product(group, COLUMNS, d, True), rows_product(group, d, COLUMNS, False)
    chosen, owner, raw, width = sel.numpy(), request.numpy(), q.numpy(), sel.shape[1]
    columns = max(1, -(-width // COLUMNS)) * COLUMNS
    parts = []
    for at in range(0, max(m, 1), size := max(1, CELLS // columns)):
        some = slice(at, at + size)
        tokens = np.full((len(owner[some]), columns), -1)
        tokens[:, :width] = chosen[some]
        cells, valid = paging.locate(tokens, paging.tables(block_table, owner[some]), blocks, page)
        if columns > COLUMNS:  # the block of the last column that any row has, and nothing after it
            used = (max(valid.any(0).tobytes().rfind(True), 0) // COLUMNS + 1) * COLUMNS
            cells, valid = cells[:, :used], valid[:, :used]
        queries = _queries(raw[some], scale).reshape(-1, hk, group, d)
        parts.append(_attend(queries, cells, valid[:, None], valid, (k_cache, v_cache), products))
    o, lse = parts[0] if len(parts) == 1 else (np.concatenate(pieces) for pieces in zip(*parts, strict=True))
    return torch.from_numpy(o.reshape(m, hq, d)), torch.from_numpy(lse.reshape(m, hq))


@np.errstate(all="ignore")  # infinities and NaN are data
def causal(
    q: Tensor, position: Tensor, table: paging.Blocks, k_cache: Tensor, v_cache: Tensor, scale: float, rank: int, world: int
) -> tuple[Tensor, Tensor]:
    """Dense causal attention of one tile: T rows of one request over its local columns; column c is token c * world + rank.

    q act[T, HQ, D]; position i32[T], negative = no columns; table [1, P] of the request from paging.tables; caches
    [B, page, HK, D]. Returns (o f32[T, HQ, D] normalised, lse f32[T, HQ] base 2).
    """
    t, hq, d = q.shape
    blocks, page, hk, _ = k_cache.shape
    group = hq // hk
    last = (int(position.max()) - rank) // world  # local column; -1 where the rank has none
    if last < 0:
        return torch.zeros(t, hq, d), torch.full((t, hq), -math.inf)
    local = np.arange((last // COLUMNS + 1) * COLUMNS)
    cells, valid = paging.locate(local[None], table, blocks, page)
    owned = valid & (local <= last)  # past the last token the page may hold anything
    seen = owned & (local * world + rank <= position.numpy()[:, None])
    queries = _queries(q.numpy(), scale).reshape(t, hk, group, d).swapaxes(0, 1).reshape(1, hk, t * group, d)
    products = batched_product(hk, t * group, COLUMNS, d, True, group), batched_product(hk, t * group, d, COLUMNS, False, group)
    o, lse = _attend(queries, cells, seen[None], owned, (k_cache, v_cache), products)
    o, lse = (np.ascontiguousarray(x.reshape(hk, t, group, -1).swapaxes(0, 1)) for x in (o, lse))
    return torch.from_numpy(o.reshape(t, hq, d)), torch.from_numpy(lse.reshape(t, hq))

"""Softmax attention over a paged K/V pool in fixed blocks of 64 columns: what the attention ops share.

For row r, head h and column block b (64 columns of the selection list, or of the context):

    s_c = (q . k_c) * scale * log2(e)        masked columns: -inf
    m_b = max_c s_c      p_c = 2^(s_c - m_b)     l_b = sum_c p_c          o_b = sum_c p_c v_c
    m = max_b m_b        w_b = 2^(m_b - m)       l = sum_b w_b l_b        o = sum_b w_b o_b / l        lse = m + log2(l)

Sums over b ascend. Everything is float32; with a float16 pool p is rounded to float16 before it meets V, while l sums the
unrounded p (kernels.md C4). Blocks start at column 0 whatever the batch, and a fully masked block has w_b = 0, l_b = 0 and
o_b = 0: it adds exact zeros, so how many blocks are visited, which depends on the longest row of a tile, changes no bit of any row.

Matrix products run on constant shapes per row (its heads by 64 columns), a tile of rows at a time; a tile holds only rows that have
columns, and its size is one of a few (`sizes`) that are proved to give the same bits. What surrounds the products (indices, masks,
gathers) is numpy: on arrays of this size a call costs half of torch's or less.
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


def _by_double(a: Tensor, b: Tensor) -> Tensor:
    return torch.bmm(a.double(), b.double()).float()


@cache
def batched_product(batches: tuple[int, ...], m: int, n: int, k: int, transposed: bool, unit: int) -> Callable[[Tensor, Tensor], Tensor]:
    """Return a float32 product a [batch, m, k] . b [batch, k, n] whose bits depend neither on place, neighbours nor batch.

    What moves is a group of `unit` rows of a together with the entry of b it meets: the same group in every entry of every batch
    size in `batches`, at every multiple of `unit`, among random neighbours must give the same bits. `transposed`: b is a transposed
    view of [batch, n, k]. Probed once a shape, like `rows.product`. Raises rows.RowDependenceError naming the shape when neither
    float32 nor float64 arithmetic qualifies.
    """
    generator = torch.Generator().manual_seed((m * 1_009 + n) * 1_009 + k)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    group, other = draw(unit, k), draw(n, k) if transposed else draw(k, n)

    def results(method: Callable[[Tensor, Tensor], Tensor]) -> Iterator[Tensor]:
        for batch in batches:
            for entry in range(batch):
                for at in range(0, m, unit):
                    a, b = draw(batch, m, k), draw(batch, *other.shape)
                    a[entry, at : at + unit], b[entry] = group, other
                    yield method(a, b.transpose(1, 2) if transposed else b)[entry, at : at + unit]

    for method in (torch.bmm, _by_double):
        seen = results(method)
        expected = next(seen)
        if all(torch.equal(expected, got) for got in seen):
            return method
    raise rows.RowDependenceError(
        f"attention: no place-independent product for batches {batches}, [{m},{k}]x[{k},{n}]; use another tile size"
    )


@cache
def sizes(tile: int, heads: int = 1) -> tuple[int, ...]:
    """Row counts, times heads, that a tile of up to `tile` rows may run with: a decode step often has one row that is no padding."""
    return tuple(size * heads for size in (1, 2, 4, 8, tile) if size <= tile)


def tiles(live: paging.Ints, tile: int) -> Iterator[tuple[paging.Ints, int]]:
    """Split row numbers into tiles: (numbers, the last one repeated up to a size in `sizes`; how many of them count)."""
    for at in range(0, len(live), tile):
        part = live[at : at + tile]
        count = len(part)
        size = next(size for size in sizes(tile) if size >= count)
        yield (part if size == count else part.take(np.minimum(np.arange(size), count - 1))), count


def exp2(x: Tensor) -> Tensor:
    """2^x, place-independent; exactly 1 at 0 and 0 at -inf."""
    return rows.elementwise(torch.exp2, x)


def log2(x: Tensor) -> Tensor:
    """log2(x), place-independent."""
    return rows.elementwise(torch.log2, x)


def block_softmax(scores: Floats) -> tuple[Tensor, Floats | None, Floats, Floats]:
    """Return (p, w, l, m) of base-2 scores f32[NB, ..., 64], -inf where masked (formulas above); scores are overwritten.

    p f32[NB, ..., 64] and w f32[NB, ..., 1] are relative to the block's and the row's maximum; l f32[..., 1] is merged over the
    blocks in ascending order; m f32[..., 1] is at least FLOOR, so that lse = m + log2(l). A row without columns: p = l = 0. With one
    block w is None: it would be 1, or 0 for a row without columns, which has p = l = 0 already.
    """
    top = scores.max(-1, keepdims=True)
    scores -= np.maximum(top, FLOOR)
    p = exp2(torch.from_numpy(scores))
    sums: Floats = rows.row_sum(p).numpy()
    peak = np.maximum(top[0] if len(top) == 1 else top.max(0), FLOOR)
    if len(top) == 1:
        return p, None, sums[0], peak
    w: Floats = exp2(torch.from_numpy(top - peak)).numpy()
    sums *= w
    total = sums[0]
    for part in sums[1:]:
        total += part
    return p, w, total, peak


Heads = tuple[int, int, int, int]
"""(R, HK, T, G): R rows of their own K and V, or T rows that share them (then R = 1); HK kv heads with G query heads each."""

Attention = tuple[Floats, Floats, Floats]
"""(o [R * HK, T * G, D] normalised, l and m [R * HK, T * G, 1])"""


def _attend(
    queries: Tensor,
    heads: Heads,
    cells: paging.Ints,
    seen: paging.Bools,
    owned: paging.Bools,
    pools: tuple[Tensor, Tensor],
    batches: tuple[int, ...],
) -> Attention:
    """Attention of one tile.

    queries f32[R * HK, T * G, D], scaled; cells [R, NB * 64] of the pools k, v [B, page, HK, D]; seen [R, T or 1, NB * 64] columns a
    row sees; owned [R, NB * 64] columns whose V may be used at all; batches as in batched_product.
    """
    r, hk, _, group = heads
    entries, q, d = queries.shape
    blocks = [slice(at, at + COLUMNS) for at in range(0, cells.shape[1], COLUMNS)]
    keys, values = (pool.numpy().reshape(-1, d) for pool in pools)
    place = (cells * hk)[:, None] + np.arange(hk)[:, None]

    def gather(flat: Array, block: slice) -> Array:
        return paging.fetch(flat, place[:, :, block]).reshape(entries, COLUMNS, d)

    def widened(near: Array) -> Tensor:
        return torch.from_numpy(near).float()

    dot = batched_product(batches, q, COLUMNS, d, True, group)
    products = [dot(queries, widened(gather(keys, block)).transpose(1, 2)).numpy() for block in blocks]
    scores = products[0][None] if len(products) == 1 else np.stack(products)
    hidden = (~seen)[:, None, :, None]
    for score, block in zip(scores.reshape(len(blocks), *heads, COLUMNS), blocks, strict=True):
        np.copyto(score, -np.inf, where=hidden[..., block])
    p, w, total, peak = block_softmax(scores)
    if pools[1].dtype == torch.float16:
        p = p.half().float()
    mix = batched_product(batches, q, d, COLUMNS, False, group)

    def weigh(clean: bool) -> Floats:
        o: Floats | None = None
        for b, block in enumerate(blocks):
            v = gather(values, block)
            if clean:
                np.copyto(v.reshape(r, hk, COLUMNS, d), 0.0, where=~owned[:, None, block, None])
            part: Floats = mix(p[b], widened(v)).numpy()
            if w is not None:
                part *= w[b]
            o = part if o is None else np.add(o, part, out=o)
        assert o is not None  # the callers have a column
        return o

    # A masked column meets p = 0: nothing, if its V is finite. Memory nobody owns may hold anything, and would show in the sum.
    o = weigh(False)
    if not math.isfinite(o.sum()):
        o = weigh(True)
    o += 0.0  # a block of masked columns adds zeros of any sign: -0 becomes +0, with or without it
    # The largest p and its block's w are 1, so l >= 1, or 0 for a row without columns: o is 0 then.
    o /= np.maximum(total, 1.0)
    return o, total, peak


def _logarithm(total: Floats, peak: Floats) -> Floats:
    """Return lse = m + log2(l): -inf for a row without columns (l = 0)."""
    lse: Floats = log2(torch.from_numpy(total)).numpy()
    lse += peak
    return lse


def _queries(q: Array, scale: float) -> Floats:
    """Return q times scale * log2(e) in float32."""
    result: Floats = q.astype(np.float32)
    result *= scale * LOG2E
    return result


def selected(
    q: Tensor, sel: Tensor, request: Tensor, k_cache: Tensor, v_cache: Tensor, block_table: Tensor, scale: float, tile: int
) -> tuple[Tensor, Tensor]:
    """Attention of each row over its own selection, in tiles of `tile` rows.

    q act[M, HQ, D]; sel i32[M, W] token numbers, each at most once a row, negative = none; request i32[M] rows of block_table
    i32[N, P]; caches [B, page, HK, D]. Returns (o f32[M, HQ, D] normalised, lse f32[M, HQ] base 2).
    """
    m, hq, d = q.shape
    blocks, page, hk, _ = k_cache.shape
    chosen, owner, raw = sel.numpy(), request.numpy(), q.numpy()
    out, total, peak = np.zeros((m, hq, d), np.float32), np.zeros((m, hq), np.float32), np.full((m, hq), FLOOR, np.float32)
    columns = -(-chosen.shape[1] // COLUMNS) * COLUMNS
    (live,) = np.logical_or.reduce(chosen >= 0, 1).nonzero()
    with np.errstate(all="ignore"):  # infinities and NaN are data
        for part, count in tiles(live, tile):
            size, kept = len(part), part[:count]
            tokens = np.full((size, columns), -1)
            tokens[:, : chosen.shape[1]] = chosen.take(part, 0)
            cells, valid = paging.locate(tokens, paging.tables(block_table, owner.take(part)), blocks, page)
            last = valid.any(0).tobytes().rfind(True)  # -1: no column at all
            if last < 0:
                continue
            width = (last // COLUMNS + 1) * COLUMNS
            if width < columns:
                cells, valid = cells[:, :width], valid[:, :width]
            queries = torch.from_numpy(_queries(raw.take(part, 0), scale).reshape(size * hk, hq // hk, d))
            part_out, part_total, part_peak = _attend(
                queries, (size, hk, 1, hq // hk), cells, valid[:, None], valid, (k_cache, v_cache), sizes(tile, hk)
            )
            out[kept] = part_out.reshape(size, hq, d)[:count]
            total[kept], peak[kept] = part_total.reshape(size, hq)[:count], part_peak.reshape(size, hq)[:count]
        lse = _logarithm(total, peak)
    return torch.from_numpy(out), torch.from_numpy(lse)


def causal(
    q: Tensor, position: Tensor, table: paging.Ints, k_cache: Tensor, v_cache: Tensor, scale: float, rank: int, world: int
) -> tuple[Tensor, Tensor]:
    """Dense causal attention of one tile: T rows of one request over its local columns; column c is token c * world + rank.

    q act[T, HQ, D]; position i32[T], negative = no columns; table [1, 1 + P + 1] of the request from paging.tables; caches
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
    with np.errstate(all="ignore"):  # infinities and NaN are data
        queries = _queries(q.numpy(), scale).reshape(t, hk, group, d).swapaxes(0, 1).reshape(hk, t * group, d)
        o, total, peak = _attend(torch.from_numpy(queries), (1, hk, t, group), cells, seen[None], owned, (k_cache, v_cache), (hk,))
        lse = _logarithm(total, peak)
    o, lse = (np.ascontiguousarray(x.reshape(hk, t, group, -1).swapaxes(0, 1)) for x in (o, lse))
    return torch.from_numpy(o.reshape(t, hq, d)), torch.from_numpy(lse.reshape(t, hq))

"""Softmax attention over a paged K/V pool in fixed blocks of 64 columns: what the attention ops share.

For row r, head h and column block b (64 columns of the selection list, or of the context):

    s_c = (q . k_c) * scale * log2(e)        masked columns: -inf
    m_b = max_c s_c      p_c = 2^(s_c - m_b)     l_b = sum_c p_c          o_b = sum_c p_c v_c
    m = max_b m_b        w_b = 2^(m_b - m)       l = sum_b w_b l_b        o = sum_b w_b o_b / l        lse = m + log2(l)

Sums over b ascend. Everything is float32; with a float16 pool p is rounded to float16 before it meets V, while l sums the
unrounded p (kernels.md C4). Blocks start at column 0 whatever the batch, and a fully masked block has w_b = 0, l_b = 0 and
o_b = 0: it adds exact zeros, so how many blocks are visited, which depends on the longest row of a tile, changes no bit of any row.

Matrix products run on constant shapes only: tiles of 16 (decode) or 64 (prefill) rows, 64 columns.
"""

import math
from collections.abc import Callable
from functools import cache

import numpy as np
import torch
from torch import Tensor

from sm70kernels import paging, rows

COLUMNS = 64
"""Columns of one block: part of the numerics, the same on every device and in every route."""

LOG2E = math.log2(math.e)

FLOOR = -3.0e38
"""Stands for a maximum of -inf, so that -inf - maximum is -inf and not NaN."""


def _by_double(a: Tensor, b: Tensor) -> Tensor:
    return torch.bmm(a.double(), b.double()).float()


@cache
def batched_product(batch: int, m: int, n: int, k: int, transposed: bool, unit: int) -> Callable[[Tensor, Tensor], Tensor]:
    """Return a float32 product a [batch, m, k] . b [batch, k, n] whose bits depend neither on place nor on neighbours.

    What moves is a group of `unit` rows of a together with the entry of b it meets: the same group in every entry, at every multiple
    of `unit`, among random neighbours must give the same bits. `transposed`: b is a transposed view of [batch, n, k]. Probed once a
    shape, like `rows.product`. Raises rows.RowDependenceError naming the shape when neither float32 nor float64 arithmetic qualifies.
    """
    generator = torch.Generator().manual_seed(((batch * 1_009 + m) * 1_009 + n) * 1_009 + k)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    group, other = draw(unit, k), draw(n, k) if transposed else draw(k, n)
    for method in (torch.bmm, _by_double):
        seen: Tensor | None = None
        for place in range(batch * (m // unit)):
            entry, at = place % batch, slice(place // batch * unit, place // batch * unit + unit)
            a, b = draw(batch, m, k), draw(batch, *other.shape)
            a[entry, at], b[entry] = group, other
            got = method(a, b.transpose(1, 2) if transposed else b)[entry, at]
            if seen is not None and not torch.equal(seen, got):
                break
            seen = got
        else:
            return method
    raise rows.RowDependenceError(f"attention: no place-independent product for batch {batch}, [{m},{k}]x[{k},{n}]; use another tile size")


def exp2(x: Tensor) -> Tensor:
    """2^x, place-independent; exactly 1 at 0 and 0 at -inf."""
    return rows.elementwise(torch.exp2, x)


def log2(x: Tensor) -> Tensor:
    """log2(x), place-independent."""
    return rows.elementwise(torch.log2, x)


def block_softmax(scores: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return (p, w, l, lse) of base-2 scores f32[NB, ..., 64], -inf where masked (formulas above).

    p f32[NB, ..., 64] and w f32[NB, ..., 1] are relative to the block's and the row's maximum; l f32[..., 1] and lse f32[...] are
    merged over the blocks in ascending order. A row without columns: p = w = l = 0 and lse = -inf.
    """
    top = scores.amax(-1, keepdim=True)
    p = exp2(scores - top.clamp_min(FLOOR))
    sums = rows.row_sum(p)
    peak = top.amax(0).clamp_min_(FLOOR)
    w = exp2(top - peak)
    parts = w * sums
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return p, w, total, (peak + log2(total)).squeeze(-1)


def _attend(
    queries: Tensor, place: Tensor, mask: Tensor, owned: Tensor, last: int, k_cache: Tensor, v_cache: Tensor, unit: int
) -> tuple[Tensor, Tensor]:
    """Attention of one tile: R rows, or T rows that share their K and V (then R = 1), of HK kv heads with G query heads each.

    queries f32[R * HK, T * G, D], scaled; place i64[NB, R * HK, C] rows of the caches viewed as [B * P * HK, D], C = 64 columns;
    mask bool[NB, R, 1, T, 1, C] columns a row sees, contiguous because the scores take its layout; owned bool[NB, R, 1, C, 1] columns
    whose V may be used at all; last: the last column anyone sees. Returns (o f32[R, HK, T, G, D] normalised, lse f32[R, HK, T, G]).
    """
    entries, q, d = queries.shape
    count, r, _, t, _, _ = mask.shape
    heads = (r, entries // r, t, q // t)
    tail = last + 1 - (count - 1) * COLUMNS

    def gather(cache: Tensor, b: int) -> Tensor:
        if b == count - 1 and tail <= COLUMNS // 2:  # often three tokens: do not fetch what is masked anyway
            near = torch.zeros(entries, COLUMNS, d)
            near[:, :tail] = cache.view(-1, d).index_select(0, place[b, :, :tail].reshape(-1)).view(entries, tail, d)
            return near
        return cache.view(-1, d).index_select(0, place[b].reshape(-1)).float().view(entries, COLUMNS, d)

    dot = batched_product(entries, q, COLUMNS, d, True, unit)
    scores = torch.stack([dot(queries, gather(k_cache, b).transpose(1, 2)) for b in range(count)])
    p, w, total, lse = block_softmax(torch.where(mask, scores.view(count, *heads, COLUMNS), -math.inf))
    if v_cache.dtype == torch.float16:
        p = p.half().float()
    p, w = p.view(count, entries, q, COLUMNS), w.view(count, entries, q, 1)
    mix = batched_product(entries, q, d, COLUMNS, False, unit)

    def weigh(clean: bool) -> Tensor:
        o = torch.zeros_like(queries)
        for b in range(count):
            v = gather(v_cache, b)
            if clean:
                v = torch.where(owned[b], v.view(*heads[:2], COLUMNS, d), 0.0).view(v.shape)
            o.add_(mix(p[b], v).mul_(w[b]))
        return o

    # A masked column meets p = 0: nothing, if its V is finite. Memory nobody owns may hold anything, and would show in the sum.
    o = weigh(False)
    if not math.isfinite(o.sum().item()):
        o = weigh(True)
    # The largest p and its block's w are 1, so l >= 1, or 0 for a row without columns: o is 0 then.
    return o.view(*heads, d) / total.clamp_min(1.0), lse


def _place(cells: paging.Ints, kv_heads: int) -> Tensor:
    """Return [NB, R * HK, 64] rows of a cache viewed as [B * P * HK, D] for cells [NB, R, 64]."""
    count, r, _ = cells.shape
    place = np.multiply(cells[:, :, None], kv_heads) + np.arange(kv_heads)[:, None]
    return torch.from_numpy(place.reshape(count, r * kv_heads, COLUMNS))


def _selected_tile(
    q: Tensor, tokens: paging.Ints, table: paging.Ints, k_cache: Tensor, v_cache: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """One tile of `selected`: q [R, HQ, D], tokens [R, NB * 64], table from paging.tables -> (o f32[R, HQ, D], lse f32[R, HQ])."""
    r, hq, d = q.shape
    _, page, hk, _ = k_cache.shape
    cells, valid = paging.locate(tokens, table, page)
    last = valid.any(0).tobytes().rfind(True)  # -1: no column at all
    count = last // COLUMNS + 1
    if count == 0:
        return torch.zeros(r, hq, d), torch.full((r, hq), -math.inf)
    place = _place(cells.reshape(r, -1, COLUMNS).swapaxes(0, 1)[:count], hk)
    seen = np.ascontiguousarray(valid.reshape(r, -1, COLUMNS).swapaxes(0, 1)[:count])
    mask = torch.from_numpy(seen).view(count, r, 1, 1, 1, COLUMNS)
    queries = (q.float() * (scale * LOG2E)).view(r * hk, hq // hk, d)
    o, lse = _attend(queries, place, mask, mask.view(count, r, 1, COLUMNS, 1), last, k_cache, v_cache, hq // hk)
    return o.view(r, hq, d), lse.view(r, hq)


def selected(
    q: Tensor, sel: Tensor, request: Tensor, k_cache: Tensor, v_cache: Tensor, block_table: Tensor, scale: float, tile: int
) -> tuple[Tensor, Tensor]:
    """Attention of each row over its own selection, in tiles of `tile` rows.

    q act[M, HQ, D]; sel i32[M, W] token numbers, each at most once a row, negative = none; request i32[M] rows of block_table
    i32[N, P]; caches [B, page, HK, D]. Returns (o f32[M, HQ, D] normalised, lse f32[M, HQ] base 2).
    """
    m, hq, d = q.shape
    out, lse = [], []
    for at in range(0, m, tile):
        part = slice(at, min(at + tile, m))
        tokens = np.full((tile, -(-sel.shape[1] // COLUMNS) * COLUMNS), -1)
        tokens[: part.stop - at, : sel.shape[1]] = sel[part].numpy()
        table = paging.tables(block_table, rows.pad_rows(request[part], tile), k_cache.shape[0])
        o, e = _selected_tile(rows.pad_rows(q[part], tile), tokens, table, k_cache, v_cache, scale)
        out.append(o[: part.stop - at])
        lse.append(e[: part.stop - at])
    if len(out) == 1:
        return out[0], lse[0]
    return (torch.cat(out), torch.cat(lse)) if out else (torch.zeros(0, hq, d), torch.zeros(0, hq))


def causal(
    q: Tensor, position: Tensor, table: paging.Ints, k_cache: Tensor, v_cache: Tensor, scale: float, rank: int, world: int
) -> tuple[Tensor, Tensor]:
    """Dense causal attention of one tile: T rows of one request over its local columns; column c is token c * world + rank.

    q act[T, HQ, D]; position i32[T], negative = no columns; table [1, 1 + P + 1] of the request from paging.tables; caches
    [B, page, HK, D]. Returns (o f32[T, HQ, D] normalised, lse f32[T, HQ] base 2).
    """
    t, hq, d = q.shape
    _, page, hk, _ = k_cache.shape
    group = hq // hk
    last = (int(position.max()) - rank) // world  # local column; -1 where the rank has none
    count = last // COLUMNS + 1
    if last < 0:
        return torch.zeros(t, hq, d), torch.full((t, hq), -math.inf)
    local = np.arange(count * COLUMNS)
    cells, valid = paging.locate(local[None], table, page)
    owned = (valid[0] & (local <= last)).reshape(count, 1, COLUMNS)  # past the last token the page may hold anything
    seen = owned & ((local * world + rank).reshape(count, 1, COLUMNS) <= position.numpy()[:, None])
    mask = torch.from_numpy(seen).view(count, 1, 1, t, 1, COLUMNS)
    queries = (q.float() * (scale * LOG2E)).view(t, hk, group, d).transpose(0, 1).reshape(hk, t * group, d)
    usable = torch.from_numpy(owned).view(count, 1, 1, COLUMNS, 1)
    o, lse = _attend(queries, _place(cells.reshape(count, 1, COLUMNS), hk), mask, usable, last, k_cache, v_cache, group)
    return o.view(hk, t, group, d).transpose(0, 1).reshape(t, hq, d), lse.view(hk, t, group).transpose(0, 1).reshape(t, hq)

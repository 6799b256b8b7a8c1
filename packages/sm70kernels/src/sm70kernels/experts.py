"""Arithmetic shared by the references of moe_qpn (16-row tiles) and moe_gemm (64-row tiles).

Per route r of row m, with expert e = ids[m, r]:

    gate, up = W13_e · x     a = silu(gate) · up     y_r = W2_e · a     routed = Σ_r weight_r · y_r

and, when there is a shared expert, out = routed + sigmoid(w_g · x) · W2_s (silu(gate_s) · up_s).

The bank of W13 is [X, 2I, E]. That of W2 is [E, X, I], so that all experts side by side are one matrix [E, X·I]: the float32 form below
multiplies by it once, with the activations of each row's experts in their place and zeros in every other. W2 must be finite: a
zero times an infinite weight would reach rows that never chose the expert. W13 may hold anything.

Rounding points (activation dtype): gate, up, silu(gate), the product a, every y_r, the shared expert's y, its gate logit and its
gated value, the folded sum, the output. Sums are float32; where every y_r is rounded, routes are added in slot order. silu(-inf) is
-0, its limit: a float16 gate that overflowed downwards must not turn the row into NaN.

A route with id < 0 or id >= X contributes nothing, whatever its weight. Rows never meet: a tile of x holds rows side by side,
padding rows are zeros, and masking replaces values instead of multiplying them.
"""

from functools import cache

import torch
from torch import Tensor

from sm70kernels import rows
from sm70kernels.streams import constant, fold, rounded, stored, widened

DENSE_WEIGHTS = 1 << 20
"""Largest bank, in weights (3·X·I·E), for which every expert runs on every row: no grouping, a handful of calls. Larger banks run only
the experts that were chosen. The form depends on the shapes of the bank alone, never on the rows or their routes."""

DENSE_ROWS = 64
"""Rows that run through all experts before the next ones do: whole tiles, few enough that X·2I·64 intermediate values stay in cache."""

GATE_FLOOR = -1000.0
"""silu(x) is -0 for every x below about -104, so clamping here changes nothing but silu(-inf)."""


def moe(
    x: Tensor, ids: Tensor, weights: Tensor, w13: Tensor, w2: Tensor, shared: tuple[Tensor, Tensor, Tensor] | None, tile: int
) -> Tensor:
    """Return out act [M, E] by the formula above; shared holds shared13, shared2 and shared_gate. Shapes are those of the ops."""
    experts, both, hidden = w13.shape
    if 3 * experts * both * hidden > 2 * DENSE_WEIGHTS:
        routed = _grouped(x, ids, weights, w13, w2, tile)
    else:
        dense = _dense if x.dtype == torch.float32 else _dense_rounded
        w13, w2 = widened(w13), widened(w2)
        if x.shape[0] <= DENSE_ROWS:
            routed = dense(x, ids, weights, w13, w2, tile)
        else:
            blocks = zip(x.split(DENSE_ROWS), ids.split(DENSE_ROWS), weights.split(DENSE_ROWS), strict=True)
            routed = torch.cat([dense(*block, w13, w2, tile) for block in blocks])
    return stored(routed if shared is None else routed.add_(_shared(x, *shared, tile)), x.dtype)


def swiglu(both: Tensor, dtype: torch.dtype) -> Tensor:
    """Return silu(gate) · up of both [..., 2I] = gate | up, float32 values rounded to dtype at each of the three points: [..., I]."""
    width = both.shape[-1] // 2
    gate, up = rounded(both, dtype).split_with_sizes((width, width), -1)
    return rounded(rounded(rows.silu(torch.maximum(gate, constant(GATE_FLOOR))), dtype).mul_(up), dtype)


def _shared(x: Tensor, w13: Tensor, w2: Tensor, gate: Tensor, tile: int) -> Tensor:
    """The shared expert of every row, gated: [M, E]."""
    y = rounded(rows.linear(swiglu(rows.linear(x, w13, tile), x.dtype), w2, tile), x.dtype)
    logit = rounded(rows.linear(x, gate, tile), x.dtype)
    # Two copies side by side: the 32 values of a decode tile are what the sigmoid takes without padding.
    share = rows.sigmoid(torch.cat((logit, logit), 1)).narrow(1, 0, 1)
    return rounded(y.mul_(share), x.dtype)


def _places(ids: Tensor, experts: int) -> tuple[Tensor, Tensor | None]:
    """The place row·X + id of every route among M·X blocks, i64 [M·K], and which routes are valid, bool [M·K]; None when all are.

    An invalid route gets some place of its row; the caller must drop it or replace what comes of it.
    """
    known = ids.clamp(0, experts - 1)
    valid = None if torch.equal(known, ids) else (known == ids).view(-1)
    return (known + _firsts(ids.shape[0], experts)).view(-1), valid


@cache
def _firsts(m: int, experts: int) -> Tensor:
    """The first place of each of m <= DENSE_ROWS rows: i64 [m, 1]; never written to."""
    return torch.arange(0, m * experts, experts).view(m, 1)


def _activations(x: Tensor, place: Tensor, w13: Tensor, tile: int) -> Tensor:
    """Run every expert's first product on every row and finish what lies at `place`: [routes, I]."""
    experts, both, hidden = w13.shape
    every = rows.linear(x, w13.view(experts * both, hidden), tile)
    return swiglu(every.view(x.shape[0] * experts, both).index_select(0, place), x.dtype)


def _dense(x: Tensor, ids: Tensor, weights: Tensor, w13: Tensor, w2: Tensor, tile: int) -> Tensor:
    """The weighted sum of the routes [M, E], without rounding points: activations are weighted, then one product adds all experts."""
    m, (hidden, experts, width) = x.shape[0], w2.shape
    place, valid = _places(ids, experts)
    weights = weights.view(-1)
    if valid is not None:
        place, weights = place[valid], weights[valid]
    # Experts that were not chosen keep their zeros, so what they made of x reaches nobody. Routes of a row to the same expert have the
    # same activations, whichever is copied last; their weights add up, in slot order.
    blocks = m * experts
    spread = x.new_zeros(blocks, width).index_copy_(0, place, _activations(x, place, w13, tile))
    spread.mul_(x.new_zeros(blocks).index_add_(0, place, weights).view(blocks, 1))
    return rows.linear(spread.view(m, experts * width), w2.view(hidden, experts * width), tile)


def _dense_rounded(x: Tensor, ids: Tensor, weights: Tensor, w13: Tensor, w2: Tensor, tile: int) -> Tensor:
    """The weighted sum of the routes [M, E] with every y_r rounded: one second product per expert. w13 and w2 are widened."""
    m, (hidden, experts, width) = x.shape[0], w2.shape
    place, valid = _places(ids, experts)
    spread = w2.new_zeros(m * experts, width).index_copy_(0, place, _activations(x, place, w13, tile))
    y = _down(spread.view(m, experts, width), w2, tile).view(m * experts, hidden).index_select(0, place)
    return _fold_routes(y.view(*ids.shape, hidden), weights, None if valid is None else valid.view(ids.shape), x.dtype)


def _grouped(x: Tensor, ids: Tensor, weights: Tensor, w13: Tensor, w2: Tensor, tile: int) -> Tensor:
    """The weighted sum of the routes [M, E]: each chosen expert runs on its routes, in ascending (expert, route) order."""
    (hidden, experts, _), slots, flat = w2.shape, ids.shape[1], ids.reshape(-1)
    y = torch.zeros(flat.numel(), hidden)
    order = torch.argsort(flat, stable=True)
    chosen, counts = torch.unique_consecutive(flat[order], return_counts=True)
    for expert, routes in zip(chosen.tolist(), torch.split(order, counts.tolist()), strict=True):
        if 0 <= expert < experts:
            a = swiglu(rows.linear(x[routes // slots], w13[expert], tile), x.dtype)
            y[routes] = rows.linear(a, w2[:, expert].contiguous(), tile)
    return _fold_routes(y.view(*ids.shape, hidden), weights, (ids >= 0) & (ids < experts), x.dtype)


def _fold_routes(y: Tensor, weights: Tensor, valid: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Σ_r weight_r · y_r of y [M, K, E] in slot order, y and the sum rounded: [M, E]. Routes that are not valid count as zero."""
    parts = weights.unsqueeze(-1) * rounded(y, dtype)
    if valid is not None:
        parts.masked_fill_(~valid.unsqueeze(-1), 0.0)
    return rounded(fold(parts), dtype)


def _down(a: Tensor, w2: Tensor, tile: int) -> Tensor:
    """Every expert's second product: a [M, X, I] by w2 [E, X, I] -> [M, X, E]."""
    hidden, experts, width = w2.shape
    if batched(experts, tile, hidden, width):
        parts = [_bmm(part, w2) for part in torch.split(rows.pad_rows(a, tile), tile)]
        every = parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
    else:
        every = torch.stack([rows.linear(a[:, e], w2[:, e].contiguous(), tile) for e in range(experts)])
    return every[:, : a.shape[0]].transpose(0, 1).contiguous()


def _bmm(a: Tensor, w: Tensor) -> Tensor:
    """a [tile, X, K] by w [N, X, K] per expert: [X, tile, N]."""
    return torch.bmm(a.transpose(0, 1), w.permute(1, 2, 0))


@cache
def batched(experts: int, tile: int, n: int, k: int) -> bool:
    """Whether one batched product of `experts` tiles [tile, k] by [n, k]ᵀ keeps a row's bits at every position, among any neighbours."""
    generator = torch.Generator().manual_seed(tile * 1_000_003 + n * 1_009 + k)
    w = torch.randn(n, experts, k, generator=generator)
    row = torch.randn(experts, k, generator=generator)
    seen: Tensor | None = None
    for position in range(tile):
        for a in (torch.zeros(tile, experts, k), torch.randn(tile, experts, k, generator=generator)):
            a[position] = row
            got = _bmm(a, w)[:, position]
            if seen is not None and not torch.equal(seen, got):
                return False
            seen = got
    return True

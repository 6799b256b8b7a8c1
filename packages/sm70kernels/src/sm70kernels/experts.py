"""Arithmetic shared by the references of moe_qpn (16-row tiles) and moe_gemm (64-row tiles).

Per route r of row m, with expert e = ids[m, r]:

    gate, up = W13_e · x     a = silu(gate) · up     y_r = W2_e · a     routed = Σ_r weight_r · y_r

and, when there is a shared expert, out = routed + sigmoid(w_g · x) · W2_s (silu(gate_s) · up_s).

Rounding points (activation dtype): gate, up, silu(gate), the product a, every y_r, the shared expert's y, its gate logit and its
gated value, the folded sum, the output. Sums are float32; routes are added in slot order. silu(-inf) is -0, its limit: a float16
gate that overflowed downwards must not turn the row into NaN.

A route with id < 0 or id >= X contributes nothing, whatever its weight. Rows never meet: a tile of x holds rows side by side,
padding rows are zeros, and masking replaces values instead of multiplying them.
"""

from functools import cache

import torch
from torch import Tensor

from sm70kernels import rows
from sm70kernels.streams import fold, rounded, stored

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
    known = ids.clamp(0, experts - 1)
    small = 3 * experts * both * hidden <= 2 * DENSE_WEIGHTS
    y = _dense(x, known, w13, w2, tile) if small else _grouped(x, ids, w13, w2, tile)
    parts = weights.unsqueeze(-1) * rounded(y, x.dtype)
    if not torch.equal(known, ids):
        parts.masked_fill_((known != ids).unsqueeze(-1), 0.0)
    routed = rounded(fold(parts), x.dtype)
    return stored(routed if shared is None else routed + _shared(x, *shared, tile), x.dtype)


def swiglu(both: Tensor, dtype: torch.dtype) -> Tensor:
    """Return silu(gate) · up of both [..., 2I] = gate | up, float32 values rounded to dtype at each of the three points: [..., I]."""
    gate, up = rounded(both, dtype).chunk(2, dim=-1)
    return rounded(rounded(rows.silu(gate.clamp(min=GATE_FLOOR)), dtype).mul_(up), dtype)


def _shared(x: Tensor, w13: Tensor, w2: Tensor, gate: Tensor, tile: int) -> Tensor:
    """The shared expert of every row, gated: [M, E]."""
    y = rounded(rows.linear(swiglu(rows.linear(x, w13, tile), x.dtype), w2, tile), x.dtype)
    return rounded(y * rows.sigmoid(rounded(rows.linear(x, gate, tile), x.dtype)), x.dtype)


def _dense(x: Tensor, ids: Tensor, w13: Tensor, w2: Tensor, tile: int) -> Tensor:
    """Run every expert on every row and pick the routes: y [M, K, E]. ids must be valid."""
    m, (experts, both, hidden) = x.shape[0], w13.shape
    w13, w2 = w13.float(), w2.float()
    if m > DENSE_ROWS:
        blocks = [slice(first, first + DENSE_ROWS) for first in range(0, m, DENSE_ROWS)]
        return torch.cat([_dense(x[block], ids[block], w13, w2, tile) for block in blocks])
    a = swiglu(rows.linear(x, w13.view(experts * both, hidden), tile).view(m, experts, both), x.dtype)
    every = _down(a, w2, tile)
    return every[ids, torch.arange(m).unsqueeze(1)]


def _grouped(x: Tensor, ids: Tensor, w13: Tensor, w2: Tensor, tile: int) -> Tensor:
    """Run each chosen expert on its routes, in ascending (expert, route) order: y [M, K, E], 0 for invalid ids."""
    slots, flat = ids.shape[1], ids.reshape(-1)
    y = torch.zeros(flat.numel(), w2.shape[1])
    order = torch.argsort(flat, stable=True)
    chosen, counts = torch.unique_consecutive(flat[order], return_counts=True)
    for expert, routes in zip(chosen.tolist(), torch.split(order, counts.tolist()), strict=True):
        if 0 <= expert < w13.shape[0]:
            a = swiglu(rows.linear(x[routes // slots], w13[expert], tile), x.dtype)
            y[routes] = rows.linear(a, w2[expert], tile)
    return y.view(*ids.shape, w2.shape[1])


def _down(a: Tensor, w2: Tensor, tile: int) -> Tensor:
    """Every expert's down product: a [M, X, I] by w2 [X, E, I] -> [X, M, E]."""
    experts, hidden, width = w2.shape
    m = a.shape[0]
    if not batched(experts, tile, hidden, width):
        return torch.stack([rows.linear(a[:, e], w2[e], tile) for e in range(experts)])
    if m == tile:
        return _bmm(a, w2)
    parts = [_bmm(part, w2) for part in torch.split(rows.pad_rows(a, tile), tile)]
    return (parts[0] if len(parts) == 1 else torch.cat(parts, dim=1))[:, :m]


def _bmm(a: Tensor, w: Tensor) -> Tensor:
    """a [tile, X, K] by w [X, N, K] per expert: [X, tile, N]."""
    return torch.bmm(a.transpose(0, 1), w.transpose(1, 2))


@cache
def batched(experts: int, tile: int, n: int, k: int) -> bool:
    """Whether one batched product of `experts` tiles [tile, k] by [n, k]ᵀ keeps a row's bits at every position, among any neighbours."""
    generator = torch.Generator().manual_seed(tile * 1_000_003 + n * 1_009 + k)
    w = torch.randn(experts, n, k, generator=generator)
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

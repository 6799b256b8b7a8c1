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

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sm70kernels import rows
from sm70kernels.rows import Floats
from sm70kernels.streams import fold, rounded

Ids = NDArray[np.int32]
Places = NDArray[np.int64]

DENSE_WEIGHTS = 1 << 20
"""Largest bank, in weights (3·X·I·E), for which every expert runs on every row: no grouping, a handful of calls. Larger banks run only
the experts that were chosen. The form depends on the shapes of the bank alone, never on the rows or their routes."""

DENSE_ROWS = 64
"""Rows that run through all experts before the next ones do: whole tiles, few enough that X·2I·64 intermediate values stay in cache."""

GATE_FLOOR = np.float32(-1000.0)
"""silu(x) is -0 for every x below about -104, so clamping here changes nothing but silu(-inf)."""


@np.errstate(all="ignore")  # infinities and NaN are data
def moe(
    x: Tensor, ids: Tensor, weights: Tensor, w13: Tensor, w2: Tensor, shared: tuple[Tensor, Tensor, Tensor] | None, tile: int
) -> Tensor:
    """Return out act [M, E] by the formula above; shared holds shared13, shared2 and shared_gate. Shapes are those of the ops."""
    act, (experts, both, hidden) = x.dtype, w13.shape
    wide, chosen, share, up, down = rows.floats(x), ids.numpy(), weights.numpy(), rows.floats(w13), rows.floats(w2)
    if 3 * experts * both * hidden > 2 * DENSE_WEIGHTS:
        routed = _grouped(wide, chosen, share, up, down, tile, act)
    else:
        dense = _dense if act is torch.float32 else _dense_rounded
        if len(wide) <= DENSE_ROWS:
            routed = dense(wide, chosen, share, up, down, tile, act)
        else:
            blocks = [slice(at, at + DENSE_ROWS) for at in range(0, len(wide), DENSE_ROWS)]
            routed = np.concatenate([dense(wide[block], chosen[block], share[block], up, down, tile, act) for block in blocks])
    if shared is not None:
        shared13, shared2, gate = shared
        routed += _shared(wide, rows.floats(shared13), rows.floats(shared2), rows.floats(gate), tile, act)
    return rows.tensor(routed, act)


def swiglu(both: Floats, dtype: torch.dtype) -> Floats:
    """Return silu(gate) · up of both [..., 2I] = gate | up, float32 values rounded to dtype at each of the three points: [..., I]."""
    width = both.shape[-1] // 2
    both = rounded(both, dtype)
    a = rounded(rows.swish(np.maximum(both[..., :width], GATE_FLOOR)), dtype)
    a *= both[..., width:]
    return rounded(a, dtype)


def _shared(x: Floats, w13: Floats, w2: Floats, gate: Floats, tile: int, act: torch.dtype) -> Floats:
    """The shared expert of every row, gated: [M, E]."""
    y = rounded(rows.multiply(swiglu(rows.multiply(x, w13, tile), act), w2, tile), act)
    y *= rows.logistic(rounded(rows.multiply(x, gate, tile), act))
    return rounded(y, act)


def _places(ids: Ids, experts: int) -> tuple[Places, NDArray[np.bool_] | None]:
    """The place row·X + id of every route among M·X blocks, [M·K], and which routes are valid, [M·K]; None when all are.

    An invalid route gets some place of its row; the caller must drop it or replace what comes of it.
    """
    valid = ids.view(np.uint32) < experts  # as unsigned numbers, negative ids are large
    if b"\0" not in valid.tobytes():  # all of them; a third of what valid.all() takes
        return (ids + _firsts(len(ids), experts)).reshape(-1), None
    return (np.where(valid, ids, 0) + _firsts(len(ids), experts)).reshape(-1), valid.reshape(-1)


@cache
def _firsts(m: int, experts: int) -> Places:
    """The first place of each of m <= DENSE_ROWS rows, [m, 1]; never written to."""
    return np.arange(0, m * experts, experts, dtype=np.int64)[:, None]


def _activations(x: Floats, place: Places, w13: Floats, tile: int, act: torch.dtype) -> Floats:
    """Run every expert's first product on every row, or only what is needed, and finish what lies at `place`: [routes, I]."""
    experts, both, hidden = w13.shape
    if tile > rows.TILE["decode"] or both * hidden > rows.UNTHREADED:
        every = rows.multiply(x, w13.reshape(experts * both, hidden), tile)
        return swiglu(every.reshape(-1, both).take(place, 0), act)
    # One matrix-vector product a row and expert: the same call in both forms, hence the same bits.
    if len(place) > experts:
        return swiglu(np.matmul(w13, x[:, None, :, None]).reshape(-1, both).take(place, 0), act)
    # A lone request chooses few experts, and reading the others' weights takes longer than a loop over its routes.
    some = np.empty((len(place), both), np.float32)
    for out, at in zip(some, place.tolist(), strict=True):
        np.matmul(w13[at % experts], x[at // experts], out=out)
    return swiglu(some, act)


def _dense(x: Floats, ids: Ids, weights: Floats, w13: Floats, w2: Floats, tile: int, act: torch.dtype) -> Floats:
    """The weighted sum of the routes [M, E], without rounding points: activations are weighted, then one product adds all experts."""
    m, (hidden, experts, width) = len(x), w2.shape
    place, valid = _places(ids, experts)
    weights = weights.reshape(-1)
    if valid is not None:
        place, weights = place[valid], weights[valid]
    # Experts that were not chosen keep their zeros, so what they made of x reaches nobody. Routes of a row to the same expert have the
    # same activations, whichever is stored last; their weights add up, in slot order.
    spread = np.zeros((m * experts, width), np.float32)
    spread[place] = _activations(x, place, w13, tile, act)
    spread *= np.bincount(place, weights, m * experts).astype(np.float32)[:, None]
    return rows.multiply(spread.reshape(m, experts * width), w2.reshape(hidden, experts * width), tile)


def _dense_rounded(x: Floats, ids: Ids, weights: Floats, w13: Floats, w2: Floats, tile: int, act: torch.dtype) -> Floats:
    """The weighted sum of the routes [M, E] with every y_r rounded: one second product per expert."""
    m, (hidden, experts, width) = len(x), w2.shape
    place, valid = _places(ids, experts)
    spread = np.zeros((m * experts, width), np.float32)
    spread[place] = _activations(x, place, w13, tile, act)
    y = _down(spread.reshape(m, experts, width), w2, tile).reshape(m * experts, hidden).take(place, 0)
    return _fold_routes(y.reshape(*ids.shape, hidden), weights, None if valid is None else valid.reshape(ids.shape), act)


def _grouped(x: Floats, ids: Ids, weights: Floats, w13: Floats, w2: Floats, tile: int, act: torch.dtype) -> Floats:
    """The weighted sum of the routes [M, E]: each chosen expert runs on its routes, in ascending (expert, route) order."""
    (hidden, experts, _), slots, flat = w2.shape, ids.shape[1], ids.reshape(-1)
    y = np.zeros((flat.size, hidden), np.float32)
    order = flat.argsort(kind="stable")
    chosen, first = np.unique(flat[order], return_index=True)
    for expert, routes in zip(chosen.tolist(), np.split(order, first[1:]), strict=False):
        if 0 <= expert < experts:
            a = swiglu(rows.multiply(x[routes // slots], w13[expert], tile), act)
            y[routes] = rows.multiply(a, np.ascontiguousarray(w2[:, expert]), tile)
    return _fold_routes(y.reshape(*ids.shape, hidden), weights, (ids >= 0) & (ids < experts), act)


def _fold_routes(y: Floats, weights: Floats, valid: NDArray[np.bool_] | None, dtype: torch.dtype) -> Floats:
    """Σ_r weight_r · y_r of y [M, K, E] in slot order, y and the sum rounded: [M, E]. Routes that are not valid count as zero."""
    parts = weights[..., None] * rounded(y, dtype)
    if valid is not None:
        parts[~valid] = 0.0
    return rounded(fold(parts), dtype)


def _down(a: Floats, w2: Floats, tile: int) -> Floats:
    """Every expert's second product: a [M, X, I] by w2 [E, X, I] -> [M, X, E]."""
    hidden, experts, width = w2.shape
    if batched(experts, tile, hidden, width):
        w = torch.from_numpy(w2)
        parts = [_bmm(part, w) for part in torch.split(rows.pad_rows(torch.from_numpy(a), tile), tile)]
        every: Floats = np.concatenate([part.numpy() for part in parts], 1)
    else:
        every = np.stack([rows.multiply(a[:, e], np.ascontiguousarray(w2[:, e]), tile) for e in range(experts)])
    return np.ascontiguousarray(every[:, : len(a)].swapaxes(0, 1))


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

"""ple_apply: gate the n-gram embedding by the residual streams, convolve it over time, add it to the streams.

    K = norm(W_k · e; norm_key)     Q = norm(h; norm_query)     v = W_v · e        norms per stream, weight applied as 1 + w
    s = (Σ_e K ⊙ Q) / sqrt(E)       r = sign(s) · sqrt(max(|s|, 1e-6))             per stream; s = 0 gives r = 0
    gv = sigmoid(r) · v             c = norm(gv; norm_conv)
    y[t] = silu(Σ_i w[:, i] · c[t - dilation·(KW-1-i)])                            depthwise, taps in ascending i
    h <- h + (gv + y)

Rounding points: W_k·e, W_v·e and c to the activation dtype, h once; everything between in float32. c is rounded before its first use,
so a row reads the same c from its own call as a later call reads from the history. The history before a request is zero. Histories
after fewer rows than a request's last can be kept as well (sm70kernels.snapshots).
"""

import math

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sm70kernels import inputs, slots, snapshots
from sm70kernels import rows as arithmetic
from sm70kernels import window as windows
from sm70kernels.op import INV, Derived, Dim, Op, Ratio, Spec
from sm70kernels.rows import TILE, Floats, floats, logistic, multiply, swish
from sm70kernels.streams import rounded, stream_norm

FLOOR = np.float32(1e-6)
"""Lower limit of |s| under the square root."""


def _convolve(extended: Floats, taps: Floats, dilation: int) -> Floats:
    """The convolution before its silu: extended [L, HL+T, C] (history, then rows), taps [KW, C] -> [L, T, C]."""
    count = extended.shape[1] - (len(taps) - 1) * dilation
    total: Floats = extended[:, :count] * taps[0]
    for tap in range(1, len(taps)):
        total += extended[:, tap * dilation : tap * dilation + count] * taps[tap]
    return total


class _Live:
    """The requests that own rows, ascending, and the rows they own, request after request."""

    def __init__(self, first: list[int], slot: Tensor, rows: Tensor, fresh: Tensor, keep_slot: Tensor, keep_at: Tensor) -> None:
        held, counts = slot.tolist(), rows.tolist()
        owners = zip(first, held, counts, fresh.tolist(), strict=True)
        live = [(i, at, s, count, new) for i, (at, s, count, new) in enumerate(owners) if s >= 0 and count > 0]
        self.request = [i for i, _, _, _, _ in live]
        self.slot = [held for _, _, held, _, _ in live]
        self.count = [count for _, _, _, count, _ in live]
        self.fresh = [new for _, _, _, _, new in live]
        kept = snapshots.kept(keep_slot, keep_at, held, counts)
        self.kept = [one._replace(i=self.request.index(one.i)) for one in kept]  # among the live ones
        self.rows: NDArray[np.int64] = np.array([row for _, at, _, count, _ in live for row in range(at, at + count)], np.int64)

    def past(self, history: NDArray[np.generic]) -> Floats:
        """The history of each, [L, HL, C]; zero where it is fresh."""
        past: Floats = history.take(self.slot, 0).astype(np.float32, copy=False)
        if any(self.fresh):  # rare: the first step of a request
            past[np.flatnonzero(self.fresh)] = 0.0
        return past


def _first(m: int, requests: int) -> list[int]:
    """The first rows of N rectangles of T rows."""
    if m % max(requests, 1) or (m and not requests):
        raise ValueError(f"ple_apply: h axis 0: M={m} is not a multiple of slot axis 0: N={requests}; decode rows are N x T")
    return [i * (m // requests) for i in range(requests)]


def _decode(placed: Floats, live: _Live, requests: int, taps: Floats, dilation: int, pool: NDArray[np.generic], write: bool) -> Floats:
    """Return the convolution of the owned rows, [R, C], and move the histories on when `write`; placed [M, C] is 0 in all other rows."""
    (m, channels), depth = placed.shape, pool.shape[1]
    if not live.request:
        return np.zeros((0, channels), np.float32)
    width = m // requests
    extended = np.concatenate((live.past(pool), placed.reshape(requests, width, channels).take(live.request, 0)), 1)
    conv = _convolve(extended, taps, dilation)
    if min(live.count) == width:
        latest = extended[:, width:]
        conv = conv.reshape(-1, channels)
    else:
        latest = np.stack([sequence[count : count + depth] for sequence, count in zip(extended, live.count, strict=True)])
        conv = conv[np.arange(width) < np.array(live.count)[:, None]]
    if write:
        windows.keep(pool, extended, live.kept)
        pool[live.slot] = latest
    return conv


def _prefill(c: Floats, live: _Live, taps: Floats, dilation: int, pool: NDArray[np.generic], write: bool) -> Floats:
    """The same for rows in slices; c [R, C] holds the owned rows only, slice after slice."""
    conv, end = [np.zeros((0, c.shape[1]), np.float32)], 0
    for i, (past, held, count) in enumerate(zip(live.past(pool), live.slot, live.count, strict=True)):
        extended = np.concatenate((past, c[end : end + count]))
        end += count
        conv.append(_convolve(extended[None], taps, dilation)[0])
        if write:
            windows.keep(pool, extended[None], [one._replace(i=0) for one in live.kept if one.i == i])
            pool[held] = extended[count:]
    return np.concatenate(conv)


@np.errstate(all="ignore")  # infinities and NaN are data
def reference(
    h: Tensor,
    e: Tensor,
    key_w: Tensor,
    value_w: Tensor,
    norm_key: Tensor,
    norm_query: Tensor,
    norm_conv: Tensor,
    conv_w: Tensor,
    dilation: int,
    history: Tensor,
    slot: Tensor,
    start: Tensor,
    rows: Tensor,
    fresh: Tensor,
    keep_slot: Tensor,
    keep_at: Tensor,
    kind: str,
    write: bool,
    eps: float,
) -> Tensor:
    """Update h act [M, S, E] in place, and history when `write`; return c act [M, S·E], the rows a history takes in (0 for rows of nobody).

    e act [M, PE]; key_w act [S·E, PE]; value_w act [E, PE]; norm_* act [S, E]; conv_w act [S·E, KW];
    history act [SL, HL, S·E] with HL = (KW-1)·dilation, oldest row first; slot, start, rows, fresh i32 [N].

    kind "decode": M = N·T, request i owns the first rows[i] of its T rows and start is not read. kind "prefill": slice i owns rows
    start[i] .. start[i]+rows[i]-1. slot -1: the rows belong to nobody. Rows of nobody keep their h. fresh 1: the history reads as zero
    whatever the slot holds. With `write` the history of a request that owns rows becomes the last HL of (old history, owned rows).
    keep_slot and keep_at i32 [N, KS] are the pairs of sm70kernels.snapshots; they need `write`. Raises ValueError when N does not
    divide M in decode.
    """
    (m, streams, hidden), tile, dtype = h.shape, TILE[kind], h.dtype
    channels, requests = streams * hidden, slot.shape[0]
    first = _first(m, requests) if kind == "decode" else start.tolist()
    live = _Live(first, slot, rows, fresh, keep_slot, keep_at)
    mine, state, embedded = live.rows, h.view(m, channels).numpy(), floats(e)

    # The products run on whole tiles; everything after them on the rows that somebody owns.
    before = state.take(mine, 0).astype(np.float32, copy=False)
    key = rounded(multiply(embedded, floats(key_w), tile).take(mine, 0), dtype).reshape(-1, streams, hidden)
    key, query = stream_norm(key, floats(norm_key), eps), stream_norm(before.reshape(key.shape), floats(norm_query), eps)
    score = np.vecdot(key, query)
    score /= np.float32(math.sqrt(hidden))
    root = np.sqrt(np.maximum(np.abs(score), FLOOR))
    root *= np.sign(score)
    value = rounded(multiply(embedded, floats(value_w), tile).take(mine, 0), dtype)
    gated = logistic(root)[:, :, None] * value[:, None]
    c = rounded(stream_norm(gated, floats(norm_conv), eps), dtype).reshape(-1, channels)
    placed = np.zeros((m, channels), np.float32)
    placed[mine] = c
    pool, taps = history.numpy(), floats(conv_w).T
    if kind == "decode":
        conv = _decode(placed, live, requests, taps, dilation, pool, write)
    else:
        conv = _prefill(c, live, taps, dilation, pool, write)

    added = gated.reshape(-1, channels)
    added += swish(conv)
    added += before
    state[mine] = added
    return arithmetic.tensor(placed, dtype)


def _kind(draw: inputs.Draw) -> str:
    """decode when the drawn rows are a rectangle, else prefill."""
    requests = draw.dims["N"]
    return "decode" if requests and draw.dims["M"] % requests == 0 else "prefill"


def _start(draw: inputs.Draw) -> Tensor:
    """Ascending first rows, so that the slices of :func:`_rows` do not meet."""
    return torch.sort(torch.randint(0, draw.dims["M"] + 1, draw.shape, generator=draw.generator)).values.to(draw.dtype)


def _rows(draw: inputs.Draw) -> Tensor:
    """Up to T rows a request in decode, up to the next slice's first row in prefill."""
    if _kind(draw) == "decode":
        most = torch.full(draw.shape, draw.dims["M"] // draw.dims["N"])
    else:
        most = torch.cat([draw.made["start"][1:], torch.tensor([draw.dims["M"]])[: draw.shape[0]]]) - draw.made["start"]
    return (torch.rand(draw.shape, generator=draw.generator) * (most + 1)).to(draw.dtype)


ple_apply = Op(
    "ple_apply",
    reference=reference,
    determinism=INV,
    tolerance=Ratio(2.0),
    args=dict(
        h="act[M,S,E] inout",
        e="act[M,PE]",
        key_w="act[SE,PE]",
        value_w="act[E,PE]",
        norm_key="act[S,E]",
        norm_query="act[S,E]",
        norm_conv="act[S,E]",
        conv_w="act[SE,KW]",
        dilation="dim DIL",
        history="act[SL,HL,SE] inout",
        slot="i32[N]",
        start="i32[N]",
        rows="i32[N]",
        fresh="i32[N]",
        keep_slot="i32[N,KS]",
        keep_at="i32[N,KS]",
        kind="enum decode|prefill",
        write="bool",
        eps="float",
        c="act[M,SE] out",
    ),
    dims=dict(
        N=Dim(0, 4096, test=(0, 4)),
        M=Dim(0, 65536, test=("N", "4*N")),
        S=Spec(4, test=(1, 4)),
        E=Spec(2560, test=(24, 40)),
        PE=Spec(2560, test=(16, 32)),
        KW=Spec(4, test=(2, 4)),
        DIL=Spec(3, test=(1, 3)),
        HL=Derived("(KW-1)*DIL"),
        KS=Dim(0, 16, test=(0, 3)),
        SL=Dim(1, 1 << 20, test=("N*(KS+1)+1", "N*(KS+1)+2")),
        SE=Derived("S*E"),
    ),
    inputs=dict(
        key_w=inputs.normal(0.2),
        value_w=inputs.normal(0.2),
        norm_key=inputs.normal(0.1),
        norm_query=inputs.normal(0.1),
        norm_conv=inputs.normal(0.1),
        slot=slots.running,
        start=_start,
        rows=_rows,
        fresh=inputs.integers(0, 1),
        keep_slot=slots.snapshot,
        keep_at=slots.ascending(1),
        kind=_kind,
        eps=inputs.value(1e-6),
    ),
)

"""ple_apply: gate the n-gram embedding by the residual streams, convolve it over time, add it to the streams.

    K = norm(W_k · e; norm_key)     Q = norm(h; norm_query)     v = W_v · e        norms per stream, weight applied as 1 + w
    s = (Σ_e K ⊙ Q) / sqrt(E)       r = sign(s) · sqrt(max(|s|, 1e-6))             per stream; s = 0 gives r = 0
    gv = sigmoid(r) · v             c = norm(gv; norm_conv)
    y[t] = silu(Σ_i w[:, i] · c[t - dilation·(KW-1-i)])                            depthwise, taps in ascending i
    h <- h + (gv + y)

Rounding points: W_k·e, W_v·e and c to the activation dtype, h once; everything between in float32. c is rounded before its first use,
so a row reads the same c from its own call as a later call reads from the history. The history before a request is zero.
"""

import math
from functools import lru_cache

import torch
from torch import Tensor

from sm70kernels import inputs
from sm70kernels.op import INV, Derived, Dim, Op, Ratio, Spec
from sm70kernels.rows import TILE, linear, row_sum, sigmoid, silu
from sm70kernels.streams import constant, fold, rounded, stored, stream_norm, widened

FLOOR = 1e-6
"""Lower limit of |s| under the square root."""


def _convolve(extended: Tensor, taps: Tensor, dilation: int) -> Tensor:
    """The convolution before its silu: extended [N, HL+T, C] contiguous (history, then rows), taps [C, KW] -> f32 [N·T, C]."""
    (requests, length, channels), width = extended.shape, taps.shape[1]
    count = length - (width - 1) * dilation
    # windows[i, tap, t] is row t + tap · dilation of request i.
    steps = (length * channels, dilation * channels, channels, 1)
    windows = widened(extended).as_strided((requests, width, count, channels), steps)
    terms = windows * widened(taps).t().contiguous().unsqueeze(1)
    return fold(terms.reshape(requests, width, count * channels)).view(requests * count, channels)


@lru_cache(maxsize=64)
def _ascending(count: int) -> Tensor:
    """0 .. count-1, never written to."""
    return torch.arange(count)


def _live(slot: Tensor, rows: Tensor) -> Tensor:
    """The requests that own rows, i64 [L] ascending."""
    return (rows * (slot.clamp(min=0) == slot)).nonzero(as_tuple=True)[0]


def _rectangle(m: int, live: Tensor, slot: Tensor, rows: Tensor) -> Tensor:
    """Rows in N rectangles of T: the owned ones, i64 [R] ascending."""
    requests = slot.shape[0]
    if m % max(requests, 1) or (m and not requests):
        raise ValueError(f"ple_apply: h axis 0: M={m} is not a multiple of slot axis 0: N={requests}; decode rows are N x T")
    width = m // max(requests, 1)
    if width == 1:  # a live request owns its only row
        return live
    columns = _ascending(width)
    owned = columns < rows[live].unsqueeze(1)
    return (live.unsqueeze(1) * width + columns)[owned]


def _decode(
    c: Tensor, live: Tensor, taps: Tensor, dilation: int, history: Tensor, slot: Tensor, rows: Tensor, fresh: Tensor, write: bool
) -> Tensor:
    """Return the convolution of the owned rows, f32 [R, C], and move the histories on when `write`; c [M, C] is 0 in all other rows."""
    width, (depth, channels) = c.shape[0] // max(slot.shape[0], 1), history.shape[1:]
    held = slot.index_select(0, live).long()
    past = history.index_select(0, held)
    (anew,) = fresh.index_select(0, live).nonzero(as_tuple=True)
    if anew.shape[0]:  # rare: the first step of a request
        past.index_fill_(0, anew, 0.0)
    extended = torch.cat((past, c.view(slot.shape[0], width, channels).index_select(0, live)), 1)
    conv = _convolve(extended, taps, dilation)
    if width == 1:
        latest = extended.narrow(1, 1, depth)
    else:
        taken = rows[live]
        conv = conv[(_ascending(width) < taken.unsqueeze(1)).view(-1)]
        first = _ascending(live.shape[0]) * (depth + width) + taken
        latest = extended.flatten(0, 1)[first.unsqueeze(1) + _ascending(depth)]
    if write:
        history.index_copy_(0, held, latest)
    return conv


def _prefill(
    c: Tensor, live: Tensor, taps: Tensor, dilation: int, history: Tensor, slot: Tensor, rows: Tensor, fresh: Tensor, write: bool
) -> Tensor:
    """The same for rows in slices; c [R, C] holds the owned rows only, slice after slice."""
    conv = [torch.zeros(0, c.shape[1])]
    parts = c.split(rows[live].tolist()) if live.shape[0] else ()
    for held, anew, part in zip(slot[live].tolist(), fresh[live].tolist(), parts, strict=True):
        extended = torch.cat([torch.zeros_like(history[held]) if anew else history[held], part])
        conv.append(_convolve(extended.unsqueeze(0), taps, dilation))
        if write:
            history[held] = extended[part.shape[0] :]
    return torch.cat(conv)


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
    Raises ValueError when N does not divide M in decode.
    """
    (m, streams, hidden), tile, dtype = h.shape, TILE[kind], h.dtype
    channels, live = streams * hidden, _live(slot, rows)
    if kind == "decode":
        mine = _rectangle(m, live, slot, rows)
    else:
        spans = zip(start[live].tolist(), rows[live].tolist(), strict=True)
        mine = torch.cat([_ascending(0), *[torch.arange(first, first + count) for first, count in spans]])

    # The products run on whole tiles; everything after them on the rows that somebody owns. Key and query are normed in one go.
    key = rounded(linear(e, key_w, tile).index_select(0, mine), dtype).view(-1, streams, hidden)
    both = torch.stack((key, widened(h.index_select(0, mine))))
    key, query = stream_norm(both, torch.stack((norm_key, norm_query)).unsqueeze(1), eps)
    score = row_sum(key.mul_(query)).div_(constant(math.sqrt(hidden)))
    root = score.abs().clamp_(min=FLOOR).sqrt_().mul_(score.sign())
    value = rounded(linear(e, value_w, tile).index_select(0, mine), dtype)
    # One gate value for every element: whole vectors, which the sigmoid takes without padding.
    gated = sigmoid(root.expand(key.shape).contiguous()).mul_(value.unsqueeze(1))
    c = stored(stream_norm(gated, norm_conv, eps), dtype).view(-1, channels)
    placed = c.new_zeros(m, channels).index_copy_(0, mine, c)
    if kind == "decode":
        conv = _decode(placed, live, conv_w, dilation, history, slot, rows, fresh, write)
    else:
        conv = _prefill(c, live, conv_w, dilation, history, slot, rows, fresh, write)

    added = gated.view(-1, channels).add_(silu(conv))
    flat = h.view(m, channels)
    flat.index_copy_(0, mine, stored(added.add_(flat.index_select(0, mine)), dtype))
    return placed


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
        SL=Dim(1, 1 << 20, test=(1, 6)),
        SE=Derived("S*E"),
    ),
    inputs=dict(
        key_w=inputs.normal(0.2),
        value_w=inputs.normal(0.2),
        norm_key=inputs.normal(0.1),
        norm_query=inputs.normal(0.1),
        norm_conv=inputs.normal(0.1),
        slot=inputs.distinct("SL"),
        start=_start,
        rows=_rows,
        fresh=inputs.integers(0, 1),
        kind=_kind,
        eps=inputs.value(1e-6),
    ),
)

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

import torch
from torch import Tensor

from sm70kernels import inputs
from sm70kernels.op import INV, Derived, Dim, Op, Ratio, Spec
from sm70kernels.rows import TILE, linear, row_sum, sigmoid, silu
from sm70kernels.streams import rounded, stored, stream_norm

FLOOR = 1e-6
"""Lower limit of |s| under the square root."""


def _taps(extended: Tensor, taps: Tensor, dilation: int) -> Tensor:
    """The convolution before its silu: extended f32 [..., HL+T, C] (history, then rows), taps f32 [KW, C] -> f32 [..., T, C]."""
    count = extended.shape[-2] - (taps.shape[0] - 1) * dilation
    total = extended.narrow(-2, 0, count) * taps[0]
    for i in range(1, taps.shape[0]):
        total += extended.narrow(-2, i * dilation, count) * taps[i]
    return total


def _decode(
    c: Tensor, taps: Tensor, dilation: int, history: Tensor, slot: Tensor, rows: Tensor, fresh: Tensor, write: bool
) -> tuple[Tensor, Tensor]:
    """Rows in N rectangles of T: return (convolution f32 [M, C], owned bool [M]), and move the histories on when `write`."""
    requests, (m, channels) = slot.shape[0], c.shape
    if m % max(requests, 1) or (m and not requests):
        raise ValueError(f"ple_apply: h axis 0: M={m} is not a multiple of slot axis 0: N={requests}; decode rows are N x T")
    width = m // max(requests, 1)
    past = history.index_select(0, slot.clamp(min=0)).masked_fill_(fresh.bool().view(-1, 1, 1), 0.0)
    extended = torch.cat([past, c.view(requests, width, channels)], dim=1)
    taken = rows.masked_fill(slot < 0, 0)
    if write:
        movers = taken.nonzero().squeeze(1)
        first = movers * extended.shape[1] + taken[movers]
        latest = extended.flatten(0, 1)[first.unsqueeze(1) + torch.arange(history.shape[1])]
        history.index_copy_(0, slot[movers].long(), latest)
    owned = torch.arange(width) < taken.unsqueeze(1)
    return _taps(extended.float(), taps, dilation).view(m, channels), owned.view(m)


def _prefill(
    c: Tensor, taps: Tensor, dilation: int, history: Tensor, slot: Tensor, start: Tensor, rows: Tensor, fresh: Tensor, write: bool
) -> tuple[Tensor, Tensor]:
    """Rows in slices: the same results as :func:`_decode`."""
    conv, owned = torch.zeros(c.shape, dtype=torch.float32), torch.zeros(c.shape[0], dtype=torch.bool)
    for held, first, count, anew in zip(slot.tolist(), start.tolist(), rows.tolist(), fresh.tolist(), strict=True):
        if held < 0 or count == 0:
            continue
        mine = slice(first, first + count)
        extended = torch.cat([torch.zeros_like(history[held]) if anew else history[held], c[mine]])
        conv[mine] = _taps(extended.float(), taps, dilation)
        owned[mine] = True
        if write:
            history[held] = extended[count:]
    return conv, owned


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
    tile, dtype = TILE[kind], h.dtype
    wide = h.float()
    key = stream_norm(rounded(linear(e, key_w, tile), dtype).view(h.shape), norm_key, eps)
    score = row_sum(key * stream_norm(wide, norm_query, eps)) / math.sqrt(h.shape[2])
    gate = sigmoid(score.sign() * score.abs().clamp(min=FLOOR).sqrt())
    gated = gate * rounded(linear(e, value_w, tile), dtype).unsqueeze(1)
    c = stored(stream_norm(gated, norm_conv, eps), dtype).flatten(1)
    taps = conv_w.float().t().contiguous()
    if kind == "decode":
        conv, owned = _decode(c, taps, dilation, history, slot, rows, fresh, write)
    else:
        conv, owned = _prefill(c, taps, dilation, history, slot, start, rows, fresh, write)
    mine = owned.view(-1, 1, 1)
    h.copy_(torch.where(mine, wide + (gated + silu(conv).view(h.shape)), wide))
    return c.masked_fill_(~owned.unsqueeze(1), 0.0)


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

"""gdn_conv: causal depthwise convolution of KW taps with silu, over each request's stored inputs and its new rows.

    y_t = act( silu( sum_{j=0..KW-1} w[:, j] x_{t-KW+1+j} ) ),   taps ascending, float32

Inputs before the first row come from the request's window, the last KW-1 rows before the convolution, oldest first; they are zero
when `fresh` is 1. With `write` the window becomes the last KW-1 of (old window, the request's rows), so a sequence shorter than
the window shifts it; without rows it stays as it is. Windows after fewer rows can be kept as well (sm70kernels.snapshots).
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from sm70kernels import inputs, slots, snapshots
from sm70kernels import rows as arithmetic
from sm70kernels import window as windows
from sm70kernels.inputs import Draw
from sm70kernels.op import INV, Derived, Dim, Op, Ratio, Spec
from sm70kernels.snapshots import Kept

_ZERO = np.float32(0.0)


def _convolve(sequence: windows.Array, weight: Tensor) -> arithmetic.Floats:
    """Return silu of the convolution, [N, T, C], of sequence [N, KW-1+T, C] with weight [C, KW]."""
    taps = arithmetic.floats(weight).T
    sequence = sequence.astype(np.float32, copy=False)
    count = sequence.shape[1] - len(taps) + 1
    if count == 1:  # the same sum in one call: over any axis but the last, numpy adds whole rows to +0, one after another
        return arithmetic.swish(np.add.reduce(sequence * taps, 1, keepdims=True))
    total = sequence[:, :count] * taps[0]
    total += _ZERO  # -0 becomes +0, as in the sum above
    for j in range(1, len(taps)):
        total += sequence[:, j : j + count] * taps[j]
    return arithmetic.swish(total)


def _decode(
    x: Tensor, weight: Tensor, pool: windows.Array, slot: list[int], rows: list[int], fresh: list[int], kept: Sequence[Kept], write: bool
) -> Tensor:
    requests, (total, channels) = len(slot), x.shape
    if requests == 0 or total == 0:
        return x.new_zeros(total, channels)
    if total % requests:
        raise ValueError(f"gdn_conv: x axis 0: M={total} is not a multiple of slot axis 0: N={requests}; decode rows are N x T")
    width = total // requests
    owned = [n if s >= 0 else 0 for s, n in zip(slot, rows, strict=True)]
    if 0 in owned:
        # Padding is most of a small batch: nobody's rows are not worth the arithmetic.
        y = x.new_zeros(requests, width, channels)
        if some := arithmetic.active(owned):
            mine = x.view(requests, width, channels)[some].reshape(-1, channels)
            held, count, new = ([values[i] for i, n in enumerate(owned) if n] for values in (slot, rows, fresh))
            theirs = [one._replace(i=one.i - owned[: one.i].count(0)) for one in kept]
            y[some] = _decode(mine, weight, pool, held, count, new, theirs, write).view(-1, width, channels)
        return y.view(total, channels)
    sequence = windows.joined(pool[None], x.numpy().reshape(1, requests, width, channels), slot, fresh)
    out = _convolve(sequence[0], weight)
    if min(owned) < width:
        out[np.arange(width) >= np.array(owned)[:, None]] = 0.0
    if write:
        windows.keep(pool, sequence[0], kept)
        windows.store(pool[None], sequence, [s if n else -1 for s, n in zip(slot, owned, strict=True)], owned)
    return arithmetic.tensor(out.reshape(total, channels), x.dtype)


def _prefill(
    x: Tensor,
    weight: Tensor,
    pool: windows.Array,
    slot: list[int],
    start: list[int],
    rows: list[int],
    fresh: list[int],
    kept: Sequence[Kept],
    write: bool,
) -> Tensor:
    y = torch.zeros(x.shape, dtype=x.dtype)
    for i, (held, first, count, new) in enumerate(zip(slot, start, rows, fresh, strict=True)):
        if held < 0 or count == 0:
            continue
        mine = slice(first, first + count)
        sequence = windows.joined(pool[None], x[None, None, mine].numpy(), [held], [new])
        y[mine] = torch.from_numpy(_convolve(sequence[0], weight)[0])
        if write:
            windows.keep(pool, sequence[0], [one._replace(i=0) for one in kept if one.i == i])
            windows.store(pool[None], sequence, [held], [count])
    return y


@np.errstate(all="ignore")  # infinities and NaN are data
def reference(
    x: Tensor,
    weight: Tensor,
    window: Tensor,
    slot: Tensor,
    start: Tensor,
    rows: Tensor,
    fresh: Tensor,
    keep_slot: Tensor,
    keep_at: Tensor,
    kind: str,
    write: bool,
) -> Tensor:
    """Return y [M, C] in x's dtype from x [M, C], weight [C, KW], window [SL, KW-1, C] (written in place) and i32 [N] vectors.

    decode: M = N T, request i owns the first rows[i] of its T rows, start is not read. prefill: sequence i owns rows start[i] ..
    start[i] + rows[i] - 1. slot -1 is inactive. Rows that belong to nobody give 0. keep_slot and keep_at [N, KS] are the pairs of
    sm70kernels.snapshots; they need `write`. Raises ValueError when N does not divide M in decode.
    """
    pool, held, count, new = window.numpy(), slot.tolist(), rows.tolist(), fresh.tolist()
    kept = snapshots.kept(keep_slot, keep_at, held, count)
    if kind == "decode":
        return _decode(x, weight, pool, held, count, new, kept, write)
    return _prefill(x, weight, pool, held, start.tolist(), count, new, kept, write)


def _rows(draw: Draw) -> Tensor:
    """Counts that suit both kinds: at most M // N rows each."""
    counts: Tensor = inputs.integers(0, draw.dims["M"] // max(draw.dims["N"], 1))(draw)
    return counts


def _kind(draw: Draw) -> str:
    requests = draw.dims["N"]
    return "prefill" if requests == 0 or draw.dims["M"] % requests or draw.integer(0, 1) else "decode"


gdn_conv = Op(
    "gdn_conv",
    reference=reference,
    launch=None,
    determinism=INV,
    tolerance=Ratio(2.0),
    args=dict(
        x="act[M,C] strided",
        weight="act[C,KW]",
        window="act[SL,KW1,C] inout",
        slot="i32[N]",
        start="i32[N]",
        rows="i32[N]",
        fresh="i32[N]",
        keep_slot="i32[N,KS]",
        keep_at="i32[N,KS]",
        kind="enum decode|prefill",
        write="bool",
        y="act[M,C] out",
    ),
    dims=dict(
        M=Dim(0, 8192, test=(0, 24)),
        N=Dim(0, 64, test=(0, 5)),
        KS=Dim(0, 16, test=(0, 3)),
        SL=Dim(1, 1 << 20, test=("N*(KS+1)+1", "N*(KS+1)+3")),
        C=Spec(10240, 5120, 2560, test=(20, 64)),
        KW=Spec(4, test=(2, 4)),
        KW1=Derived("KW-1"),
    ),
    inputs=dict(
        slot=slots.running,
        start=slots.start(1),
        rows=_rows,
        fresh=inputs.integers(0, 1),
        keep_slot=slots.snapshot,
        keep_at=slots.ascending(1),
        kind=_kind,
    ),
)

"""qsa_compress: keep the raw index keys of the open block and pool a block's keys when its last token arrives.

For a row m at position p that closes a block of `ratio` tokens (p % ratio == ratio - 1):

    pooled = h(mean(raw[p - ratio + 1], .., raw[p]))             float32 sum in ascending position, times 1 / ratio
    keys[key_index[m]] = h(rope(h(RMS1p(pooled; weight))))       rotated at the position of the block's first token

raw[p - j] is row m - j of this call where that row belongs to the same request, else ring[slot, (p - j) % RR]. Afterwards every
row's raw key is stored at ring[slot, p % RR]. A block is pooled again whenever its closing position is processed again, so a
rejected draft's key never survives (kernels.md C9, model.md 2.6.1).
"""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sm70kernels import inputs, rotary
from sm70kernels.op import INV, Dim, Op, Ratio, Spec
from sm70kernels.rows import Floats

Array = NDArray[Any]


@np.errstate(all="ignore")  # infinities and NaN are data
def reference(
    ik: Tensor,
    position: Tensor,
    slot: Tensor,
    first: Tensor,
    key_index: Tensor,
    cos: Tensor,
    sin: Tensor,
    weight: Tensor,
    eps: float,
    ratio: int,
    ring: Tensor,
    keys: Tensor,
) -> None:
    """Update ring act[SL, RR, DI] and keys act[B, PK, DI] in place.

    ik act[M, DI] raw index keys; position, slot, first i32[M]: token number, ring slot (-1: padding row), row of the request's first
    row in this call (its rows are consecutive and so are their positions); key_index i64[M] flat into B * PK for rows that close a
    block, else -1; cos, sin act[M, RH] of the block's first token; weight act[DI]. Raises ValueError if RR < ratio.
    """
    if ring.shape[1] < ratio:
        raise ValueError(f"qsa_compress: the ring holds {ring.shape[1]} raw keys, a block needs {ratio}; allocate at least that many")
    size, width = ring.shape[1:]
    raw, cells = ik.numpy(), ring.numpy().reshape(-1, width)
    at, owner, begin = position.numpy(), slot.numpy(), first.numpy()
    held = slot.tolist()
    closing = [m for m, (target, s) in enumerate(zip(key_index.tolist(), held, strict=True)) if target >= 0 and s >= 0]
    deepest = max((m - f for m, f in enumerate(first.tolist())), default=0)
    # Few rows a request, as in a decode step: the ring has room for them beside every older key that they need.
    roomy = deepest <= size - ratio and min(held, default=-1) >= 0
    if roomy:
        cells[owner * size + at % size] = raw
    if closing:
        rows = np.array(closing)
        pooled = _mean(_block(raw, at, owner, begin, rows, ratio, cells, size, roomy)).astype(raw.dtype, copy=False)
        factors = (x.index_select(0, torch.from_numpy(rows)) for x in (cos, sin)) if len(rows) < len(raw) else (cos, sin)
        (key,) = rotary.norm_and_rotate([pooled[:, None]], [weight], eps, *factors)
        keys.numpy().reshape(-1, width)[key_index.numpy().take(rows)] = key.numpy()[:, 0]
    if not roomy:
        _remember(raw, at, owner, begin, cells, size)


def _block(raw: Array, at: Array, owner: Array, begin: Array, closing: Array, ratio: int, cells: Array, size: int, stored: bool) -> Array:
    """Return the raw keys [C, ratio, DI] of the blocks that rows `closing` [C] end; `stored`: the ring has those of this call too."""
    back = np.arange(ratio - 1, -1, -1)
    old = owner.take(closing)[:, None] * size + (at.take(closing)[:, None] - back) % size
    values: Array = cells.take(old, 0)
    if not stored:
        row = closing[:, None] - back
        here = row >= begin.take(closing)[:, None]
        values[here] = raw.take(row[here], 0)
    return values


def _mean(values: Array) -> Floats:
    """Return the float32 means [C, DI] of values [C, ratio, DI], summed in ascending order."""
    total: Floats = values[:, 0].astype(np.float32)
    for j in range(1, values.shape[1]):
        total += values[:, j]
    total *= np.float32(1.0 / values.shape[1])
    return total


def _remember(raw: Array, at: Array, owner: Array, begin: Array, cells: Array, size: int) -> None:
    """Store the raw key of every row that no later row of its request overwrites."""
    kept = owner >= 0
    if len(raw) > size:
        kept[:-size] &= (begin[size:] != begin[:-size]) | (owner[size:] != owner[:-size])
    (chosen,) = kept.nonzero()
    cells[owner.take(chosen) * size + at.take(chosen) % size] = raw.take(chosen, 0)


def _rows(draw: inputs.Draw) -> list[tuple[int, int, int]]:
    """(slot, first row, position) of each row: runs of consecutive rows of distinct requests, padding once the slots are used up.

    Several arguments are made from it, so it depends on the seed and the dims alone.
    """
    generator = torch.Generator().manual_seed(draw.generator.initial_seed() + 1)

    def integer(lo: int, hi: int) -> int:
        return int(torch.randint(lo, hi + 1, (), generator=generator))

    slots = torch.randperm(draw.dims["SL"], generator=generator).tolist()
    rows: list[tuple[int, int, int]] = []
    while len(rows) < draw.dims["M"]:
        at, count, start = len(rows), integer(1, 9), integer(0, 30)
        slot = slots.pop() if slots else -1
        rows += [(slot, at, start + i if slot >= 0 else -1) for i in range(count)]
    return rows[: draw.dims["M"]]


def _column(index: int) -> inputs.Maker:
    return lambda draw: torch.tensor([row[index] for row in _rows(draw)], dtype=draw.dtype)


def _key_index(draw: inputs.Draw) -> Tensor:
    """A distinct key cell for every row whose position ends a block of _RATIO tokens, -1 for the others."""
    closes = torch.tensor([row[0] >= 0 and row[2] % _RATIO == _RATIO - 1 for row in _rows(draw)], dtype=torch.bool)
    cells = torch.randperm(draw.dims["B"] * draw.dims["PK"], generator=draw.generator)
    return torch.where(closes, cells[: draw.shape[0]], -1)


_RATIO = 4
"""The model's compression ratio; tests of other ratios build their own rows."""

qsa_compress = Op(
    "qsa_compress",
    reference=reference,
    launch=None,
    determinism=INV,
    tolerance=Ratio(3.0),  # three roundings in a chain, on the few elements of the blocks that close
    args=dict(
        ik="act[M,DI]",
        position="i32[M]",
        slot="i32[M]",
        first="i32[M]",
        key_index="i64[M]",
        cos="act[M,RH]",
        sin="act[M,RH]",
        weight="act[DI]",
        eps="float",
        ratio="int",
        ring="act[SL,RR,DI] inout",
        keys="act[B,PK,DI] inout",
    ),
    dims=dict(
        M=Dim(0, 8192, test=(0, 40)),
        DI=Spec(128, test=(16, 20)),
        RH=Spec(32, test=(4, 8)),
        SL=Dim(1, 1 << 20, test=(1, 12)),
        RR=Dim(1, 64, test=(8, 12)),
        B=Dim(1, 1 << 24, test=(8, 9)),
        PK=Dim(1, 1024, test=(5, 8)),
    ),
    inputs=dict(
        position=_column(2),
        slot=_column(0),
        first=_column(1),
        key_index=_key_index,
        cos=inputs.uniform(-1.0, 1.0),
        sin=inputs.uniform(-1.0, 1.0),
        weight=inputs.normal(0.1),
        eps=inputs.value(1e-6),
        ratio=inputs.value(_RATIO),
    ),
)

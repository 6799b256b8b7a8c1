"""qsa_compress: keep the raw index keys of the open block and pool a block's keys when its last token arrives.

For a row m at position p that closes a block of `ratio` tokens (p % ratio == ratio - 1):

    pooled = h(mean(raw[p - ratio + 1], .., raw[p]))             float32 sum in ascending position, times 1 / ratio
    keys[key_index[m]] = h(rope(h(RMS1p(pooled; weight))))       rotated at the position of the block's first token

raw[p - j] is row m - j of this call where that row belongs to the same request, else ring[slot, (p - j) % RR]. Afterwards every
row's raw key is stored at ring[slot, p % RR]. A block is pooled again whenever its closing position is processed again, so a
rejected draft's key never survives (kernels.md C9, model.md 2.6.1).
"""

import torch
from torch import Tensor

from sm70kernels import inputs, rotary
from sm70kernels.op import INV, Dim, Op, Ratio, Spec


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
    cells = ring.view(-1, ring.shape[2])
    closing = ((key_index >= 0) & (slot >= 0)).nonzero().view(-1)
    if closing.numel():
        pooled = _pool(ik, position, slot, first, closing, ratio, cells, ring.shape[1])
        key = rotary.rms1p(pooled.to(ik.dtype), weight, eps, ik.dtype).unsqueeze(1)
        turned = rotary.rotate(key, *rotary.angles(cos[closing], sin[closing])).squeeze(1)
        keys.view(-1, keys.shape[2]).index_copy_(0, key_index[closing], turned.to(keys.dtype))
    _remember(ik, position, slot, first, cells, ring.shape[1])


def _pool(ik: Tensor, position: Tensor, slot: Tensor, first: Tensor, closing: Tensor, ratio: int, cells: Tensor, size: int) -> Tensor:
    """Return the float32 means [C, DI] of the raw keys of the blocks that rows `closing` i64[C] end."""
    back = torch.arange(ratio - 1, -1, -1)
    row = closing.unsqueeze(1) - back
    here = row >= first[closing].unsqueeze(1)
    old = slot[closing].unsqueeze(1) * size + (position[closing].unsqueeze(1) - back) % size
    new = ik.index_select(0, row.clamp_(min=0).view(-1)).float()
    stored = cells.index_select(0, old.view(-1)).float()
    raw = torch.where(here.view(-1, 1), new, stored).view(-1, ratio, ik.shape[1])
    total = raw[:, 0]
    for j in range(1, ratio):
        total = total + raw[:, j]
    return total * (1.0 / ratio)


def _remember(ik: Tensor, position: Tensor, slot: Tensor, first: Tensor, cells: Tensor, size: int) -> None:
    """Store the raw key of every row that no later row of its request overwrites."""
    m = ik.shape[0]
    kept = slot >= 0
    if m > size:
        overwritten = (first[size:] == first[:-size]) & (slot[size:] == slot[:-size])
        kept[:-size] &= ~overwritten
    if not kept.all():
        chosen = kept.nonzero().view(-1)
        ik, position, slot = ik[chosen], position[chosen], slot[chosen]
    cells.index_copy_(0, slot.long() * size + position % size, ik)


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
        SL=Dim(1, 4096, test=(1, 12)),
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

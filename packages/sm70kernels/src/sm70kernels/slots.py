"""Makers of test inputs for ops that reach pools of state slots: which slot a request runs in, which rows it owns, what it commits."""

import torch
from torch import Tensor

from sm70kernels.inputs import Draw, Maker, integers


def running(draw: Draw) -> Tensor:
    """Distinct slots below SL, about one in eight replaced by -1 (a padded request)."""
    slots = torch.randperm(draw.dims["SL"], generator=draw.generator)[: draw.shape[0]]
    padded = torch.rand(draw.shape, generator=draw.generator) < 0.125
    return slots.masked_fill(padded, -1).to(draw.dtype)


def snapshot(draw: Draw) -> Tensor:
    """Distinct slots that `slot`, made before, does not use; half of them -1 (no snapshot). Needs a free slot for each."""
    free = torch.ones(draw.dims["SL"], dtype=torch.bool)
    used = draw.made["slot"].long()
    free[used[used >= 0]] = False
    candidates = free.nonzero().squeeze(1)
    chosen = candidates[torch.randperm(candidates.shape[0], generator=draw.generator)[: torch.Size(draw.shape).numel()]].view(draw.shape)
    return chosen.masked_fill(torch.rand(draw.shape, generator=draw.generator) < 0.5, -1).to(draw.dtype)


def start(grid: int) -> Maker:
    """First rows of N sequences side by side in M rows, on multiples of `grid`."""

    def maker(draw: Draw) -> Tensor:
        each = draw.dims["M"] // max(draw.dims["N"], 1) // grid * grid
        return (torch.arange(draw.shape[0]) * each).to(draw.dtype)

    return maker


def rows(draw: Draw) -> Tensor:
    """Row counts that fit between `start`, made before, and the next start; the last sequence may take the rest of M."""
    first = draw.made["start"].long()
    room = torch.cat([first[1:], torch.tensor([draw.dims["M"]])])[: draw.shape[0]] - first
    counts = (torch.rand(draw.shape, generator=draw.generator) * (room + 1)).long()
    return torch.minimum(counts, room).to(draw.dtype)


def ascending(grid: int) -> Maker:
    """Row counts after which a snapshot is kept, ascending, 0 .. the grid's first multiple after `rows`, made before."""

    def maker(draw: Draw) -> Tensor:
        last = draw.made["rows"].long()[:, None] // grid + 1
        counts = (torch.rand(draw.shape, generator=draw.generator) * (last + 1)).long() * grid
        return torch.sort(counts, 1).values.to(draw.dtype)

    return maker


def commit() -> dict[str, Maker]:
    """Makers of the four vectors of a replay op; snapshot_at leaves 1 .. accepted now and then."""
    return {"slot": running, "accepted": integers(0, "T"), "snapshot_slot": snapshot, "snapshot_at": integers(0, "T+1")}

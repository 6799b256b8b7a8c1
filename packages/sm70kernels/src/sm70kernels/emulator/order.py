"""Which accesses of a block come before others: the times of the last meeting of lanes and of warps.

A time is a count of executed pieces and meetings. An access made at time t is ordered before what a lane does now if the lane has met the
other lane (by a `*.sync`, or a barrier) or the other warp (by a barrier) at a time later than t. Meetings of everyone are one number for
a warp or block; meetings of some are kept pair by pair, and what each of them knew of others is passed on.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from sm70kernels.emulator.group import Group, Shape

Array = NDArray[Any]


class Order:
    """The meetings of a chunk's lanes and warps."""

    def __init__(self, shape: Shape, live: Array) -> None:
        self.shape = shape
        self.live = live
        self.warp_met = np.zeros(shape.warps, np.int64)
        """Last time all living lanes of the warp met."""
        self.block_met = np.zeros(shape.blocks, np.int64)
        """Last time all living warps of the block met."""
        self.latest = 0
        """Last time at which every block of the chunk had met: accesses before it are in order with everything."""
        self.lanes: Array | None = None
        """[lanes, 32]: last meeting with each lane of the warp, made when first needed."""
        self.warps: Array | None = None
        """[warps, warps of a block]: last meeting with each warp of the block, made when first needed."""
        self.arrivals: dict[tuple[int, int], int] = {}

    def everyone(self, now: int) -> None:
        """All lanes of the chunk have met, each with its block."""
        self.warp_met[:] = now
        self.block_met[:] = now
        self.latest = now

    def blocks_meet(self, blocks: Array, now: int) -> None:
        """All living lanes of some blocks have met."""
        self.block_met[blocks] = now
        self.warp_met.reshape(self.shape.blocks, -1)[blocks] = now
        self._find_latest(now)

    def _find_latest(self, now: int) -> None:
        living = (self.live.reshape(self.shape.blocks, -1) != 0).any(axis=1)
        self.latest = int(self.block_met[living].min()) if living.any() else now

    def lanes_meet(self, group: Group, mask: Array, now: int) -> None:
        """The lanes of a group have met the lanes of their masks."""
        if mask.size == 1 and mask[0] == 0xFFFFFFFF:
            self.warp_met[group.warps] = now
            return
        members = group.spread(mask) & np.repeat(group.active, group.counts)
        living = self.live[group.warp]
        complete = members == living
        self.warp_met[group.warp[complete]] = now
        if complete.all():
            return
        if self.lanes is None:
            self.lanes = np.zeros((self.shape.lanes, 32), np.int64)
        for pattern in np.unique(members[~complete]):
            chosen = group.lanes[(members == pattern) & ~complete]
            places = np.array([place for place in range(32) if int(pattern) >> place & 1])
            known = self.lanes[chosen].reshape(-1, len(places), 32).max(axis=1)
            known[:, places] = now
            self.lanes[chosen] = np.repeat(known, len(places), axis=0)

    def arrive(self, group: Group, number: Array, now: int) -> None:
        """Warps have arrived at barriers without waiting."""
        for warp, barrier in zip(group.warps, number[group.starts], strict=True):
            self.arrivals[int(warp), int(barrier)] = now

    def warps_meet(self, block: int, number: int, arrived: Array, lanes: Array, now: int) -> None:
        """A barrier is complete: `arrived` masks for the warps of the block, `lanes` of the chunk that waited."""
        per = self.shape.block_warps
        first = block * per
        waited = np.zeros(per, np.uint32)
        np.bitwise_or.at(waited, self.shape.warp[lanes] - first, np.uint32(1) << self.shape.place[lanes].astype(np.uint32))
        live = self.live[first : first + per]
        together = (waited == live) & (live != 0)
        self.warp_met[first : first + per][together] = now
        waiters, comers = np.flatnonzero(waited), np.flatnonzero(arrived)
        if (waited == live).all():
            self.block_met[block] = now
            self._find_latest(now)
            return
        if self.warps is None:
            self.warps = np.zeros((self.shape.warps, per), np.int64)
        known = self.warps[first + comers].max(axis=0)
        for comer in comers:
            since = self.arrivals.pop((first + int(comer), number), now)
            known[comer] = max(known[comer], now if waited[comer] else since)
        self.warps[first + waiters] = np.maximum(self.warps[first + waiters], known)

    def lane_since(self, lanes: Array, others: Array) -> Array:
        """Time of the last meeting of each lane with place `others` of its warp."""
        met = self.warp_met[self.shape.warp[lanes]]
        return met if self.lanes is None else np.maximum(met, self.lanes[lanes, others])

    def warp_since(self, lanes: Array, others: Array) -> Array:
        """Time of the last meeting of each lane's warp with warp `others` of its block."""
        met = self.block_met[self.shape.block[lanes]]
        return met if self.warps is None else np.maximum(met, self.warps[self.shape.warp[lanes], others])

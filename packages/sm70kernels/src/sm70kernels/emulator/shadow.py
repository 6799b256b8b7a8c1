"""The last accesses to every unit of a memory, against which each new access is checked for a race.

A unit is as long as the kernel's shortest access. It remembers its last plain write and its last reader, and whether there were several
readers not in order with each other: lanes of one warp, warps of one block, or blocks. Reads and atomics race with plain writes only.

A stamp is time << 26 | site << 10 | thread in block; 0 is none. Times begin at 1.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sm70kernels.emulator.order import Order

Array = NDArray[Any]

TIME = 26
SITE = 10
THREAD = (1 << SITE) - 1
SITES = (1 << (TIME - SITE)) - 1

LANES, WARPS, BLOCKS = 1, 2, 3
"""How far apart two accesses are that are not in order."""


@dataclass(frozen=True)
class Conflict:
    """Two accesses that race: position of the new one in the group, its unit, how far apart they are, the other one's stamp and block."""

    position: int
    unit: int
    level: int
    stamp: int
    block: int
    wrote: bool


class Fences:
    """Last fence and last acquiring access of every block of the grid."""

    def __init__(self, blocks: int) -> None:
        self.fence = np.zeros(blocks, np.int64)
        self.acquire = np.zeros(blocks, np.int64)

    def ordered(self, other: Array, mine: Array, time: Array) -> Array:
        """True where the other block has fenced after `time` and this one has acquired something since."""
        result: Array = (self.fence[other] > time) & (self.acquire[mine] > time)
        return result


class Shadow:
    """Shadow of a memory of `units` units. `across`: units are shared by blocks (global memory), so blocks are remembered too."""

    def __init__(self, units: int, across: bool) -> None:
        self.written = np.zeros(units, np.int64)
        self.read = np.zeros(units, np.int64)
        self.spread = np.zeros(units, np.uint8)
        self.written_by = np.zeros(units, np.int32) if across else None
        self.read_by = np.zeros(units, np.int32) if across else None

    def _levels(self, order: Order, fences: Fences, stamp: Array, other: Array | None, lanes: Array, blocks: Array) -> Array:
        """How far apart earlier accesses with these stamps are from lanes now: 0 for the same thread or accesses in order."""
        shape = order.shape
        time, thread = stamp >> TIME, stamp & THREAD
        mine = shape.thread[lanes]
        level = np.where(thread >> 5 == mine >> 5, np.where(thread == mine, 0, LANES), WARPS)
        since = np.where(level == LANES, order.lane_since(lanes, thread & 31), order.warp_since(lanes, thread >> 5))
        level = np.where(time < since, 0, level)
        if other is not None:
            level = np.where(other == blocks, level, BLOCKS)
            level = np.where((level >= WARPS) & fences.ordered(other, blocks, time), 0, level)
        return np.where(stamp == 0, 0, level)

    def _candidates(self, order: Order, stamp: Array, other: Array | None, lanes: Array, blocks: Array) -> Array:
        """Cheap test: positions whose earlier access is neither older than the last common barrier nor by the same thread."""
        if other is None:
            suspect = (stamp >= np.int64(order.latest) << TIME) & (stamp != 0) & ((stamp & THREAD) != order.shape.thread[lanes])
        else:
            suspect = (stamp != 0) & ((other != blocks) | ((stamp & THREAD) != order.shape.thread[lanes]))
        return np.flatnonzero(suspect)

    def _against(self, order: Order, fences: Fences, stamps: Array, owners: Array | None, unit: Array, lanes: Array, blocks: Array,
                 wrote: bool) -> Conflict | None:  # fmt: skip
        stamp = stamps[unit]
        other = None if owners is None else owners[unit]
        places = self._candidates(order, stamp, other, lanes, blocks)
        if not len(places):
            return None
        chosen = None if other is None else other[places]
        level = self._levels(order, fences, stamp[places], chosen, lanes[places], blocks[places])
        if not wrote:
            level = self._several(order, level, stamp[places], unit[places], lanes[places])
        if not level.any():
            return None
        worst = int(np.argmax(level))
        place = int(places[worst])
        block = int(blocks[place]) if other is None else int(other[place])
        return Conflict(place, int(unit[place]), int(level[worst]), int(stamp[place]), block, wrote)

    def _several(self, order: Order, level: Array, stamp: Array, unit: Array, lanes: Array) -> Array:
        """Of a unit with several readers only the last is known: it stands for all, unless everyone has met since.

        Where lanes or warps have met in part, this says nothing: Races looks the readers up in its history then.
        """
        spread = self.spread[unit]
        time = stamp >> TIME
        shape = order.shape
        near = (stamp & THREAD) >> 5 == shape.thread[lanes] >> 5
        lane_open = (spread == LANES) & near & (time >= order.warp_met[shape.warp[lanes]]) & (order.lanes is None)
        warp_open = (spread == WARPS) & (time >= order.block_met[shape.block[lanes]]) & (order.warps is None)
        worst: Array = np.maximum(level, np.where(warp_open, WARPS, np.where(lane_open, LANES, 0)))
        return worst

    def check_write(self, order: Order, fences: Fences, unit: Array, lanes: Array, blocks: Array) -> Conflict | None:
        """Compare a plain write with earlier writes and reads."""
        found = self._against(order, fences, self.written, self.written_by, unit, lanes, blocks, True)
        if found is not None:
            return found
        several = np.flatnonzero((self.spread[unit] != 0) & (self.read[unit] != 0))
        if len(several):
            stamp = self.read[unit[several]]
            same = self._several(order, np.zeros(len(several), np.int64), stamp, unit[several], lanes[several])
            if self.read_by is not None:
                across = (self.spread[unit[several]] == BLOCKS) & (fences.acquire[blocks[several]] <= stamp >> TIME)
                same = np.where(across, BLOCKS, same)
            if same.any():
                worst = int(np.argmax(same))
                place = int(several[worst])
                block = int(blocks[place]) if self.read_by is None else int(self.read_by[unit[place]])
                return Conflict(place, int(unit[place]), int(same[worst]), int(stamp[worst]), block, False)
        return self._against(order, fences, self.read, self.read_by, unit, lanes, blocks, False)

    def check_read(self, order: Order, fences: Fences, unit: Array, lanes: Array, blocks: Array) -> Conflict | None:
        """Compare a read or an atomic with earlier plain writes."""
        return self._against(order, fences, self.written, self.written_by, unit, lanes, blocks, True)

    def note_write(self, unit: Array, stamp: Array, blocks: Array) -> Array:
        """Remember a write; return the positions that lost their unit to another lane of the same instruction."""
        self.written[unit] = stamp
        self.read[unit] = 0
        self.spread[unit] = 0
        if self.written_by is None:
            return np.flatnonzero(self.written[unit] != stamp)
        self.written_by[unit] = blocks
        return np.flatnonzero((self.written[unit] != stamp) | (self.written_by[unit] != blocks))

    def note_read(self, order: Order, fences: Fences, unit: Array, stamp: Array, lanes: Array, blocks: Array) -> None:
        """Remember a read, and whether it is one of several that are not in order."""
        before = self.read[unit]
        places = np.flatnonzero(before)
        if len(places):
            other = None if self.read_by is None else self.read_by[unit[places]]
            level = self._levels(order, fences, before[places], other, lanes[places], blocks[places])
            held = self.spread[unit[places]]
            time = before[places] >> TIME
            shape = order.shape
            stale = (held == LANES) & (time < order.warp_met[shape.warp[lanes[places]]])
            stale |= (held == WARPS) & (time < order.block_met[shape.block[lanes[places]]])
            if other is not None:
                stale &= other == blocks[places]
            self.spread[unit[places]] = np.maximum(level, np.where(stale, 0, held))
        self.read[unit] = stamp
        if self.read_by is not None:
            self.read_by[unit] = blocks
        last = self.read[unit]
        lost = last != stamp
        if self.read_by is not None:
            lost |= self.read_by[unit] != blocks
        together = np.flatnonzero(lost)
        if len(together):
            near = (last[together] & THREAD) >> 5 == (stamp[together] & THREAD) >> 5
            level = np.where(near, LANES, WARPS).astype(np.uint8)
            if self.read_by is not None:
                level = np.where(self.read_by[unit[together]] == blocks[together], level, BLOCKS).astype(np.uint8)
            np.maximum.at(self.spread, unit[together], level)

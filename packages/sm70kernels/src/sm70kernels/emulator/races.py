"""Race and initialisation checks of a chunk: which accesses are looked up and noted, and the faults they lead to."""

from collections import deque
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from sm70kernels.emulator import faults
from sm70kernels.emulator.group import Group
from sm70kernels.emulator.order import Order
from sm70kernels.emulator.shadow import BLOCKS, LANES, SITE, SITES, THREAD, TIME, WARPS, Conflict, Shadow
from sm70kernels.emulator.sites import MemorySite

if TYPE_CHECKING:
    from sm70kernels.emulator.machine import Machine

Array = NDArray[Any]

KINDS = {LANES: faults.RACE_LANES, WARPS: faults.RACE_WARPS, BLOCKS: faults.RACE_BLOCKS}
MISSING = {LANES: "__syncwarp or *.sync of both lanes", WARPS: "barrier of both warps", BLOCKS: "fence and atomic"}

LOG = 1 << 21
"""Units of shared memory whose reads are kept back at most before they are noted, and remembered at most one by one."""


def units_of(offset: Array, size: int, unit: int) -> Array:
    """Numbers of the units that accesses of `size` bytes touch: [n] for one each, else [n * k] with k neighbours a lane."""
    first: Array = offset >> (unit.bit_length() - 1)
    count = size // unit
    return first if count <= 1 else (first[:, None] + np.arange(count)).reshape(-1)


class Races:
    """Checks of one chunk, shared memory and global memory."""

    def __init__(self, machine: "Machine", pitch: int) -> None:
        self.machine = machine
        self.launch = machine.launch
        shape = machine.shape
        self.order = Order(shape, machine.live)
        self.blocks = shape.block + shape.first
        self.unit = machine.program.shared_unit
        self.pitch = max(1, pitch)
        units = pitch * shape.blocks // self.unit
        self.shared = Shadow(units, across=False)
        self.filled = np.zeros(units, np.uint8)
        self.complete = units == 0
        self.log: list[tuple[Array, Group, MemorySite, int]] = []
        self.history: deque[tuple[Array, Group, MemorySite, int]] = deque()
        self.logged = self.remembered = 0
        self.last_store = 0

    # Meetings

    def tick(self) -> int:
        self.launch.now += 1
        return self.launch.now

    def barrier_all(self, group: Group) -> None:
        """All living lanes of the group's blocks have met."""
        if group.index is None:
            self.order.everyone(self.tick())
            self.log.clear()
            self.history.clear()
            self.logged = self.remembered = 0
        else:
            self.order.blocks_meet(np.unique(group.block), self.tick())
        if not self.complete:
            self.complete = bool(self.filled.all())

    def barrier(self, block: int, number: int, arrived: Array, lanes: Array) -> None:
        self._write_log()
        self.order.warps_meet(block, number, arrived, lanes, self.tick())

    def arrive(self, group: Group, number: Array) -> None:
        self.order.arrive(group, number, self.tick())

    def sync(self, group: Group, mask: Array) -> None:
        if self.log and not (mask.size == 1 and mask[0] == 0xFFFFFFFF):
            self._write_log()
        self.order.lanes_meet(group, mask, self.tick())

    # Shared memory: offsets are into the chunk's buffer

    def _stamp(self, group: Group, site: MemorySite, count: int, now: int) -> Array:
        base = np.int64(now) << TIME | np.int64(min(site.number, SITES)) << SITE
        stamp: Array = base | group.thread
        return stamp if count <= 1 else np.repeat(stamp, count)

    def _lanes(self, group: Group, count: int) -> Array:
        return group.lanes if count <= 1 else np.repeat(group.lanes, count)

    def read_shared(self, group: Group, site: MemorySite, offset: Array) -> None:
        """Check a read or an atomic. offset: of every lane in the chunk's buffer."""
        count = site.size // self.unit
        unit = units_of(offset, site.size, self.unit)
        if not self.complete:
            filled = self.filled[unit]
            if not filled.all():
                position = int(np.argmin(filled)) // max(1, count)
                place = int(offset[position]) % self.pitch
                detail = f"{site.name} of {site.size} bytes at byte {place} of shared memory, which no thread has written"
                raise self._fault(faults.UNINITIALISED_SHARED, group, site, position, detail, place)
        if self.last_store >= self.order.latest:
            lanes = self._lanes(group, count)
            found = self.shared.check_read(self.order, self.launch.fences, unit, lanes, self.blocks[lanes])
            if found:
                raise self._conflict(found, group, site, offset, None)
        self.log.append((unit, group, site, self.launch.now))
        self.logged += len(unit)
        if self.logged > LOG:
            self._write_log()

    def _write_log(self) -> None:
        for unit, group, site, now in self.log:
            count = site.size // self.unit
            lanes = self._lanes(group, count)
            self.shared.note_read(self.order, self.launch.fences, unit, self._stamp(group, site, count, now), lanes, self.blocks[lanes])
        self.history.extend(self.log)
        self.remembered += self.logged
        while self.remembered > LOG or (self.history and self.history[0][3] < self.order.latest):
            self.remembered -= len(self.history.popleft()[0])
        self.log.clear()
        self.logged = 0

    def _old_reader(self, unit: Array, lanes: Array) -> Conflict | None:
        """Among all reads of these units since the last meeting of everyone, one that is not in order with a write now."""
        order, shape = self.order, self.machine.shape
        several = np.flatnonzero(self.shared.spread[unit])
        if not len(several) or (order.lanes is None and order.warps is None):
            return None
        place = np.full(len(self.filled), -1)
        place[unit[several]] = several
        for units, group, site, time in self.history:
            hits = np.flatnonzero(place[units] >= 0)
            position = place[units[hits]]
            count = site.size // self.unit
            reader, writer = self._lanes(group, count)[hits], lanes[position]
            near = shape.warp[reader] == shape.warp[writer]
            thread = shape.thread[reader]
            since = np.where(near, order.lane_since(writer, thread & 31), order.warp_since(writer, thread >> 5))
            open_ = np.flatnonzero((time >= since) & (reader != writer))
            if len(open_):
                first = int(open_[0])
                stamp = int(self._stamp(group, site, count, time)[hits[first]])
                level = LANES if near[first] else WARPS
                return Conflict(int(position[first]), int(units[hits[first]]), level, stamp, int(self.blocks[reader[first]]), False)
        return None

    def write_shared(self, group: Group, site: MemorySite, offset: Array) -> Array:
        """Check and note a plain write; return positions (of units) that another lane of the instruction has overwritten."""
        self._write_log()
        count = site.size // self.unit
        unit = units_of(offset, site.size, self.unit)
        lanes = self._lanes(group, count)
        found = self.shared.check_write(self.order, self.launch.fences, unit, lanes, self.blocks[lanes]) or self._old_reader(unit, lanes)
        if found:
            raise self._conflict(found, group, site, offset, None)
        self.last_store = self.launch.now
        self.filled[unit] = 1
        return self.shared.note_write(unit, self._stamp(group, site, count, self.launch.now), lanes)

    def fill(self, offset: Array, size: int) -> None:
        """A strong store has written these bytes."""
        self.filled[units_of(offset, size, self.unit)] = 1

    # Global memory

    def read_global(self, group: Group, site: MemorySite, offset: Array) -> None:
        """Check and note a read or an atomic of memory that the kernel writes somewhere. offset: into the image."""
        launch = self.launch
        count = site.size // launch.global_unit
        unit = units_of(offset, site.size, launch.global_unit)
        lanes = self._lanes(group, count)
        blocks = self.blocks[lanes]
        shadow = launch.shadow
        found = shadow.check_read(self.order, launch.fences, unit, lanes, blocks)
        if found:
            raise self._conflict(found, group, site, offset, shadow)
        if site.constant:
            written = shadow.written[unit]
            if written.any():
                raise self._stale(group, site, offset, int(np.argmax(written != 0)) // max(1, count), "has been written in this launch")
            launch.constant_units[unit] = True
        shadow.note_read(self.order, launch.fences, unit, self._stamp(group, site, count, launch.now), lanes, blocks)

    def write_global(self, group: Group, site: MemorySite, offset: Array) -> Array:
        """Check and note a plain write; return positions (of units) that another lane of the instruction has overwritten."""
        launch = self.launch
        count = site.size // launch.global_unit
        unit = units_of(offset, site.size, launch.global_unit)
        lanes = self._lanes(group, count)
        blocks = self.blocks[lanes]
        constant = launch.constant_units[unit]
        if constant.any():
            raise self._stale(group, site, offset, int(np.argmax(constant)) // max(1, count), "has been read through ld.global.nc")
        found = launch.shadow.check_write(self.order, launch.fences, unit, lanes, blocks)
        if found:
            raise self._conflict(found, group, site, offset, launch.shadow)
        return launch.shadow.note_write(unit, self._stamp(group, site, count, launch.now), blocks)

    def acquire(self, group: Group) -> None:
        """The blocks of a group have executed an atomic or a strong load."""
        self.launch.fences.acquire[self.blocks[group.lanes[group.starts]]] = self.tick()

    def fence(self, group: Group) -> None:
        """The blocks of a group have executed a fence of device scope or a releasing access."""
        self.launch.fences.fence[self.blocks[group.lanes[group.starts]]] = self.tick()

    # Faults

    def lost(self, group: Group, site: MemorySite, offset: Array, places: Array, same: Array, across: Shadow | None) -> None:
        """Lanes of one store hit the same bytes: a race between warps or blocks, or between lanes unless the values are the `same`.

        across: the shadow of global memory, None for shared memory. same: for each lane, whether memory now holds what it wrote.
        """
        unit, shadow = (self.unit, self.shared) if across is None else (self.launch.global_unit, across)
        count = site.size // unit
        units = units_of(offset, site.size, unit)[places]
        lanes = self._lanes(group, count)[places]
        stamp = shadow.written[units]
        level = np.where((stamp & THREAD) >> 5 == self.machine.shape.thread[lanes] >> 5, LANES, WARPS)
        if shadow.written_by is not None:
            level = np.where(shadow.written_by[units] == self.blocks[lanes], level, BLOCKS)
        level = np.where((level == LANES) & same[places // max(1, count)], 0, level)
        if not level.any():
            return
        worst = int(np.argmax(level))
        block = int(self.blocks[lanes[worst]]) if shadow.written_by is None else int(shadow.written_by[units[worst]])
        raise self._conflict(Conflict(int(places[worst]), int(units[worst]), int(level[worst]), int(stamp[worst]), block, True),
                             group, site, offset, across)  # fmt: skip

    def _fault(self, kind: str, group: Group, site: MemorySite, position: int, detail: str, address: int) -> faults.Fault:
        return self.machine.fault(kind, site.instruction, detail, int(group.lanes[position]), address)

    def _stale(self, group: Group, site: MemorySite, offset: Array, position: int, what: str) -> faults.Fault:
        place = int(offset[position])
        where = self.launch.regions.describe(place)
        return self._fault(faults.STALE_READ, group, site, position, f"{site.name} of {site.size} bytes at {where}, which {what}", place)

    def _conflict(self, found: Conflict, group: Group, site: MemorySite, offset: Array, across: Shadow | None) -> faults.Fault:
        position = found.position // max(1, site.size // (self.unit if across is None else self.launch.global_unit))
        place = int(offset[position])
        if across is None:
            place %= self.pitch
        where = f"byte {place} of shared memory" if across is None else self.launch.regions.describe(place)
        other = self.machine.program.sites[(found.stamp >> SITE) & SITES].instruction
        thread, block = self.launch.thread_index(found.stamp & THREAD), self.launch.block_index(found.block)
        detail = f"{site.name} of {site.size} bytes at {where}, {'written' if found.wrote else 'accessed'} by "
        detail += f"{'.'.join(other.parts)} ({other.source or f'PTX line {other.ptx_line}'}) of block {block} thread {thread} "
        detail += f"with no {MISSING[found.level]} between"
        return self._fault(KINDS[found.level], group, site, position, detail, place)

"""Loads and stores of a chunk in every state space, with their checks and counts.

Called by generated code with a group, the static description of the instruction (a Site) and an array of addresses.
"""

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from sm70kernels.emulator import faults
from sm70kernels.emulator.atomics import perform
from sm70kernels.emulator.group import Group
from sm70kernels.emulator.memory import GLOBAL_BASE, NULL_PAGE, Bytes, Region
from sm70kernels.emulator.moves import WINDOWS
from sm70kernels.emulator.races import Races, units_of
from sm70kernels.emulator.sites import MemorySite
from sm70kernels.emulator.traffic import sectors, wavefronts

if TYPE_CHECKING:
    from sm70kernels.emulator.machine import Machine

Array = NDArray[Any]

WINDOW_BITS = 40


class Access:
    """Memory as the lanes of one chunk see it."""

    def __init__(self, machine: "Machine") -> None:
        launch, shape = machine.launch, machine.shape
        program = machine.program
        self.machine = machine
        self.launch = launch
        self.check = launch.check
        self.image = launch.image
        self.shared_size = launch.shared_size
        self.shared_pitch = -(-launch.shared_size // 16) * 16
        self.shared = Bytes(self.shared_pitch * shape.blocks)
        self.local_pitch = -(-program.local_size // 16) * 16
        self.local = Bytes(self.local_pitch * shape.lanes)
        self.frame_pitch = -(-program.frame_size // 16) * 16
        self.frame = Bytes(self.frame_pitch * shape.lanes)
        self.shared_base = shape.block * self.shared_pitch
        self.lane_local = np.arange(shape.lanes) * self.local_pitch
        self.local_unit = program.local_unit
        self.local_filled = np.zeros(self.local.size // self.local_unit, np.uint8)
        self.races = Races(machine, self.shared_pitch) if launch.check else None
        self.lane_frame = np.arange(shape.lanes) * self.frame_pitch

    # Addresses to offsets

    def _base(self, group: Group, name: str, every: Array) -> Array:
        found = group.memory.get(name)
        if found is None:
            found = group.pick(every)
            if found.size > 1 and self.machine.shape.blocks == 1 and name == "shared":
                found = found[:1]
            group.memory[name] = found
        return found

    def _aligned(self, group: Group, site: MemorySite, offset: Array) -> None:
        size = site.size
        if size > 1 and (offset & (size - 1)).any():
            position = int(np.argmax((offset & (size - 1)) != 0))
            raise self._fault(faults.MISALIGNED, group, site, offset, position, f"at byte {offset[position]} of its space")

    def _fault(self, kind: str, group: Group, site: MemorySite, offset: Array, position: int, what: str) -> faults.Fault:
        lane = int(group.lanes[position])
        place = int(offset[position]) + (GLOBAL_BASE if site.space == "global" else 0)
        detail = f"{site.name} of {site.size} bytes {what}"
        return self.machine.fault(kind, site.instruction, detail, lane, place)

    def global_offset(self, group: Group, site: MemorySite, address: Array, write: bool) -> Array:
        """Check global addresses and return byte offsets into the image."""
        offset: Array = address.view(np.int64) + (site.offset - GLOBAL_BASE)
        if not self.check:
            return offset
        size = site.size
        region = site.region
        low, high = int(offset.min()), int(offset.max())
        if region is None or low < region.start or high + size > region.end:
            if low < NULL_PAGE - GLOBAL_BASE:
                position = int(np.argmin(offset))
                raise self._fault(faults.NULL_POINTER, group, site, offset, position, f"at address {low + GLOBAL_BASE:#x}")
            regions = self.launch.regions
            region = regions.around(low)
            if region is None or high + size > region.end:
                outside = regions.outside(offset, size)
                if outside.any():
                    position = int(np.argmax(outside))
                    kind = faults.MISALIGNED if int(offset[position]) & (size - 1) else faults.OUT_OF_BOUNDS
                    raise self._fault(kind, group, site, offset, position, f"at {regions.describe(int(offset[position]))}")
                region = None
            else:
                site.region = region
        if size > 1 and (offset & (size - 1)).any():
            position = int(np.argmax((offset & (size - 1)) != 0))
            where = self.launch.regions.describe(int(offset[position]))
            raise self._fault(faults.MISALIGNED, group, site, offset, position, f"at {where}")
        if write:
            self._writable(group, site, offset, region)
        return offset

    def _writable(self, group: Group, site: MemorySite, offset: Array, region: Region | None) -> None:
        for position, place in enumerate(offset) if region is None else ((0, offset[0]),):
            found = region or self.launch.regions.around(int(place))
            if found is not None and not found.writable:
                kind = faults.CONSTANT_WRITE if found.constant else faults.READ_ONLY_WRITE
                raise self._fault(kind, group, site, offset, position, f"at {self.launch.regions.describe(int(place))}")

    def block_offset(self, group: Group, site: MemorySite, address: Array) -> Array:
        """Check shared addresses and return byte offsets within the block's shared memory."""
        offset: Array = address.astype(np.int64) + site.offset
        if self.check:
            self._aligned(group, site, offset)
            if int(offset.min()) < 0 or int(offset.max()) + site.size > self.shared_size:
                position = int(np.argmax((offset < 0) | (offset + site.size > self.shared_size)))
                what = f"at byte {offset[position]} of shared memory ({self.shared_size} bytes)"
                raise self._fault(faults.OUT_OF_BOUNDS, group, site, offset, position, what)
        return offset

    def lane_offset(self, group: Group, site: MemorySite, address: Array) -> Array:
        """Check local addresses and return byte offsets within the thread's local memory."""
        offset: Array = address.astype(np.int64) + site.offset
        size = self.machine.program.local_size
        if self.check:
            self._aligned(group, site, offset)
            if int(offset.min()) < 0 or int(offset.max()) + site.size > size:
                position = int(np.argmax((offset < 0) | (offset + site.size > size)))
                what = f"at byte {offset[position]} of local memory ({size} bytes)"
                raise self._fault(faults.OUT_OF_BOUNDS, group, site, offset, position, what)
        return offset

    # Global memory

    def _count_sectors(self, group: Group, site: MemorySite, offset: Array) -> None:
        tally = self.launch.tally(site, group)
        found, fewest = sectors(group, offset, site.size)
        tally.sectors += found
        tally.minimum_sectors += fewest

    def _tracked(self, site: MemorySite, offset: Array, write: bool) -> bool:
        """True when accesses here may race: the kernel writes to the region (or, in mixed accesses, to any)."""
        region = site.region
        if region is None or not region.start <= int(offset[0]) < region.end:
            return True
        region.tracked |= write
        return region.tracked

    def load_global(self, group: Group, site: MemorySite, address: Array) -> list[Array]:
        offset = self.global_offset(group, site, address, False)
        if self.races:
            self.launch.reads.mark(offset, site.size)
            self._count_sectors(group, site, offset)
            if self._tracked(site, offset, False):
                self.races.read_global(group, site, group.spread(offset))
                if site.strong:
                    self.races.acquire(group)
        return self.image.load(offset, site.width, site.count)

    def store_global(self, group: Group, site: MemorySite, address: Array, values: list[Array]) -> None:
        offset = group.spread(self.global_offset(group, site, address, True))
        if not self.races:
            self.image.store(offset, site.width, values)
            return
        self.launch.writes.mark(offset, site.size)
        self._count_sectors(group, site, offset)
        self._tracked(site, offset, True)
        if site.release:
            self.races.fence(group)
        if site.strong:
            self.races.read_global(group, site, offset)
            self.image.store(offset, site.width, values)
            return
        lost = self.races.write_global(group, site, offset)
        self.image.store(offset, site.width, values)
        if len(lost):
            same = self._same(self.image, group, site, offset, values)
            self.races.lost(group, site, offset, lost, same, self.launch.shadow)

    def _same(self, where: Bytes, group: Group, site: MemorySite, offset: Array, values: list[Array]) -> Array:
        """For each lane, whether memory holds what the lane stored there."""
        found = where.load(offset, site.width, site.count)
        result: Array = np.logical_and.reduce([there == group.spread(value) for there, value in zip(found, values, strict=True)])
        return result

    load_const = load_global
    store_const = store_global

    # Shared memory

    def load_shared(self, group: Group, site: MemorySite, address: Array) -> list[Array]:
        offset = self.block_offset(group, site, address)
        if self.races:
            self._count_wavefronts(group, site, offset)
        offset = offset + self._base(group, "shared", self.shared_base)
        if self.races:
            self.races.read_shared(group, site, group.spread(offset))
        return self.shared.load(offset, site.width, site.count)

    def store_shared(self, group: Group, site: MemorySite, address: Array, values: list[Array]) -> None:
        offset = group.spread(self.block_offset(group, site, address))
        if self.races:
            self._count_wavefronts(group, site, offset)
        offset = offset + self._base(group, "shared", self.shared_base)
        if not self.races:
            self.shared.store(offset, site.width, values)
        elif site.strong:
            self.races.fill(offset, site.size)
            self.races.read_shared(group, site, offset)
            self.shared.store(offset, site.width, values)
        else:
            lost = self.races.write_shared(group, site, offset)
            self.shared.store(offset, site.width, values)
            if len(lost):
                self.races.lost(group, site, offset, lost, self._same(self.shared, group, site, offset, values), None)

    def _count_wavefronts(self, group: Group, site: MemorySite, offset: Array) -> None:
        tally = self.launch.tally(site, group)
        found, fewest = wavefronts(group, offset, site.size)
        tally.wavefronts += found
        tally.minimum_wavefronts += fewest

    # Local memory and parameters

    def load_local(self, group: Group, site: MemorySite, address: Array) -> list[Array]:
        offset = self.lane_offset(group, site, address) + self._base(group, "local", self.lane_local)
        if self.check:
            self.launch.tally(site, group)
            filled = self.local_filled[units_of(offset, site.size, self.local_unit)]
            if not filled.all():
                position = int(np.argmin(filled)) // max(1, site.size // self.local_unit)
                within = offset - self._base(group, "local", self.lane_local)
                what = f"at byte {within[position]} of local memory, which the thread has not written"
                raise self._fault(faults.UNINITIALISED_LOCAL, group, site, within, position, what)
        return self.local.load(offset, site.width, site.count)

    def store_local(self, group: Group, site: MemorySite, address: Array, values: list[Array]) -> None:
        offset = self.lane_offset(group, site, address) + self._base(group, "local", self.lane_local)
        if self.check:
            self.launch.tally(site, group)
            self.local_filled[units_of(offset, site.size, self.local_unit)] = 1
        self.local.store(offset, site.width, values)

    def load_param(self, group: Group, site: MemorySite, address: Array) -> list[Array]:
        """Read the entry's parameters."""
        offset = address.astype(np.int64) + site.offset
        bank = self.launch.parameters
        if int(offset.min()) < 0 or int(offset.max()) + site.size > bank.size:
            position = int(np.argmax((offset < 0) | (offset + site.size > bank.size)))
            what = f"at byte {offset[position]} of the parameters ({bank.size} bytes)"
            raise self._fault(faults.OUT_OF_BOUNDS, group, site, offset, position, what)
        self._aligned(group, site, offset)
        return bank.load(offset, site.width, site.count)

    def load_frame(self, group: Group, site: MemorySite, address: Array) -> list[Array]:
        """Read a parameter or result of a device function."""
        return self.frame.load(address.astype(np.int64) + site.offset + self._base(group, "frame", self.lane_frame), site.width, site.count)

    def store_frame(self, group: Group, site: MemorySite, address: Array, values: list[Array]) -> None:
        offset = address.astype(np.int64) + site.offset + self._base(group, "frame", self.lane_frame)
        self.frame.store(offset, site.width, values)

    # Atomics

    def atomic_global(self, group: Group, site: MemorySite, address: Array, operation: str, kind: str, value: Array, new: Array | None,
                      wanted: bool) -> Array:  # fmt: skip
        offset = group.spread(self.global_offset(group, site, address, True))
        if self.races:
            self.launch.reads.mark(offset, site.size)
            self.launch.writes.mark(offset, site.size)
            self._count_sectors(group, site, offset)
            self._tracked(site, offset, True)
            if site.release:
                self.races.fence(group)
            self.races.read_global(group, site, offset)
            self.races.acquire(group)
        return self._perform(self.image, group, site, offset, operation, kind, value, new, wanted)

    def atomic_shared(self, group: Group, site: MemorySite, address: Array, operation: str, kind: str, value: Array, new: Array | None,
                      wanted: bool) -> Array:  # fmt: skip
        offset = group.spread(self.block_offset(group, site, address))
        if self.races:
            self._count_wavefronts(group, site, offset)
        offset = offset + self._base(group, "shared", self.shared_base)
        if self.races:
            self.races.read_shared(group, site, offset)
        return self._perform(self.shared, group, site, offset, operation, kind, value, new, wanted)

    def _perform(self, where: Bytes, group: Group, site: MemorySite, offset: Array, operation: str, kind: str, value: Array,
                 new: Array | None, wanted: bool) -> Array:  # fmt: skip
        index = offset >> (site.size.bit_length() - 1)
        value = np.ascontiguousarray(group.spread(value))
        new = None if new is None else group.spread(new)
        return perform(where.words[site.width], index, operation, kind, value, new, wanted)

    def atomic_generic(self, group: Group, site: MemorySite, address: Array, operation: str, kind: str, value: Array, new: Array | None,
                       wanted: bool) -> Array:  # fmt: skip
        shifted = group.spread(address + np.uint64(site.offset & (2**64 - 1)))
        value = group.spread(value)
        old = np.zeros(group.n, value.dtype)
        for space, lanes in self._spaces(group, shifted):
            if space not in ("global", "shared"):
                raise self.machine.fault(faults.OUT_OF_BOUNDS, site.instruction, f"{site.name} on {space} memory", int(group.lanes[0]))
            chosen = np.ones(group.n, bool) if lanes is None else lanes
            operands = (value[chosen], None if new is None else group.spread(new)[chosen])
            atomic = self.atomic_global if space == "global" else self.atomic_shared
            place = shifted[chosen] - np.uint64(WINDOWS[space])
            old[chosen] = atomic(group.part(chosen), site.inside(space), place, operation, kind, *operands, wanted)
        return old

    def fence(self, group: Group) -> None:
        """Lanes have executed a fence of device or system scope."""
        if self.races:
            self.races.fence(group)

    # Generic addresses

    def _spaces(self, group: Group, address: Array) -> list[tuple[str, Array | None]]:
        """Return [(space, lanes or None for all)] by address window."""
        window = address >> np.uint64(WINDOW_BITS)
        names = {WINDOWS[name] >> WINDOW_BITS: name for name in ("shared", "local")}
        names[WINDOWS["param"] >> WINDOW_BITS] = "param"
        kinds = np.unique(window)
        spaces = [(names.get(int(kind), "global"), window == kind) for kind in kinds]
        if len({name for name, _ in spaces}) == 1:
            return [(spaces[0][0], None)]
        merged: dict[str, Array] = {}
        for name, lanes in spaces:
            merged[name] = merged[name] | lanes if name in merged else lanes
        return list(merged.items())

    def load_generic(self, group: Group, site: MemorySite, address: Array) -> list[Array]:
        shifted = address + np.uint64(site.offset & (2**64 - 1))
        parts = self._spaces(group, shifted)
        results: list[Array] = []
        for space, lanes in parts:
            inner = site.inside(space)
            base = np.uint64(WINDOWS[space])
            loader = getattr(self, f"load_{space}")
            if lanes is None:
                found: list[Array] = loader(group, inner, shifted - base)
                return found
            values = loader(group.part(lanes), inner, shifted[lanes] - base)
            results = results or [np.zeros(group.n, value.dtype) for value in values]
            for result, value in zip(results, values, strict=True):
                result[lanes] = value
        return results

    def store_generic(self, group: Group, site: MemorySite, address: Array, values: list[Array]) -> None:
        shifted = address + np.uint64(site.offset & (2**64 - 1))
        for space, lanes in self._spaces(group, shifted):
            inner = site.inside(space)
            base = np.uint64(WINDOWS[space])
            storer = getattr(self, f"store_{space}")
            if lanes is None:
                storer(group, inner, shifted - base, values)
            else:
                chosen = [value if value.size == 1 else value[lanes] for value in values]
                storer(group.part(lanes), inner, shifted[lanes] - base, chosen)

    def store_param(self, group: Group, site: MemorySite, address: Array, values: list[Array]) -> None:
        raise self.machine.fault(faults.CONSTANT_WRITE, site.instruction, f"{site.name} to the parameters", int(group.lanes[0]))

"""A launch: arguments packed, memory laid out, blocks run in chunks, everything counted."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sm70kernels.emulator.arguments import Extent, extent_of, is_array, pack_scalar
from sm70kernels.emulator.counters import Counters, SiteTally, Touched, summarise
from sm70kernels.emulator.faults import EmulatorError
from sm70kernels.emulator.group import Group
from sm70kernels.emulator.machine import Machine
from sm70kernels.emulator.memory import GLOBAL_BASE, Bytes, Region, Regions
from sm70kernels.emulator.program import Program, initial_bytes, program_of
from sm70kernels.emulator.shadow import Fences, Shadow
from sm70kernels.emulator.sites import MemorySite

Array = NDArray[Any]
Size = int | Sequence[int]

STEPS = 4_000_000
"""Instructions a warp may execute before its loop counts as endless."""

CHUNK_LANES = 8192
"""Lanes that run side by side: enough to make NumPy's cost for a call small beside its work, few enough to stay in the cache."""

SLICE = 1000
"""Atomics and strong loads of a chunk before another chunk has a turn: its blocks may be waiting for those of others."""

MOST_SHARED = 98304
"""Bytes of shared memory a block may have on SM70."""


def three(name: str, size: Size, limits: tuple[int, int, int]) -> tuple[int, int, int]:
    """Return a grid or block size as (x, y, z). Raises ValueError for other than one to three positive ints within the limits."""
    given = (size,) if isinstance(size, (int, np.integer)) else tuple(size)
    if not 1 <= len(given) <= 3 or any(not isinstance(n, (int, np.integer)) for n in given):
        raise ValueError(f"{name} {size!r}: one to three ints are needed")
    x, y, z = (*map(int, given), 1, 1)[:3]
    if any(not 1 <= n <= limit for n, limit in zip((x, y, z), limits, strict=True)):
        raise ValueError(f"{name} {(x, y, z)}: each must be from 1 to {limits}")
    return x, y, z


class Launch:
    """One call of emulate: what its chunks of blocks share."""

    def __init__(self, program: Program, grid: Size, block: Size, arguments: tuple[object, ...], shared: int, check: bool,
                 order: int | None, steps: int | None) -> None:  # fmt: skip
        self.program = program
        self.grid = three("grid", grid, (2**31 - 1, 65535, 65535))
        self.block = three("block", block, (1024, 1024, 64))
        self.threads = self.block[0] * self.block[1] * self.block[2]
        self.blocks = self.grid[0] * self.grid[1] * self.grid[2]
        self._check_block(shared)
        self.dynamic_shared = shared
        self.shared_size = program.dynamic_start + shared if shared else program.static_shared
        if self.shared_size > MOST_SHARED:
            raise ValueError(f"{program.name}: {self.shared_size} bytes of shared memory; a block of SM70 has {MOST_SHARED}")
        self.check = check
        self.order = order
        self.steps = STEPS if steps is None else steps
        self.now = 0
        self._lay_out(arguments)
        self.runs: dict[tuple[int, ...], list[int]] = {}
        self.tallies = [SiteTally() for _ in program.sites]
        self.reads = Touched(self.image.size)
        self.writes = Touched(self.image.size)
        self.global_unit = program.global_unit
        units = self.image.size // self.global_unit if check else 0
        self.shadow = Shadow(units, across=True)
        self.constant_units = np.zeros(units, bool)
        self.fences = Fences(self.blocks)

    def _check_block(self, shared: int) -> None:
        function, name = self.program.function, self.program.name
        most = function.max_threads or 1024
        if self.threads > min(most, 1024):
            raise ValueError(f"{name}: block {self.block} has {self.threads} threads; the kernel allows {min(most, 1024)}")
        if function.required_block and function.required_block != self.block:
            raise ValueError(f"{name}: block {self.block}; the kernel requires {function.required_block}")
        if shared < 0:
            raise ValueError(f"{name}: shared={shared} is negative")

    def _lay_out(self, arguments: tuple[object, ...]) -> None:
        """Place module variables and arguments in the image of global memory and fill the parameter bank."""
        program = self.program
        if len(arguments) != len(program.parameters):
            raise ValueError(f"{program.name}: {len(arguments)} arguments, expected {len(program.parameters)}")
        self.parameters = Bytes(program.parameter_size)
        regions = [Region(place, place + variable.size, f"variable {variable.name}", variable.space != "const", variable.space == "const")
                   for variable, place in program.images]  # fmt: skip
        extents: list[tuple[int, Extent]] = []
        for position, (argument, (variable, offset)) in enumerate(zip(arguments, program.parameters, strict=True)):
            if is_array(argument):
                if variable.type not in ("u64", "b64", "s64") or variable.array:
                    raise ValueError(f"{program.name}: argument {position} is an array, expected a .{variable.type} ({variable.name})")
                extents.append((position, extent_of(argument, f"{program.name}: argument {position}")))
            else:
                data = pack_scalar(argument, variable, f"{program.name}: argument {position} ({variable.name})")
                self.parameters.bytes[offset : offset + len(data)] = np.frombuffer(data, np.uint8)
        self.copies: list[tuple[Extent, int]] = []
        place = program.image_end
        for owner in dict.fromkeys(extent.owner for _, extent in extents):
            members = [(position, extent) for position, extent in extents if extent.owner == owner]
            low = min(extent.start for _, extent in members)
            low -= (low - owner[0]) % 512  # keep the alignment that the allocation gives its parts
            high = max(extent.end for _, extent in members)
            span = high - low
            base = -(-(place + max(4096, min(span, 1 << 26))) // 512) * 512
            place = base + span + max(4096, min(span, 1 << 26))
            for position, extent in members:
                start = base + extent.start - low
                self.copies.append((extent, start))
                address = GLOBAL_BASE + base + extent.first - low
                offset = program.parameters[position][1]
                self.parameters.bytes[offset : offset + 8] = np.frombuffer(address.to_bytes(8, "little"), np.uint8)
            regions += _disjoint([(position, extent, base + extent.start - low) for position, extent in members])
        names = {f"argument {position}": variable.name for position, (variable, _) in enumerate(program.parameters)}
        for region in regions:
            parts = region.name.removeprefix("argument ").split(" and ")
            region.tracked = any(names.get(f"argument {part}", part) in program.written for part in parts)
            region.tracked |= region.name.removeprefix("variable ") in program.written
        self.regions = Regions(regions)
        self.image = Bytes(place + 4096)
        for variable, start in program.images:
            self.image.bytes[start : start + variable.size] = np.frombuffer(initial_bytes(variable), np.uint8)
        for extent, start in self.copies:
            self.image.bytes[start : start + extent.size] = extent.data
        for site in program.sites:
            site.region = None
            for part in site.parts.values():
                part.region = None

    def account(self, pieces: tuple[int, ...], group: Group) -> int:
        """Note that a group runs these pieces; return how many instructions a warp executes."""
        found = self.runs.get(pieces)
        if found is None:
            length = sum(self.program.pieces[piece].length for piece in pieces)
            found = self.runs[pieces] = [0, 0, length]
        found[0] += len(group.starts)
        found[1] += group.n
        return found[2]

    def tally(self, site: MemorySite, group: Group) -> SiteTally:
        found = self.tallies[site.number]
        found.requests += len(group.starts)
        found.bytes += group.n * site.size
        found.space = site.space
        return found

    def thread_index(self, number: int) -> tuple[int, int, int]:
        """threadIdx of a thread of a block."""
        x, y, _ = self.block
        return number % x, number // x % y, number // (x * y)

    def block_index(self, number: int) -> tuple[int, int, int]:
        """blockIdx of a block of the grid."""
        x, y, _ = self.grid
        return number % x, number // x % y, number // (x * y)

    def run(self) -> Counters:
        """Run every block; the arguments hold the results afterwards, up to the fault if there is one."""
        chunk = max(1, CHUNK_LANES // self.threads)
        waiting: list[Machine] = []
        try:
            with np.errstate(all="ignore"):
                for first in range(0, self.blocks, chunk):
                    machine = Machine(self, first, min(chunk, self.blocks - first))
                    if not machine.run(SLICE):
                        waiting.append(machine)
                while waiting:
                    waiting = [machine for machine in waiting if not machine.run(SLICE)]
        except IndexError as error:
            if self.check:
                raise
            raise EmulatorError(f"{self.program.name}: an address outside memory ({error}); run it with check=True to see where") from error
        finally:
            for extent, start in self.copies:
                if extent.writable:
                    extent.data[:] = self.image.bytes[start : start + extent.size]
        return summarise(self)


def _disjoint(members: list[tuple[int, Extent, int]]) -> list[Region]:
    """Regions of the arguments in one allocation; overlapping ones become one region that names them all."""
    regions: list[Region] = []
    for position, extent, start in sorted(members, key=lambda member: (member[2], member[0])):
        end = start + extent.size
        if regions and start < regions[-1].end:
            last = regions.pop()
            regions.append(Region(last.start, max(last.end, end), f"{last.name} and {position}", last.writable and extent.writable))
        else:
            regions.append(Region(start, end, f"argument {position}", extent.writable))
    return regions


def emulate(ptx: str, kernel: str, grid: Size, block: Size, *arguments: object, shared: int = 0, check: bool = True,
            order: int | None = None, steps: int | None = None) -> Counters:  # fmt: skip
    """Run a kernel of PTX for compute_70 on the CPU and return what it did.

    ptx: the text NVRTC or Triton made. kernel: name of a .entry. grid, block: an int or up to three. arguments: one for each .param, in
    order: a NumPy array or a CPU tensor (a pointer to its first element, which may touch the bytes its shape and strides span, and is
    written in place), None (a null pointer), an int, float, bool or NumPy scalar (packed as the .param's type), or bytes (a struct).
    shared: bytes of dynamic shared memory. check: look for faults and count; without it the run is faster and Counters has only
    instruction counts. order: None runs warps in a fixed order, an int seeds a random one. steps: instructions a warp may execute.
    Variables of the module begin every launch with their initial values. Translations are kept by the PTX's text.

    Raises ValueError for a wrong call, UnknownInstruction for PTX that is not implemented, Fault for a fault of the kernel.
    """
    return Launch(program_of(ptx, kernel), grid, block, arguments, shared, check, order, steps).run()

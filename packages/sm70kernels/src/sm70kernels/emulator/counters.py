"""What a launch did: instructions by class, memory requests by site, bytes touched.

Counts are exact for the PTX: mma, bytes and sectors carry over to the machine code; ALU counts and shared-memory widths change where
ptxas merges or spills.
"""

from collections import Counter
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from sm70kernels.emulator.syntax import Instruction

if TYPE_CHECKING:
    from sm70kernels.emulator.launch import Launch

Array = NDArray[Any]

GROUPS = {
    "logic": "and or xor not cnot lop3 shl shr shf bfe bfi bfind brev clz popc prmt", "move": "mov cvta selp slct prefetch prefetchu",
    "int": "add sub mul mad addc subc madc div rem abs neg min max sad dp4a dp2a mul24 mad24 setp set copysign testp",
    "control": "bra brx call ret exit trap", "sync": "bar barrier membar fence nanosleep",
    "mufu": "ex2 lg2 sin cos rsqrt rcp sqrt", "shuffle": "shfl vote match activemask", "mma": "mma", "cvt": "cvt",
}  # fmt: skip
"""Opcodes by class. Comparisons and extremes of f32 are in "int": they run on the same pipe."""

CLASSES = {opcode: name for name, opcodes in GROUPS.items() for opcode in opcodes.split()}
SINGLE = {"add": "fadd", "sub": "fadd", "mul": "fmul", "fma": "ffma", "mad": "ffma", "div": "mufu"}
SPACES = ("global", "shared", "local", "const", "param")


def class_of(i: Instruction) -> str:
    """Return the class an instruction is counted in; a generic address counts as global memory."""
    words = [part.removesuffix("::cta") for part in i.parts[1:]]
    if i.base in ("ld", "ldu", "st", "atom", "red"):
        operation = {"ldu": "ld", "red": "atom"}.get(i.base, i.base)
        return f"{operation}.{next((word for word in words if word in SPACES), 'global')}"
    if i.base in ("cvt", "mma", "mov", "selp", "slct"):
        return CLASSES[i.base]
    if "f16" in words or "f16x2" in words:
        return "half"
    if "f64" in words:
        return "fp64"
    return SINGLE[i.base] if "f32" in words and i.base in SINGLE else CLASSES[i.base]


@dataclass
class SiteTally:
    """Running counts of one memory instruction."""

    requests: int = 0
    bytes: int = 0
    sectors: int = 0
    minimum_sectors: int = 0
    wavefronts: int = 0
    minimum_wavefronts: int = 0
    space: str = ""


class Touched:
    """Which bytes were accessed at least once, kept as one flag for each aligned unit of every access width."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.flags: dict[int, Array] = {}

    def mark(self, offset: Array, size: int) -> None:
        flags = self.flags.get(size)
        if flags is None:
            flags = self.flags[size] = np.zeros(-(-self.size // size), bool)
        flags[offset >> (size.bit_length() - 1)] = True

    def count(self) -> int:
        """Number of distinct bytes."""
        if not self.flags:
            return 0
        widths = sorted(self.flags)
        if len(widths) == 1:
            return widths[0] * int(np.count_nonzero(self.flags[widths[0]]))
        smallest = widths[0]
        units = -(-self.size // smallest)
        union = np.zeros(-(-units // 16) * 16, bool)
        for width in widths:
            flags = self.flags[width]
            union[: len(flags) * (width // smallest)].reshape(len(flags), -1)[:] |= flags[:, None]
        return smallest * int(np.count_nonzero(union))


@dataclass(frozen=True)
class Site:
    """A memory instruction that was executed. line: "file.cu:31". requests: warps that executed it; bytes: asked for by active lanes.

    sectors, minimum_sectors: of 32 bytes, for global memory; wavefronts, minimum_wavefronts: for shared memory. The minimum is what the
    same bytes would need if they lay together.
    """

    ptx_line: int
    line: str
    text: str
    space: str
    requests: int
    bytes: int
    sectors: int = 0
    minimum_sectors: int = 0
    wavefronts: int = 0
    minimum_wavefronts: int = 0

    def __add__(self, other: "Site") -> "Site":
        counts = ("requests", "bytes", "sectors", "minimum_sectors", "wavefronts", "minimum_wavefronts")
        return replace(self, **{name: getattr(self, name) + getattr(other, name) for name in counts})


@dataclass(frozen=True)
class Counters:
    """Counts of one launch, or of several added together; then kernel, grid and block are those of the first.

    classes: warp-level instruction counts by class. global_bytes_read, global_bytes_written: distinct bytes of global memory a launch
    touched, which is the traffic it cannot avoid; sums of launches add them up.
    """

    kernel: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    threads: int
    warp_instructions: int
    thread_instructions: int
    classes: dict[str, int] = field(default_factory=dict)
    sites: tuple[Site, ...] = ()
    global_bytes_read: int = 0
    global_bytes_written: int = 0

    def _sum(self, name: str, *spaces: str) -> int:
        return sum(getattr(site, name) for site in self.sites if site.space in spaces)

    @property
    def sectors(self) -> int:
        """32-byte sectors moved between global memory and the SMs."""
        return self._sum("sectors", "global", "const", "generic")

    @property
    def minimum_sectors(self) -> int:
        """Sectors the same requests would need if their bytes lay together."""
        return self._sum("minimum_sectors", "global", "const", "generic")

    @property
    def sector_bytes(self) -> int:
        """Bytes in those sectors, loads, stores and atomics."""
        return 32 * self.sectors

    @property
    def wavefronts(self) -> int:
        """Passes of shared memory."""
        return self._sum("wavefronts", "shared", "generic")

    @property
    def minimum_wavefronts(self) -> int:
        """Passes of shared memory without bank conflicts."""
        return self._sum("minimum_wavefronts", "shared", "generic")

    @property
    def mma(self) -> int:
        """mma.m8n8k4 of warps: 1024 multiply-adds each."""
        return self.classes.get("mma", 0)

    @property
    def ffma(self) -> int:
        """fma.f32 of warps: 32 multiply-adds each."""
        return self.classes.get("ffma", 0)

    def __add__(self, other: "Counters") -> "Counters":
        """Counts of two launches together. Sites of one PTX line and text are added, in the order they first appear."""
        sites: dict[tuple[int, str, str, str], Site] = {}
        for site in (*self.sites, *other.sites):
            key = (site.ptx_line, site.line, site.text, site.space)
            known = sites.get(key)
            sites[key] = site if known is None else known + site
        return Counters(
            self.kernel, self.grid, self.block, self.threads + other.threads, self.warp_instructions + other.warp_instructions,
            self.thread_instructions + other.thread_instructions, dict(sorted((Counter(self.classes) + Counter(other.classes)).items())),
            tuple(sites.values()), self.global_bytes_read + other.global_bytes_read, self.global_bytes_written + other.global_bytes_written,
        )  # fmt: skip

    def table(self) -> str:
        """Return a report: totals, instructions by class, and memory by site with the least possible beside what it took."""
        lines = [f"{self.kernel}: grid {self.grid}, block {self.block}, {self.warp_instructions} warp instructions, "
                 f"{self.thread_instructions} thread instructions",
                 f"global memory: {self.global_bytes_read} bytes read, {self.global_bytes_written} written, {self.sector_bytes} in sectors",
                 "", f"{'class':<14} {'warp instructions':>18}"]  # fmt: skip
        lines += [f"{name:<14} {count:>18}" for name, count in sorted(self.classes.items(), key=lambda item: -item[1])]
        lines += ["", f"{'site':<24} {'requests':>10} {'bytes':>12} {'moved':>10} {'least':>10}  instruction"]
        for site in self.sites:
            place = site.line or f"PTX line {site.ptx_line}"
            moved, least = (site.wavefronts, site.minimum_wavefronts) if site.wavefronts else (site.sectors, site.minimum_sectors)
            lines.append(f"{place:<24} {site.requests:>10} {site.bytes:>12} {moved:>10} {least:>10}  {site.text}")
        lines.append("moved, least: sectors of 32 bytes, or wavefronts of shared memory")
        return "\n".join(lines)


def summarise(launch: "Launch") -> Counters:
    """Make the Counters of a finished launch."""
    program = launch.program
    warps: Counter[int] = Counter()
    lanes: Counter[int] = Counter()
    for pieces, (warp_runs, lane_runs, _) in launch.runs.items():
        for number in pieces:
            warps[number] += warp_runs
            lanes[number] += lane_runs
    classes: Counter[str] = Counter()
    thread_instructions = 0
    for number, runs in warps.items():
        piece = program.pieces[number]
        for instruction in piece.issued:
            classes[class_of(instruction)] += runs
        thread_instructions += piece.executed * lanes[number]
    sites = tuple(
        Site(site.instruction.ptx_line, site.instruction.source, site.instruction.text, tally.space, tally.requests, tally.bytes,
             tally.sectors, tally.minimum_sectors, tally.wavefronts, tally.minimum_wavefronts)
        for site, tally in zip(program.sites, launch.tallies, strict=True) if tally.requests
    )  # fmt: skip
    return Counters(program.name, launch.grid, launch.block, launch.threads * launch.blocks, sum(classes.values()), thread_instructions,
                    dict(sorted(classes.items())), sites, launch.reads.count(), launch.writes.count())  # fmt: skip

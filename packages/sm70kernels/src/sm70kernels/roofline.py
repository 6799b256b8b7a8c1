"""What a call would cost on a V100: an estimate from what its kernels do in the emulator. It is not measured on a V100.

The emulator counts a launch exactly; the model turns the counts into the time each part of the machine would need at least, and takes the
largest. Parts overlap perfectly in it, latency is hidden, and what is read twice is in L2 the second time: real kernels are slower. Sizes
that would take long to emulate are run at two smaller values of one dim, and every count is carried on along the straight line.
"""

from dataclasses import dataclass, fields
from math import gcd
from typing import TYPE_CHECKING, Any

from sm70kernels.bench import arguments
from sm70kernels.bench.cases import Case
from sm70kernels.cuda import emulated
from sm70kernels.dims import Derived
from sm70kernels.resources import threads

if TYPE_CHECKING:
    from sm70kernels.emulator import Counters

LABEL = "estimate, not measured on a V100"

HBM = 830e9
"""Bytes a second of clean reads that a V100 reaches of its 900 GB/s."""
CLOCK = 1.38e9
MULTIPROCESSORS, SUB_CORES = 80, 4
MMA_CYCLES = 8
"""Cycles the tensor cores of a sub-core are busy with one mma.m8n8k4: 1024 multiply-adds at 128 a cycle."""
MMA_ISSUES = 4
"""Machine instructions of one mma.m8n8k4 with float32 accumulators."""
SECTORS_PER_CYCLE = 4
"""32-byte sectors a cycle the path to a multiprocessor's L1 and shared memory moves (128 bytes)."""
LAUNCH = 2e-6
"""Seconds from one kernel of a graph to the next that depends on it."""

LIMIT = 50_000_000
"""Thread instructions up to which a call is emulated as it is; about a second."""


@dataclass(frozen=True)
class Work:
    """What one launch does; fractions come from carrying counts on. Sectors are of 32 bytes, wavefronts of 128."""

    kernel: str
    blocks: float
    warps: float
    instructions: float
    thread_instructions: float
    mma: float
    bytes: float
    sectors: float
    wavefronts: float

    def bounds(self) -> dict[str, float]:
        """Return the seconds each part of a V100 needs for this launch at least, by name of the part.

        HBM moves every byte the launch touches once. The rest is bound by the busiest multiprocessor, which has ceil(blocks/80) of the
        blocks, and whose four sub-cores issue one warp instruction a cycle each if it has that many warps.
        """
        busiest = -(-self.blocks // MULTIPROCESSORS) / self.blocks if self.blocks else 0.0
        sub_cores = max(1.0, min(SUB_CORES, self.warps * busiest))
        issues = self.instructions + (MMA_ISSUES - 1) * self.mma
        return {
            "HBM": self.bytes / HBM,
            "issue": issues * busiest / sub_cores / CLOCK,
            "tensor": self.mma * MMA_CYCLES * busiest / sub_cores / CLOCK,
            "L1 and shared": (self.wavefronts + self.sectors / SECTORS_PER_CYCLE) * busiest / CLOCK,
            "launch": LAUNCH,
        }


@dataclass(frozen=True)
class Estimate:
    """What the launches of one call do, the bytes it moves at least, and how counts were carried on ("" where they were not)."""

    works: tuple[Work, ...]
    bytes: int
    scaled: str

    @property
    def seconds(self) -> float:
        """The estimate: launches follow each other, and each takes as long as the part of the machine it needs longest."""
        return sum(max(work.bounds().values()) for work in self.works)

    @property
    def parts(self) -> dict[str, float]:
        """Seconds each part of the machine needs for all launches, the longest first."""
        names = self.works[0].bounds()
        sums = {name: sum(work.bounds()[name] for work in self.works) for name in names}
        return dict(sorted(sums.items(), key=lambda item: -item[1]))

    @property
    def floor(self) -> float:
        return self.bytes / HBM

    @property
    def share(self) -> float:
        """How near the estimate is to the floor: 1 is a call that only moves its bytes."""
        return self.floor / self.seconds


def of_counters(counters: "Counters") -> Work:
    """Return the work of one emulated launch."""
    blocks = threads(counters.grid)
    return Work(
        kernel=counters.kernel,
        blocks=blocks,
        warps=blocks * -(-threads(counters.block) // 32),
        instructions=counters.warp_instructions,
        thread_instructions=counters.thread_instructions,
        mma=counters.classes.get("mma", 0),
        bytes=counters.global_bytes_read + counters.global_bytes_written,
        sectors=counters.sectors,
        wavefronts=sum(site.wavefronts for site in counters.sites),
    )


def carried_on(small: Work, large: Work, steps: float) -> Work:
    """Return `large` and `steps` times what it has more than `small`."""
    along = {
        name: getattr(large, name) + steps * (getattr(large, name) - getattr(small, name))
        for name in (item.name for item in fields(Work))
        if name != "kernel"
    }
    return Work(kernel=large.kernel, **along)


def run(case: Case, config: Any) -> list[Work]:
    """Launch a case once in the emulator, at any sizes the kernel compiles for; returns the work of every launch of the call."""
    op, of = case.op, case.of
    assert op.launch is not None
    with emulated() as counters:
        op.launch(config, op.sizes(case.dims), *arguments.make(op, case.dims, of.given, storage=of.storage).values())
    return [of_counters(each) for each in counters]


def estimate(case: Case, *, config: Any = None, limit: int = LIMIT) -> Estimate:
    """Return the estimate of one call in a configuration (None: the chosen one); `limit` is on the thread instructions to emulate."""
    sizes = case.op.sizes(case.dims)
    config = case.op.config(sizes) if config is None else config
    smaller = reduced(case, limit)
    if smaller is None:
        works, scaled = run(case, config), ""
    else:
        dim, size = smaller
        small, large = (run(case.at({dim: times * size}), config) for times in (1, 2))
        works = [carried_on(a, b, sizes[dim] / size - 2) for a, b in zip(small, large, strict=True)]
        scaled = f"counts carried on from {dim} = {size} and {2 * size}"
    return Estimate(tuple(works), case.bytes, scaled)


def expected(case: Case) -> float:
    """Guess the thread instructions of a call: one a multiply-add and one for two bytes moved."""
    return max(case.bytes / 2, case.flops / 2)


def reduced(case: Case, limit: int) -> tuple[str, int] | None:
    """Return the dim to make smaller and the lower of its two sizes; None for a call that is small enough as it is.

    It is the dim, never the rows, with which the work shrinks most nearly in proportion; of equals an axis of an output, which makes fewer
    blocks rather than shorter loops. Its sizes are multiples of what 128 and the real size have in common, so that tiles stay whole.
    """
    whole, sizes = expected(case), case.op.sizes(case.dims)
    if whole <= limit:
        return None
    fixed = {case.of.rows_dim, *case.of.follows, *(name for name, dim in case.op.dims.items() if isinstance(dim, Derived))}
    units = {name: gcd(size, 128) for name, size in sizes.items() if name not in fixed}
    halves = {name: sizes[name] // (2 * unit) * unit for name, unit in units.items() if sizes[name] // unit >= 4}
    # Work left over beyond the proportion: 1 for a dim that all of it is proportional to.
    excess = {name: expected(case.at({name: half})) / whole / (half / sizes[name]) for name, half in halves.items()}
    best = min(excess.values(), default=2.0)
    if best > 1.5:
        return None
    outputs = {axis for arg in case.op.args if arg.is_out for axis in arg.axes}
    name = min((name for name in excess if excess[name] <= 1.1 * best), key=lambda name: name not in outputs)
    return name, max(int(sizes[name] * limit / whole / 3) // units[name] * units[name], units[name])

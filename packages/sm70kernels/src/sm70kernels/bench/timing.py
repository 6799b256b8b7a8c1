"""Times a call as it runs in a decode step: inside a CUDA graph, with nothing of its own left in the L2 cache.

The graph holds the call many times, each on its own copy of every argument, so many that more than twice the L2 cache is touched before
one is used again; where copies alone do not come to that, a read of other memory follows them. The same graph without the calls is timed
too and subtracted: what remains is the calls. A read-only kernel over as many bytes is timed in the same way.
"""

import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from sm70kernels import build
from sm70kernels.bench import arguments, read_only
from sm70kernels.bench.cases import Case
from sm70kernels.cuda import Need
from sm70kernels.driver import Function, load

MOST_COPIES = 256
COLD = 2.0
"""Times the L2 cache that lie between two uses of one copy."""
BUFFER = 2 << 30
"""Bytes of the memory that is read to displace the cache and to compare with."""
SAMPLES, WARM_UP = 25, 3
MEMORY = 0.4
"""Part of the free memory that copies may take."""

Replay = Callable[[], float]
"""Runs a captured graph once and returns its microseconds."""


class NotCold(RuntimeError):
    """The device has no room for what a cold measurement needs."""


class Device(Protocol):
    """What a measurement needs of a machine."""

    name: str
    capability: tuple[int, int]
    cache: int
    """Bytes of L2."""
    torch_device: str

    def free(self) -> int: ...

    def capture(self, work: Callable[[], object]) -> Replay: ...

    def read(self, start: int, size: int) -> None: ...


class Cuda:
    """The current CUDA device."""

    def __init__(self) -> None:
        self.index = torch.cuda.current_device()
        properties = torch.cuda.get_device_properties(self.index)
        self.name = properties.name
        self.capability = (properties.major, properties.minor)
        self.cache = properties.L2_cache_size
        self.torch_device = f"cuda:{self.index}"
        self._multiprocessors = properties.multi_processor_count
        self.buffer = torch.zeros(BUFFER, dtype=torch.uint8, device=self.torch_device)
        self._found = torch.zeros(4, dtype=torch.uint8, device=self.torch_device)
        self.reader: Function = load(read_only.image(), read_only.NAME, self.index)
        self.read(0, 16)  # the driver may put off loading until a first launch, which a capture must not be

    def free(self) -> int:
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info(self.index)[0]

    def read(self, start: int, size: int) -> None:
        """Launch the read-only kernel on so many bytes of the buffer."""
        count = size // 16
        part = self.buffer[start : start + size]
        self.reader.launch(read_only.grid(count, self._multiprocessors), read_only.THREADS, (part, count, 1, self._found))

    def capture(self, work: Callable[[], object]) -> Replay:
        """Capture what `work` launches as one graph."""
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            work()
        before, after = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)

        def replay() -> float:
            before.record()
            graph.replay()
            after.record()
            after.synchronize()
            return float(before.elapsed_time(after)) * 1e3

        return replay


@dataclass(frozen=True)
class Times:
    """Microseconds of one call: median, and the tenth and ninetieth percentile over repeats."""

    median: float
    low: float
    high: float


@dataclass(frozen=True)
class Result:
    """One case on one machine. Times in microseconds, bytes and operations of one call, rates as GB/s and TFLOP/s."""

    op: str
    case: str
    rows: int
    dims: dict[str, int]
    config: str
    kernels: int
    emulated_mma: bool
    copies: int
    touched: int
    """Bytes between two uses of one copy."""
    bytes: int
    flops: int
    time: Times
    read_only: Times
    gb_s: float
    tflop_s: float
    of_read_only: float
    """How near the call comes to the kernel that only reads as many bytes."""

    def record(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Prepared:
    """A captured case: how often the graph holds the call, its launches, its configuration, the graph, the graph without the calls."""

    copies: int
    needs: tuple[Need, ...]
    config: str
    replay: Replay
    rest: Replay


class Stopwatch:
    """Measures calls on one device; graphs of the read-only kernel are timed once for each size."""

    def __init__(self, device: Device, samples: int = SAMPLES) -> None:
        self.device = device
        self.samples = samples
        self._reads: dict[tuple[int, int], Times] = {}
        self._rests: dict[int, Replay] = {}

    def prepare(self, case: Case, config: Any = None) -> "Prepared":
        """Make the arguments of a case, launch it once, and capture it, in its chosen configuration or the given one.

        Raises what the call raises, and NotCold.
        """
        op, dims = case.op, case.op.sizes(case.dims)
        assert op.launch is not None
        launch, chosen = op.launch, op.config(dims) if config is None else config
        first = arguments.make(op, case.dims, case.of.given, storage=case.of.storage, device=self.device.torch_device)
        op.contract.bind(tuple(first.values()), kernel=True)
        copies = self.copies(case.bytes, arguments.size(first))
        sets = [tuple(first.values()), *(tuple(arguments.copy(first).values()) for _ in range(copies - 1))]
        launch(chosen, dims, *sets[0])  # loads the kernels, which a capture cannot
        needs = build.launches(op, chosen, dims, tuple(_meta(value) for value in first.values()))

        def launch_all() -> None:
            for values in sets:
                launch(chosen, dims, *values)

        replay, rest = self._captured(copies, case.bytes, launch_all)
        return Prepared(copies, needs, build.brief(chosen), replay, rest)

    def measure(self, case: Case, config: Any = None) -> Result:
        """Time one case beside the read-only kernel; see prepare."""
        prepared, moved = self.prepare(case, config), case.bytes
        copies = prepared.copies
        time, read = self._timed(copies, prepared.replay, prepared.rest), self._read(copies, moved)
        mma = any("mma.sync" in build.fetch(need.op, need.defines).ptx for need in prepared.needs)
        return Result(
            op=case.op.name, case=case.name, rows=case.rows, dims=dict(case.dims), config=prepared.config, kernels=len(prepared.needs),
            emulated_mma=mma and self.device.capability > (7, 0), copies=copies, touched=copies * moved + self._rest(copies, moved),
            bytes=moved, flops=case.flops, time=time, read_only=read, gb_s=moved / time.median / 1e3,
            tflop_s=case.flops / time.median / 1e6, of_read_only=read.median / time.median,
        )  # fmt: skip

    def copies(self, moved: int, size: int) -> int:
        """Return how many copies of the arguments to rotate over: enough to displace the cache, if they fit and are not too many."""
        wanted = min(int(COLD * self.device.cache / max(moved, 1)) + 1, MOST_COPIES)
        room = int(self.device.free() * MEMORY // max(size, 1))
        if room < 1:
            raise NotCold(f"{self.device.name}: {size} bytes of arguments, {self.device.free()} bytes of memory are free")
        return max(1, min(wanted, room))

    def _rest(self, copies: int, moved: int) -> int:
        """Bytes to read after the copies so that the cache holds none of them."""
        return max(int(COLD * self.device.cache) - copies * moved, 0) // 16 * 16

    def _read(self, copies: int, moved: int) -> Times:
        """Time the read-only kernel on so many bytes, in as many places."""
        moved = max(moved // 16 * 16, 16)
        if moved > BUFFER:
            raise NotCold(f"{self.device.name}: a call of {moved} bytes is more than the {BUFFER} there are to compare with")
        if (copies, moved) not in self._reads:
            starts = [number * moved % (BUFFER - moved + 1) // 16 * 16 for number in range(copies)]

            def read_all() -> None:
                for start in starts:
                    self.device.read(start, moved)

            replay, rest = self._captured(copies, moved, read_all)
            self._reads[copies, moved] = self._timed(copies, replay, rest)
        return self._reads[copies, moved]

    def _captured(self, copies: int, moved: int, work: Callable[[], None]) -> tuple[Replay, Replay]:
        """Capture the work and the read that follows it, and that read alone: at least 16 bytes, so that both graphs hold something."""
        rest = max(self._rest(copies, moved), 16)

        def displace() -> None:
            self.device.read(BUFFER - rest, rest)

        def everything() -> None:
            work()
            displace()

        if rest not in self._rests:
            self._rests[rest] = self.device.capture(displace)
        return self.device.capture(everything), self._rests[rest]

    def _timed(self, copies: int, replay: Replay, rest: Replay) -> Times:
        for _ in range(WARM_UP):
            replay()
            rest()
        # Side by side, so that a clock that changes changes both.
        pairs = [(replay(), rest()) for _ in range(self.samples)]
        base = statistics.median(without for _, without in pairs)
        found = sorted((whole - base) / copies for whole, _ in pairs)
        return Times(statistics.median(found), found[len(found) // 10], found[-1 - len(found) // 10])


def _meta(value: Any) -> Any:
    return value.to("meta") if isinstance(value, Tensor) else value

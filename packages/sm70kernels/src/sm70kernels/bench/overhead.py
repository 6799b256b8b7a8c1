"""What the host spends on a launch: the driver's call alone, the package's function around it, the op with all its checks.

The three launch the same kernel with the same arguments, in turns within one run; the stream is drained between turns, and a turn is
shorter than the queue, so that none waits for the device.
"""

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch

from sm70kernels.bench import arguments
from sm70kernels.cuda import Kernel
from sm70kernels.driver import Function, bindings, three
from sm70kernels.op import Op

TARGET = 1.2
"""Times the bare driver call the function and the checked op may cost."""
LAUNCHES, TURNS = 400, 15


@dataclass(frozen=True)
class Overhead:
    """Microseconds a launch on the host."""

    op: str
    driver: float
    function: float
    checked: float

    @property
    def function_ratio(self) -> float:
        return self.function / self.driver

    @property
    def checked_ratio(self) -> float:
        return self.checked / self.driver


@contextmanager
def observed() -> Iterator[list[tuple[Function, tuple[Any, ...]]]]:
    """Record, in the list it yields, which functions are launched with which arguments; they launch as always."""
    seen: list[tuple[Function, tuple[Any, ...]]] = []
    original = Kernel.function

    def spied(kernel: Kernel, *wanted: Any) -> Any:
        function = original(kernel, *wanted)

        def launch(*called: Any) -> None:
            seen.append((function, called))
            function.launch(*called)

        return SimpleNamespace(launch=launch)

    Kernel.function = spied  # type: ignore[method-assign, assignment]
    try:
        yield seen
    finally:
        Kernel.function = original  # type: ignore[method-assign]


def measure(op: Op[Any], dims: dict[str, int], given: dict[str, Any] | None = None) -> Overhead:
    """Time the three ways to launch an op of one kernel."""
    values = arguments.make(op, dims, given, device="cuda")
    with observed() as seen:
        op(**values)
    ((function, called),) = seen
    ways = [bare(function, called), lambda: function.launch(*called), lambda: op(**values)]
    return Overhead(op.name, *turns(ways, torch.cuda.synchronize))


def bare(function: Function, called: tuple[Any, ...]) -> Callable[[], Any]:
    """Return the driver's call that a launch comes to, with everything it needs made beforehand: a launch leaves its packed arguments."""
    function.launch(*called)
    grid, block, _, shared = (*called, 0)[:4]
    everything = (function.handle, *three(grid), *three(block), shared, function.stream(function.device), function.buffers[-1].pointers, 0)
    launch_kernel = bindings().cuLaunchKernel
    return lambda: launch_kernel(*everything)


def turns(ways: list[Callable[[], Any]], drain: Callable[[], None], launches: int = LAUNCHES, count: int = TURNS) -> list[float]:
    """Return the median microseconds a call of each way, over turns in which every way is called `launches` times."""
    found: list[list[float]] = [[] for _ in ways]
    for _ in range(count):
        for times, way in zip(found, ways, strict=True):
            drain()
            start = time.perf_counter()
            for _ in range(launches):
                way()
            times.append((time.perf_counter() - start) / launches * 1e6)
    drain()
    return [statistics.median(times) for times in found]

"""What the host spends on a launch: the driver's call alone, the package's function around it, the op with all its checks.

The three launch the same kernel with the same arguments, in turns within one run; the stream is drained between turns, and a turn is
shorter than the queue, so that none waits for the device.
"""

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from sm70kernels.bench import arguments
from sm70kernels.driver import Function
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
    """Record, in the list it yields, which functions are called with which arguments; they launch as always."""
    seen: list[tuple[Function, tuple[Any, ...]]] = []
    original = Function.__call__

    def spy(function: Function, *called: Any) -> None:
        seen.append((function, called))
        original(function, *called)

    Function.__call__ = spy  # type: ignore[method-assign,assignment]
    try:
        yield seen
    finally:
        Function.__call__ = original  # type: ignore[method-assign]


def measure(op: Op[Any], dims: dict[str, int], given: dict[str, Any] | None = None) -> Overhead:
    """Time the three ways to launch an op of one kernel."""
    values = arguments.make(op, dims, given, device="cuda")
    with observed() as seen:
        op(**values)
    ((function, called),) = seen
    return Overhead(op.name, *turns([bare(function, called), lambda: function(*called), lambda: op(**values)], torch.cuda.synchronize))


def bare(function: Function, called: tuple[Any, ...]) -> Callable[[], Any]:
    """Return the driver's call that a function's call comes to, with everything it needs made beforehand.

    It reaches into the function for its handle and for the packed arguments that a call leaves there.
    """
    grid, block, _, shared = called
    function(*called)
    pointers, stream = function._buffers[-1][2], function._stream()
    sizes = [(*((size,) if isinstance(size, int) else size), 1, 1)[:3] for size in (grid, block)]
    launch, everything = function._launch, (function._handle, *sizes[0], *sizes[1], shared, stream, pointers, 0)
    return lambda: launch(*everything)


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

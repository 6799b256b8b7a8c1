"""How long cached blocks live, and how long nobody wants them: says whether a larger cache would help, and what evictions cost."""

import bisect
import time
from collections.abc import Callable, Iterable

from revolta_serve.cache.prefix_index import Node
from revolta_serve.types import BLOCK_AGES, BlockAges


class _Histogram:
    def __init__(self) -> None:
        self._counts, self._total = [0] * (len(BLOCK_AGES) + 1), 0.0

    def observe(self, seconds: float) -> None:
        self._counts[bisect.bisect_left(BLOCK_AGES, seconds)] += 1
        self._total += seconds

    def snapshot(self) -> BlockAges:
        return BlockAges(counts=tuple(self._counts), seconds=self._total)


class BlockTimes:
    """When each block of the index was computed and last reused."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._times: dict[Node, tuple[float, float]] = {}
        self._lifetime, self._idle, self._gap = _Histogram(), _Histogram(), _Histogram()

    def computed(self, node: Node) -> None:
        """A block has joined the index."""
        now = self._clock()
        self._times[node] = now, now

    def reused(self, nodes: Iterable[Node]) -> None:
        """A request starts from these blocks."""
        now = self._clock()
        for node in nodes:
            made, used = self._times[node]
            self._gap.observe(now - used)
            self._times[node] = made, now

    def evicted(self, node: Node) -> None:
        """A block made room for another one."""
        now = self._clock()
        made, used = self._times.pop(node)
        self._lifetime.observe(now - made)
        self._idle.observe(now - used)

    def forgotten(self, node: Node) -> None:
        """A block was removed for another reason: a reset, or distrust."""
        del self._times[node]

    def ages(self) -> dict[str, BlockAges]:
        """By name: from computed to evicted, from last wanted to evicted, from one use to the next."""
        return {
            "lifetime": self._lifetime.snapshot(),
            "idle_before_evict": self._idle.snapshot(),
            "reuse_gap": self._gap.snapshot(),
        }

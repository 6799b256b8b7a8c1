"""Memory of other processes, and how it grows with what they have done."""

import re
from collections.abc import Mapping
from pathlib import Path


class Growth:
    """Anonymous memory of some processes at some numbers of requests."""

    def __init__(self, pids: Mapping[str, int]) -> None:
        """pids: process ids by name."""
        self._pids = dict(pids)
        self.samples: dict[str, list[tuple[int, int]]] = {name: [] for name in pids}
        """(requests, bytes) by process."""

    def sample(self, requests: int) -> None:
        """Look at every process now, after so many requests."""
        for name, pid in self._pids.items():
            self.samples[name].append((requests, anonymous_bytes(pid)))

    def slopes(self, after: int = 0) -> dict[str, float]:
        """Bytes per request by process: the line of least squares through the samples from `after` requests on, five at least."""
        slopes = {}
        for name, samples in self.samples.items():
            points = [point for point in samples if point[0] >= after]
            assert len(points) >= 5, f"{len(points)} samples of {name} after {after} requests make no line"
            x0, y0 = (sum(values) / len(points) for values in zip(*points, strict=True))
            slopes[name] = sum((x - x0) * (y - y0) for x, y in points) / sum((x - x0) ** 2 for x, _ in points)
        return slopes


def anonymous_bytes(pid: int) -> int:
    """Memory of a process that is backed by no file: its heaps and stacks."""
    found = re.search(r"^Anonymous:\s+(\d+) kB$", Path(f"/proc/{pid}/smaps_rollup").read_text("ascii"), re.MULTILINE)
    assert found is not None, f"the kernel does not say how much memory process {pid} has"
    return 1024 * int(found[1])

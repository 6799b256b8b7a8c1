"""Memory of this machine and of this process, as the kernel counts it."""

import os
from collections.abc import Iterator
from pathlib import Path

PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def resident_bytes() -> int:
    """Resident memory of this process."""
    return int(Path("/proc/self/statm").read_text("ascii").split()[1]) * PAGE_BYTES


def available_bytes(root: Path = Path("/")) -> int:
    """Bytes that this process can still take: MemAvailable, or less where a control group around it has less left.

    root: where the kernel's file systems are mounted.
    """
    return min([_machine(root), *_groups(root)])


def _machine(root: Path) -> int:
    for line in (root / "proc/meminfo").read_text("ascii").splitlines():
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            return int(value.split()[0]) * 1024
    raise OSError(f"{root / 'proc/meminfo'} has no MemAvailable")


def _groups(root: Path) -> Iterator[int]:
    """What is left in every control group around this process, in version 1 or 2 of their files.

    Inside a container the path may be that of the host; the container's own group is then at the mount point.
    """
    groups = root / "proc/self/cgroup"
    for line in groups.read_text("utf-8").splitlines() if groups.is_file() else ():  # a kernel may know no groups
        _, controllers, path = line.split(":", 2)
        if not controllers:
            base, limit, used, cache = root / "sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"
        elif "memory" in controllers.split(","):
            base, limit, used, cache = (
                root / "sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file",
            )  # fmt: skip
        else:
            continue
        own = base / path.strip("/")
        for group in (own, *own.parents):
            if (group / limit).is_file() and (most := (group / limit).read_text("ascii").strip()) != "max":
                # Pages of files that nobody has used lately are given up before anything else is refused.
                yield int(most) - int((group / used).read_text("ascii")) + _statistic(group / "memory.stat", cache)
            if group == base:
                break


def _statistic(file: Path, name: str) -> int:
    return next((int(line.split()[1]) for line in file.read_text("ascii").splitlines() if line.startswith(f"{name} ")), 0)

"""The machine a number comes from, and what it can do at best, measured in the same run."""

import platform
import statistics
import subprocess
from pathlib import Path
from typing import Any

import torch

from sm70kernels.bench.timing import Cuda, Replay

GIB = 1 << 30
MATMUL = 8192
"""Rows, columns and depth of the f16 product whose rate is the ceiling for arithmetic."""
ENOUGH = 0.85
"""Share of a copy's bandwidth the read-only kernel must reach to be a yardstick."""

_QUERY = "clocks.sm,clocks.max.sm,clocks.mem,driver_version,power.limit"


class NoYardstick(RuntimeError):
    """The read-only kernel is too slow on this machine to compare with; the text has both rates."""


def describe() -> dict[str, Any]:
    """Return device, clocks (MHz), driver and versions; without a GPU the processor. What cannot be found out is "unknown"."""
    found: dict[str, Any] = {"torch": torch.__version__, "python": platform.python_version()}
    if not torch.cuda.is_available():
        return {"device": platform.processor() or platform.machine(), **found}
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    values = ["unknown"] * len(_QUERY.split(","))
    try:
        asked = ["nvidia-smi", f"--query-gpu={_QUERY}", "--format=csv,noheader,nounits", f"--id={torch.cuda.current_device()}"]
        answer = subprocess.run(asked, capture_output=True, text=True, check=True, timeout=20).stdout
        values = [part.strip() for part in answer.splitlines()[0].split(",")]
    except (OSError, subprocess.SubprocessError, IndexError):
        pass  # not every machine has the tool; the record then says unknown
    names = ("clock", "most_clock", "memory_clock", "driver", "power_limit")
    return {
        "device": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "multiprocessors": properties.multi_processor_count,
        "l2_bytes": properties.L2_cache_size,
        **dict(zip(names, values, strict=True)),
        "cuda": torch.version.cuda,
        **found,
    }


def line(machine: dict[str, Any], commit: str) -> str:
    """Return the machine as one line for the head of a table."""
    if "driver" not in machine:
        return f"{machine['device']}, no CUDA device | torch {machine['torch']} | commit {commit}"
    clocks = f"{machine['clock']}/{machine['most_clock']} MHz, memory {machine['memory_clock']} MHz, {machine['power_limit']} W"
    return f"{machine['device']} | {clocks} | driver {machine['driver']} | torch {machine['torch']} | commit {commit}"


def ceilings(device: Cuda) -> dict[str, float]:
    """Return GB/s of a device-to-device copy (read and written) and of the read-only kernel, both of 1 GiB; TFLOP/s of an f16 product."""
    source, target = device.buffer[:GIB], device.buffer[GIB : 2 * GIB]
    copy = _median(device.capture(lambda: target.copy_(source)))
    read = _median(device.capture(lambda: device.read(0, GIB)))
    a = torch.randn(MATMUL, MATMUL, device=device.torch_device).half()
    out = torch.mm(a, a)  # outside of the capture: cuBLAS allocates on first use
    product = _median(device.capture(lambda: torch.mm(a, a, out=out)))
    return {
        "copy_gb_s": 2 * GIB / copy / 1e3,
        "read_only_gb_s": GIB / read / 1e3,
        "read_only_of_copy": copy / read / 2,
        "matmul_tflop_s": 2 * MATMUL**3 / product / 1e6,
    }


def _median(replay: Replay) -> float:
    for _ in range(3):
        replay()
    return statistics.median(replay() for _ in range(15))


def commit(root: Path) -> str:
    """Return the commit of the repository, marked when its files differ from it; "unknown" where there is no clone."""
    try:
        head = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=root, capture_output=True, text=True, check=True).stdout.strip()
        changed = subprocess.run(
            ["git", "status", "--porcelain", "packages", "bench"], cwd=root, capture_output=True, text=True, check=True
        ).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return f"{head}{'+changes' if changed else ''}"

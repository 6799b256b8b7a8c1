"""doctor: facts about this machine, each with what to do when it is not as it should be."""

import ctypes
import os
import platform
import re
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from typing import Literal

from revolta_serve.engine.channel import LONGEST_PATH

State = Literal["ok", "note", "FAIL"]
UNSUITABLE = 3
NVRTC = "nvidia-cuda-nvrtc-cu12"
NVRTC_VERSION = "12.8.93"


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report. `fix` is what to do, empty when all is well."""

    state: State
    name: str
    fact: str
    fix: str = ""


def doctor() -> int:
    """Print every finding; returns 0, or 3 if one of them keeps the server from working."""
    worst = 0
    for finding in findings():
        print(f"{finding.state:4}  {finding.name:10} {finding.fact}")
        if finding.fix:
            print(f"      {'':10} -> {finding.fix}")
        worst = max(worst, UNSUITABLE if finding.state == "FAIL" else 0)
    return worst


def findings() -> Iterator[Finding]:
    """Every check, cheap ones first."""
    yield _python()
    yield from _packages()
    yield _processes()
    yield _sockets()
    yield from _torch()
    yield _gpu()
    yield _nvrtc()


def _python() -> Finding:
    fact = f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    return Finding("ok", "python", f"{fact}, {sys.executable}")


def _packages() -> Iterator[Finding]:
    """Installed versions against the ranges this package declares."""
    wrong = 0
    declared = [line for line in metadata.requires("revolta-serve") or () if "extra ==" not in line]
    for line in declared:
        name, ranges = requirement(line)
        try:
            installed = metadata.version(name)
        except metadata.PackageNotFoundError:
            wrong += 1
            yield Finding("FAIL", "packages", f"{name} is not installed", f"pip install '{line}'")
            continue
        if not satisfies(installed, ranges):
            wrong += 1
            yield Finding("FAIL", "packages", f"{name} {installed} is outside {','.join(ranges)}", f"pip install '{line}'")
    if not wrong:
        yield Finding("ok", "packages", f"{len(declared)} required packages are installed in the declared ranges")


def requirement(line: str) -> tuple[str, list[str]]:
    """Name and version ranges of a requirement without markers: `torch<2.14,>=2.10` -> ("torch", ["<2.14", ">=2.10"])."""
    match = re.match(r"\s*([A-Za-z0-9._-]+)\s*\(?([^;)]*)", line)
    assert match is not None, line
    return match[1], [part.strip() for part in match[2].split(",") if part.strip()]


def satisfies(version: str, ranges: list[str]) -> bool:
    """Whether a release number lies in all ranges (>=, >, <=, <, ==, !=); local and pre-release parts are ignored.

    False for a range of another form: what cannot be judged is not called fine.
    """
    have = _release(version)
    for part in ranges:
        match = re.fullmatch(r"(>=|<=|==|!=|<|>)\s*(\d+(?:\.\d+)*)", part)
        if match is None:
            return False
        want = _release(match[2])
        width = max(len(have), len(want))
        a, b = have + (0,) * (width - len(have)), want + (0,) * (width - len(want))
        ok = {">=": a >= b, "<=": a <= b, "==": a == b, "!=": a != b, "<": a < b, ">": a > b}
        if not ok[match[1]]:
            return False
    return True


def _release(version: str) -> tuple[int, ...]:
    match = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(int(part) for part in match[0].split(".")) if match else ()


def _processes() -> Finding:
    try:
        os.close(os.pidfd_open(os.getpid()))
    except (AttributeError, OSError) as error:
        return Finding("FAIL", "processes", f"pidfd_open does not work ({error})", "run on Linux 5.3 or newer, and allow it in the sandbox")
    return Finding("ok", "processes", f"pidfd works; {len(os.sched_getaffinity(0))} CPUs may be used")


def _sockets() -> Finding:
    try:
        with tempfile.TemporaryDirectory(prefix="revolta-") as folder:
            length = len(os.fsencode(folder)) + len("/down00")
    except OSError as error:
        return Finding("FAIL", "sockets", f"no temporary directory can be made ({error})", "set TMPDIR to a writable directory")
    if length > LONGEST_PATH:
        return Finding("FAIL", "sockets", f"{tempfile.gettempdir()} is too long a path for sockets", "set TMPDIR to a shorter path")
    return Finding("ok", "sockets", f"in {tempfile.gettempdir()}")


def _torch() -> Iterator[Finding]:
    try:
        import torch

        from sm70kernels import rows
    except (ImportError, OSError) as error:
        yield Finding("FAIL", "torch", f"cannot be imported: {error}", "reinstall it as the documentation of this package says")
        return
    isa, threads = torch.backends.cpu.get_cpu_capability(), torch.get_num_threads()
    yield Finding("ok", "torch", f"{torch.__version__}, {isa}, {threads} threads where nothing is set (the server sets --threads)")
    try:
        for tile in rows.TILE.values():
            for n, k in ((64, 64), (96, 200)):
                rows.product(tile, n, k)
    except rows.RowDependenceError as error:
        yield Finding("FAIL", "rows", str(error), "install the torch version of the lock file: its products are known to be independent")
    else:
        yield Finding("ok", "rows", "matrix products are independent of neighbouring rows")


def _gpu() -> Finding:
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return Finding("note", "gpu", "no NVIDIA driver", "nothing, unless this machine should have a GPU; the CPU profile works without")
    count, version = ctypes.c_int(), ctypes.c_int()
    if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)) or driver.cuDriverGetVersion(ctypes.byref(version)):
        return Finding("note", "gpu", "the NVIDIA driver does not answer", "look at nvidia-smi and at the container's devices")
    names = []
    for index in range(count.value):
        device, name = ctypes.c_int(), ctypes.create_string_buffer(64)
        driver.cuDeviceGet(ctypes.byref(device), index)
        driver.cuDeviceGetName(name, 64, device)
        names.append(name.value.decode())
    return Finding("ok", "gpu", f"{', '.join(names) or 'none'}; driver for CUDA {version.value // 1000}.{version.value % 1000 // 10}")


def _nvrtc() -> Finding:
    try:
        installed = metadata.version(NVRTC)
    except metadata.PackageNotFoundError:
        return Finding("note", "nvrtc", "not installed", f"only to build CUDA kernels: pip install {NVRTC}=={NVRTC_VERSION}")
    if installed != NVRTC_VERSION:
        return Finding("note", "nvrtc", f"{installed}, kernels are built with {NVRTC_VERSION}", f"pip install {NVRTC}=={NVRTC_VERSION}")
    return Finding("ok", "nvrtc", installed)

"""Compiles CUDA C++ for the V100 with NVRTC 12.8 from the package index: needs neither a GPU, a driver nor an installed toolkit.

CUDA is pinned to 12.8: 13 has no sm_70, and an older one would give other machine code than the one that was tested. The library is
loaded from the wheel by its full path, so a toolkit on PATH or LD_LIBRARY_PATH is never picked up.
"""

import ctypes
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

VERSION = (12, 8)
"""The NVRTC release kernels are compiled with."""

_WHEELS = "pip install nvidia-cuda-nvrtc-cu12==12.8.93 nvidia-cuda-runtime-cu12==12.8.90"
_FILE = re.compile(r'^(\s*\.file\s+\d+\s+")(?:[^"]*/)?([^"/]+")[^\n]*', re.MULTILINE)
_REPORT = re.compile(r"^ptxas (?!.*Compile time).*", re.MULTILINE)
_EXPECTED = re.compile(r"nvrtc: warning: Architectures prior to '<compute/sm>_75' are deprecated[^\n]*\n?")


class CompileError(RuntimeError):
    """NVRTC is missing, of another version, or refuses the source; the text holds its log."""


@dataclass(frozen=True)
class Image:
    """One compiled source: PTX for compute_70 with source lines, machine code for sm_70, and the assembler's report.

    `report` names registers, spills and shared memory of every entry; `warnings` is what the compiler said beside that.
    """

    ptx: str
    cubin: bytes
    report: str
    warnings: str


def compile_source(
    source: str, defines: Mapping[str, int | str] | None = None, *, name: str = "source.cu", headers: Mapping[str, str] | None = None
) -> Image:
    """Compile `source` with every define as -D, once to PTX and once to machine code.

    `headers` are the files it may include beside CUDA's own, by name. File names in the PTX have no folders, so the same source gives
    the same text everywhere. Raises CompileError.
    """
    options = ["-std=c++17", "-default-device", f"-I{_cuda_headers()}", *(f"-D{key}={value}" for key, value in (defines or {}).items())]
    ptx, log = _run(source, name, headers or {}, ["--gpu-architecture=compute_70", "-lineinfo", *options], "PTX")
    cubin, report = _run(source, name, headers or {}, ["--gpu-architecture=sm_70", "--ptxas-options=-v", *options], "CUBIN")
    text = _FILE.sub(r"\1\2", ptx.rstrip(b"\0").decode())
    return Image(text, cubin, "\n".join(_REPORT.findall(report)), _EXPECTED.sub("", log).strip())


@cache
def library() -> ctypes.CDLL:
    """Return the pinned NVRTC. Raises CompileError with the way out when it is missing or another one."""
    folder = _package("nvidia.cuda_nvrtc") / "lib"
    try:
        for builtins in sorted(folder.glob("libnvrtc-builtins.so.*")):  # found by name once it is loaded, and nowhere else
            ctypes.CDLL(str(builtins), ctypes.RTLD_GLOBAL)
        nvrtc = ctypes.CDLL(str(folder / "libnvrtc.so.12"))
    except OSError as error:
        raise CompileError(f"NVRTC {_dotted(VERSION)} cannot be loaded from {folder} ({error}); {_WHEELS}") from error
    nvrtc.nvrtcGetErrorString.restype = ctypes.c_char_p
    major, minor = ctypes.c_int(), ctypes.c_int()
    nvrtc.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
    if (major.value, minor.value) != VERSION:
        raise CompileError(f"kernels are compiled with NVRTC {_dotted(VERSION)}; {folder} has {major.value}.{minor.value}; {_WHEELS}")
    return nvrtc


def _dotted(version: Any) -> str:
    return ".".join(map(str, version))


def _package(name: str) -> Path:
    try:
        spec = find_spec(name)
    except ModuleNotFoundError:
        spec = None
    if spec is None or not spec.submodule_search_locations:
        raise CompileError(f"package {name} is not installed; {_WHEELS}")
    return Path(next(iter(spec.submodule_search_locations)))


def _cuda_headers() -> Path:
    return _package("nvidia.cuda_runtime") / "include"


def _run(source: str, name: str, headers: Mapping[str, str], options: list[str], wanted: str) -> tuple[bytes, str]:
    """Compile once and return the output of kind `wanted` (PTX or CUBIN) and the log."""
    nvrtc, program = library(), ctypes.c_void_p()

    def check(status: int, log: str = "") -> None:
        if status:
            raise CompileError(f"{name}: {nvrtc.nvrtcGetErrorString(status).decode()}\n{log}".rstrip())

    def read(kind: str) -> bytes:
        size = ctypes.c_size_t()
        check(getattr(nvrtc, f"nvrtcGet{kind}Size")(program, ctypes.byref(size)))
        buffer = ctypes.create_string_buffer(size.value)
        check(getattr(nvrtc, f"nvrtcGet{kind}")(program, buffer))
        return buffer.raw

    texts, names = _strings(headers.values()), _strings(headers)
    check(nvrtc.nvrtcCreateProgram(ctypes.byref(program), source.encode(), name.encode(), len(headers), texts, names))
    try:
        status = nvrtc.nvrtcCompileProgram(program, len(options), _strings(options))
        log = read("ProgramLog").rstrip(b"\0").decode(errors="replace")
        check(status, log)
        return read(wanted), log
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))


def _strings(texts: Collection[str]) -> Any:
    """The texts as a C array of strings."""
    return (ctypes.c_char_p * len(texts))(*(text.encode() for text in texts))

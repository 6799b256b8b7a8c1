"""Loads images onto CUDA devices and launches their functions through the driver, on torch's current stream.

Machine code for compute capability 7.0; the PTX of the same source, which the driver compiles, for newer devices. Modules live in torch's
primary context, so launches are ordered with torch's own work and are recorded by torch.cuda.graph like it.
"""

import ctypes
import re
import struct
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from sm70kernels.nvrtc import Image

STATIC_SHARED = 48 << 10
"""Bytes of shared memory a block may use without the function opting in."""

_FORMATS = {"u64": "Q", "s64": "q", "b64": "Q", "f64": "d", "u32": "I", "s32": "i", "b32": "I", "f32": "f", "u16": "H", "u8": "B"}
_PARAMETER = re.compile(r"\.param\s+(?:\.align\s+\d+\s+)?\.(\w+)\s+\S+")


class LaunchError(RuntimeError):
    """The driver refuses to load or launch a kernel; the text names the kernel, the device and the driver's error."""


@cache
def _driver() -> Any:
    try:
        from cuda.bindings import driver
    except ImportError as error:
        raise LaunchError(f"cuda.bindings is needed to launch kernels ({error}); pip install cuda-bindings==12.9.4") from error
    return driver


def _check(place: str, answer: tuple[Any, ...]) -> Any:
    status, *values = answer
    if status != _driver().CUresult.CUDA_SUCCESS:
        raise LaunchError(f"{place}: {status.name}")
    return values[0] if values else None


def parameters(ptx: str, entry: str) -> tuple[str, ...]:
    """Return the struct formats of an entry's parameters, in order; pointers are "Q". Raises LaunchError when there is no such entry."""
    match = re.search(rf"\.entry\s+{re.escape(entry)}\s*(?:\(([^)]*)\))?", ptx)
    if match is None:
        raise LaunchError(f"{entry}: the compiled source has no such entry; declare it extern \"C\" __global__")
    formats = tuple(_FORMATS.get(kind, "") for kind in _PARAMETER.findall(match[1] or ""))
    if "" in formats:
        raise LaunchError(f"{entry}: parameter {formats.index('')} is of a type that cannot be passed; use pointers and numbers")
    return formats


def load(image: Image, entry: str, device: int) -> "Function":
    """Load an image onto a device and return its function. Raises LaunchError."""
    driver, place = _driver(), f"{entry} on cuda:{device}"
    major, minor = torch.cuda.get_device_capability(device)
    if major < 7:
        raise LaunchError(f"{place}: kernels need compute capability 7.0 or newer, this device has {major}.{minor}")
    code = image.cubin if (major, minor) == (7, 0) else image.ptx.encode() + b"\0"
    with torch.cuda.device(device):
        torch.cuda.current_stream()  # makes torch's primary context current
        module = _check(place, driver.cuModuleLoadData(code))
        function = _check(place, driver.cuModuleGetFunction(module, entry.encode()))
    return Function(place, function, parameters(image.ptx, entry), _current_stream(device))


def _current_stream(device: int) -> Callable[[], int]:
    """Return what gives the handle of torch's current stream: torch's private way takes a tenth of a microsecond, the public one eight."""
    raw = getattr(torch._C, "_cuda_getCurrentRawStream", None)
    if raw is None:
        return lambda: int(torch.cuda.current_stream(device).cuda_stream)
    return lambda: int(raw(device))


class Function:
    """A loaded function. Calling it packs the arguments and launches; nothing is allocated, synchronised or kept."""

    def __init__(self, place: str, handle: Any, formats: tuple[str, ...], stream: Callable[[], int]) -> None:
        self.place = place
        self._handle = handle
        self._stream = stream
        self._launch = _driver().cuLaunchKernel
        self._success = _driver().CUresult.CUDA_SUCCESS
        self._formats = formats
        self._pack = struct.Struct("<" + "".join(_padded(formats))).pack_into
        self._buffers = [self._buffer()]
        self._shared = STATIC_SHARED

    def _buffer(self) -> tuple[Any, Any, int]:
        """Room for the arguments of one launch, and the array of pointers to each that the driver reads."""
        size = struct.calcsize("<" + "".join(_padded(self._formats)))
        room = (ctypes.c_char * max(size, 1))()
        base, offsets = ctypes.addressof(room), _offsets(self._formats)
        pointers = (ctypes.c_void_p * max(len(offsets), 1))(*(base + offset for offset in offsets))
        return room, pointers, ctypes.addressof(pointers)

    def __call__(self, grid: int | tuple[int, ...], block: int | tuple[int, ...], arguments: tuple[Any, ...], shared: int = 0) -> None:
        """Launch on torch's current stream. Raises LaunchError; a fault of the kernel itself shows at the next synchronisation."""
        if shared > self._shared:
            self._opt_in(shared)
        # Taken from the list, because the driver's call lets other threads run while it reads the buffer.
        buffer = self._buffers.pop() if self._buffers else self._buffer()
        room, _, pointers = buffer
        try:
            values = [a.data_ptr() if type(a) is Tensor else 0 if a is None else a for a in arguments]
            self._pack(room, 0, *values)
            gx, gy, gz = (grid, 1, 1) if type(grid) is int else (*grid, 1, 1)[:3]  # type: ignore[misc]
            bx, by, bz = (block, 1, 1) if type(block) is int else (*block, 1, 1)[:3]  # type: ignore[misc]
            (status,) = self._launch(self._handle, gx, gy, gz, bx, by, bz, shared, self._stream(), pointers, 0)
        except struct.error as error:
            raise LaunchError(f"{self.place}: {len(arguments)} arguments for {len(self._formats)} parameters: {error}") from error
        finally:
            self._buffers.append(buffer)
        if status != self._success:
            raise LaunchError(f"{self.place}: grid {grid}, block {block}, {shared} bytes of shared memory: {status.name}")

    def _opt_in(self, shared: int) -> None:
        """Allow more dynamic shared memory than the default, up to the device's limit."""
        attribute = _driver().CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        _check(f"{self.place}: {shared} bytes of shared memory", _driver().cuFuncSetAttribute(self._handle, attribute, shared))
        self._shared = shared


def _offsets(formats: tuple[str, ...]) -> list[int]:
    """Byte offsets at which parameters lie when each is aligned to its size."""
    offsets, at = [], 0
    for kind in formats:
        size = struct.calcsize("<" + kind)
        at = -(-at // size) * size
        offsets.append(at)
        at += size
    return offsets


def _padded(formats: tuple[str, ...]) -> list[str]:
    """The formats with padding bytes between them, so that every value lies at its offset."""
    padded, at = [], 0
    for kind, offset in zip(formats, _offsets(formats), strict=True):
        padded += ["x"] * (offset - at) + [kind]
        at = offset + struct.calcsize("<" + kind)
    return padded

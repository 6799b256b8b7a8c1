"""Loads images onto CUDA devices and launches their functions through the driver, on torch's current stream.

Machine code for compute capability 7.0; the PTX of the same source, which the driver compiles, for newer devices. Modules live in torch's
primary context, so launches are ordered with torch's own work and are recorded by torch.cuda.graph like it.
"""

import ctypes
import re
import struct
from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from sm70kernels.nvrtc import Image

if TYPE_CHECKING:
    from sm70kernels.cuda import Shape

STATIC_SHARED = 48 << 10
"""Bytes of shared memory a block may use without the function opting in."""

_FORMATS = {"u64": "Q", "s64": "q", "b64": "Q", "f64": "d", "u32": "I", "s32": "i", "b32": "I", "f32": "f", "u16": "H", "u8": "B"}
_PARAMETER = re.compile(r"\.param\s+(?:\.align\s+\d+\s+)?\.(\w+)\s+\S+")


class LaunchError(RuntimeError):
    """The driver refuses to load or launch a kernel; the text names the kernel, the device and the driver's error."""


@cache
def bindings() -> Any:
    """Return cuda.bindings.driver. Raises LaunchError where it is not installed."""
    try:
        from cuda.bindings import driver
    except ImportError as error:
        raise LaunchError(f"cuda.bindings is needed to launch kernels ({error}); pip install cuda-bindings==12.9.4") from error
    return driver


def _check(place: str, answer: tuple[Any, ...]) -> Any:
    status, *values = answer
    if status != bindings().CUresult.CUDA_SUCCESS:
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
    driver, place = bindings(), f"{entry} on cuda:{device}"
    major, minor = torch.cuda.get_device_capability(device)
    if major < 7:
        raise LaunchError(f"{place}: kernels need compute capability 7.0 or newer, this device has {major}.{minor}")
    code = image.cubin if (major, minor) == (7, 0) else image.ptx.encode() + b"\0"
    with torch.cuda.device(device):
        torch.cuda.current_stream()  # makes torch's primary context current
        module = _check(place, driver.cuModuleLoadData(code))
        function = _check(place, driver.cuModuleGetFunction(module, entry.encode()))
    return Function(place, function, parameters(image.ptx, entry), device)


def _public_stream(device: int) -> int:
    return int(torch.cuda.current_stream(device).cuda_stream)


CURRENT_STREAM: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", _public_stream)
"""The handle of torch's current stream of a device: torch's private way takes a tenth of a microsecond, the public one eight."""


class Buffer:
    """Room for the arguments of one launch, and the address of the array of pointers to each that the driver reads."""

    __slots__ = ("_array", "pointers", "room")

    def __init__(self, formats: tuple[str, ...]) -> None:
        self.room = (ctypes.c_char * max(_packing(formats).size, 1))()
        base, offsets = ctypes.addressof(self.room), _offsets(formats)
        self._array = (ctypes.c_void_p * max(len(offsets), 1))(*(base + offset for offset in offsets))
        self.pointers = ctypes.addressof(self._array)


class Function:
    """A loaded function. `launch(grid, block, arguments, shared=0)` packs the arguments and launches on torch's current stream.

    Nothing is allocated, synchronised or kept. launch raises LaunchError; a fault of the kernel itself shows at the next synchronisation.
    """

    def __init__(
        self, place: str, handle: Any, formats: tuple[str, ...], device: int, stream: Callable[[int], int] = CURRENT_STREAM
    ) -> None:
        self.place = place
        self.handle = handle
        self.device = device
        self.stream = stream
        self.buffers = [Buffer(formats)]
        self._shared = STATIC_SHARED
        self.launch = self._launcher(formats)

    def _launcher(self, formats: tuple[str, ...]) -> Callable[..., None]:
        """Return launch as a closure: half of what it costs beside the driver's call would be looking things up in self."""
        handle, place, device, stream, buffers = self.handle, self.place, self.device, self.stream, self.buffers
        launch_kernel, success = bindings().cuLaunchKernel, bindings().CUresult.CUDA_SUCCESS
        write = _writer(formats)

        def launch(grid: "Shape", block: "Shape", arguments: tuple[Any, ...], shared: int = 0) -> None:
            if shared > self._shared:
                self._opt_in(shared)
            # Taken from the list, because the driver's call lets other threads run while it reads the buffer.
            buffer = buffers.pop() if buffers else Buffer(formats)
            try:
                write(buffer.room, *arguments)
                if type(grid) is int and type(block) is int:
                    answer = launch_kernel(handle, grid, 1, 1, block, 1, 1, shared, stream(device), buffer.pointers, 0)
                else:
                    answer = launch_kernel(handle, *three(grid), *three(block), shared, stream(device), buffer.pointers, 0)
            except (struct.error, TypeError) as error:
                raise LaunchError(f"{place}: {len(arguments)} arguments for {len(formats)} parameters: {error}") from error
            finally:
                buffers.append(buffer)
            if answer[0] is not success:
                raise LaunchError(f"{place}: grid {grid}, block {block}, {shared} bytes of shared memory: {answer[0].name}")

        return launch

    def _opt_in(self, shared: int) -> None:
        """Allow more dynamic shared memory than the default, up to the device's limit."""
        attribute = bindings().CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        _check(f"{self.place}: {shared} bytes of shared memory", bindings().cuFuncSetAttribute(self.handle, attribute, shared))
        self._shared = shared


def three(size: "Shape") -> tuple[int, ...]:
    """A grid or block as the driver wants it."""
    return (size, 1, 1) if isinstance(size, int) else (*size, 1, 1)[:3]


def _writer(formats: tuple[str, ...]) -> Callable[..., None]:
    """Return write(room, *arguments): a tensor is its address and None a null pointer.

    Made for these formats as one expression: a loop over them would take as long as everything else that a launch does.
    """
    names = [f"a{i}" for i in range(len(formats))]
    values = [f"{a}.data_ptr() if type({a}) is Tensor else {a} or 0" if kind == "Q" else a for a, kind in zip(names, formats, strict=True)]
    scope = dict(pack=_packing(formats).pack_into, Tensor=Tensor)
    write: Callable[..., None] = eval(f"lambda room, {', '.join(names)}: pack(room, 0, {', '.join(values)})", scope)
    return write


def _packing(formats: tuple[str, ...]) -> struct.Struct:
    """How a launch's arguments are laid out in its buffer."""
    return struct.Struct("<" + "".join(_padded(formats)))


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

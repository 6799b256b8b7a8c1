"""Arguments of a launch: which bytes an array may touch, and scalars packed as parameters."""

import ctypes
import struct
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sm70kernels.emulator.syntax import WIDTHS, Variable

FLOATS = {"f16": "<e", "f32": "<f", "f64": "<d"}


@dataclass(frozen=True)
class Extent:
    """Host memory of an array argument: bytes [start, end), `first` the address of its first element, `data` those bytes.

    `owner`: (address, identity) of the allocation, so that views of one array keep their distance.
    """

    start: int
    end: int
    first: int
    owner: tuple[int, int]
    writable: bool
    data: NDArray[np.uint8]
    keep: object

    @property
    def size(self) -> int:
        return self.end - self.start


def is_array(argument: object) -> bool:
    """True for NumPy arrays and for tensors."""
    return isinstance(argument, np.ndarray) or hasattr(argument, "data_ptr")


def extent_of(argument: Any, what: str) -> Extent:
    """Return the extent of an array. Raises ValueError for a tensor that is not in CPU memory."""
    if isinstance(argument, np.ndarray):
        first, shape, strides, width = argument.ctypes.data, argument.shape, argument.strides, argument.itemsize
        owner = argument
        while isinstance(owner.base, np.ndarray):
            owner = owner.base
        origin, writable = owner.ctypes.data, argument.flags.writeable
    else:
        if argument.device.type != "cpu":
            raise ValueError(f"{what} is a tensor on {argument.device}, expected one on the CPU")
        width = argument.element_size()
        first, shape = argument.data_ptr(), tuple(argument.shape)
        strides = tuple(width * stride for stride in argument.stride())
        origin, writable = argument.untyped_storage().data_ptr(), True
    low = high = first
    if 0 in shape:
        high = first
    else:
        low += sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True) if stride < 0)
        high += sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True) if stride > 0) + width
    size = high - low
    data = np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(low)) if size else np.empty(0, np.uint8)
    return Extent(low, high, first, (origin if size else first, origin), writable, data, argument)


def pack_scalar(argument: object, variable: Variable, what: str) -> bytes:
    """Return the bytes of a scalar parameter. Raises ValueError when value and type do not go together."""
    kind, width = variable.type, WIDTHS[variable.type]
    if variable.array:
        data = argument.tobytes() if isinstance(argument, np.generic) else argument
        if not isinstance(data, (bytes, bytearray)) or len(data) != variable.size:
            got = f"{len(data)} bytes" if isinstance(data, (bytes, bytearray)) else type(argument).__name__
            raise ValueError(f"{what}: got {got}, expected a structure of {variable.size} bytes")
        return bytes(data)
    if argument is None:
        if width != 8:
            raise ValueError(f"{what}: got None, expected a .{kind}")
        return bytes(8)
    if isinstance(argument, (bool, np.bool_)):
        argument = int(argument)
    if kind in FLOATS:
        if not isinstance(argument, (int, float, np.integer, np.floating)):
            raise ValueError(f"{what}: got {type(argument).__name__}, expected a .{kind}")
        return np.asarray(argument, FLOATS[kind]).tobytes()
    if isinstance(argument, (float, np.floating)) and kind[0] == "b" and isinstance(argument, np.generic) and argument.itemsize == width:
        return argument.tobytes()
    if not isinstance(argument, (int, np.integer)):
        raise ValueError(f"{what}: got {type(argument).__name__}, expected a .{kind}")
    value = int(argument)
    if not -(1 << (8 * width - 1)) <= value < 1 << (8 * width):
        raise ValueError(f"{what}: {value} does not fit a .{kind}")
    return struct.pack("<Q", value & (2**64 - 1))[:width]

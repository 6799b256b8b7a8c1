"""Bytes: a flat buffer seen as words of every width, and the regions of global memory with their owners' names."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

GLOBAL_BASE = 1 << 46
"""Address of the first byte of the image of global memory."""

NULL_PAGE = 1 << 40
"""Addresses below this are offsets from a null pointer: nothing is allocated there."""

WORDS: dict[int, Any] = {1: np.dtype("u1"), 2: np.dtype("u2"), 4: np.dtype("u4"), 8: np.dtype("u8"), 16: np.dtype("c16")}
"""NumPy type that moves this many bytes at once; complex numbers are only moved, never computed with."""


class Bytes:
    """A buffer of `size` bytes, aligned to 64 and zero at first. view(w) is the same memory as words of w bytes."""

    def __init__(self, size: int) -> None:
        raw = np.zeros(size + 96, np.uint8)
        start = -raw.ctypes.data % 64
        length = -(-size // 16) * 16
        self.size = size
        self.bytes: Array = raw[start : start + length]
        self.words = {width: self.bytes.view(kind) for width, kind in WORDS.items()}

    def load(self, offset: Array, width: int, count: int) -> list[Array]:
        """Return `count` arrays of words of `width` bytes, read at the aligned byte offsets."""
        total = width * count
        raw = self.words[total].take(offset >> (total.bit_length() - 1))
        if count == 1:
            return [raw]
        table = raw.view(WORDS[width]).reshape(-1, count)
        return [np.ascontiguousarray(table[:, place]) for place in range(count)]

    def store(self, offset: Array, width: int, values: list[Array]) -> None:
        """Write words of `width` bytes at the aligned byte offsets; of several lanes at one place the last one stays."""
        count = len(values)
        total = width * count
        index = offset >> (total.bit_length() - 1)
        if count == 1:
            self.words[total][index] = values[0]
            return
        table = np.empty((len(offset), count), WORDS[width])
        for place, value in enumerate(values):
            table[:, place] = value
        self.words[total][index] = table.view(WORDS[total]).reshape(-1)


@dataclass
class Region:
    """Bytes [start, end) of the image of global memory. `tracked`: the kernel writes here, so accesses are checked for races."""

    start: int
    end: int
    name: str
    writable: bool = True
    constant: bool = False
    tracked: bool = False


class Regions:
    """The disjoint regions of the image, for lookup by offset."""

    def __init__(self, regions: list[Region]) -> None:
        self.all = sorted(regions, key=lambda region: region.start)
        self.starts = np.array([region.start for region in self.all] or [1 << 60])
        self.ends = np.array([region.end for region in self.all] or [0])

    def around(self, offset: int) -> Region | None:
        """The region that contains the offset, or None."""
        place = int(np.searchsorted(self.starts, offset, side="right")) - 1
        return self.all[place] if place >= 0 and offset < self.ends[place] else None

    def describe(self, offset: int) -> str:
        """Name a place: its region, or the closest one."""
        region = min(self.all, key=lambda region: max(region.start - offset, offset - region.end + 1), default=None)
        if region is None:
            return f"address {offset + GLOBAL_BASE:#x}"
        return f"byte {offset - region.start} of {region.name} ({region.end - region.start} bytes)"

    def outside(self, offsets: Array, size: int) -> Array:
        """True where [offset, offset + size) is not inside one region."""
        place = np.searchsorted(self.starts, offsets, side="right") - 1
        result: Array = (place < 0) | (offsets + size > self.ends[np.maximum(place, 0)])
        return result

"""How many 32-byte sectors and shared-memory wavefronts the requests of a warp take.

A request is one memory instruction of one warp. Global memory moves whole sectors of 32 bytes. Shared memory has 32 banks of 4 bytes; a
wavefront serves one word of every bank, the same word to any number of lanes; 64-bit accesses go by half-warps and 128-bit accesses
by quarter-warps.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from sm70kernels.emulator.group import Group

Array = NDArray[Any]


def _distinct(rows: Array) -> Array:
    """Number of distinct values in each row."""
    ordered = np.sort(rows, axis=1)
    count: Array = 1 + np.count_nonzero(ordered[:, 1:] != ordered[:, :-1], axis=1)
    return count


def sectors(group: Group, offset: Array, size: int) -> tuple[int, int]:
    """Return (sectors, fewest possible) over the warps of the group, each lane accessing `size` aligned bytes at `offset`."""
    warps = len(group.starts)
    if offset.size == 1 and group.n > 1:
        return warps, warps
    rows = group.rows(offset)
    touched = int(_distinct(rows >> 5).sum())
    fewest = int((-(-_distinct(rows) * size // 32)).sum())
    return touched, fewest


def wavefronts(group: Group, offset: Array, size: int) -> tuple[int, int]:
    """Return (wavefronts, fewest possible) over the warps of the group."""
    warps = len(group.starts)
    phases = max(1, size // 4)
    if offset.size == 1 and group.n > 1 and phases == 1:
        return warps, warps
    rows = group.rows(offset)
    fewest = int(np.maximum(1, -(-_distinct(rows) * size // 128)).sum())
    words = rows >> 2
    if phases > 1:
        words = (words[:, :, None] + np.arange(phases)).reshape(-1, 32)  # a row is now a phase: 32 / phases lanes
        if not group.full:
            words = _only_present(group, words, phases)
    ordered = np.sort(words, axis=1)
    first = np.ones(ordered.shape, bool)
    first[:, 1:] = ordered[:, 1:] != ordered[:, :-1]
    first &= ordered >= 0
    banks = (ordered & 31) + np.arange(len(ordered))[:, None] * 32
    return int(np.bincount(banks[first], minlength=banks.size).reshape(-1, 32).max(axis=1).sum()), fewest


def _only_present(group: Group, words: Array, phases: int) -> Array:
    """Put -1 for the words of absent lanes, so that a phase without lanes costs nothing."""
    present = np.zeros(len(group.starts) * 32, bool)
    present[group.rank * 32 + group.place] = True
    return np.where(np.repeat(present, phases).reshape(-1, 32), words, -1)

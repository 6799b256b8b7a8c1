"""A group: the lanes that execute one block of instructions together, in lockstep.

Lanes of a chunk are numbered block by block and thread by thread, so the lanes of a warp are neighbours; a partial last warp of a block
simply has fewer. `index` is None for all lanes of the chunk, else their sorted numbers.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


@dataclass(frozen=True)
class Shape:
    """Lanes, warps and blocks of a chunk: `threads` a block, `blocks` blocks, the first of them number `first` of the grid."""

    threads: int
    blocks: int
    first: int

    @property
    def lanes(self) -> int:
        return self.threads * self.blocks

    @property
    def block_warps(self) -> int:
        return -(-self.threads // 32)

    @property
    def warps(self) -> int:
        return self.block_warps * self.blocks

    @cached_property
    def thread(self) -> Array:
        """Thread number in its block, of every lane."""
        return np.tile(np.arange(self.threads), self.blocks)

    @cached_property
    def block(self) -> Array:
        """Block number in the chunk, of every lane."""
        return np.repeat(np.arange(self.blocks), self.threads)

    @cached_property
    def warp(self) -> Array:
        """Warp number in the chunk, of every lane."""
        number: Array = self.block * self.block_warps + self.thread // 32
        return number

    @cached_property
    def place(self) -> Array:
        """%laneid of every lane."""
        return self.thread % 32

    @cached_property
    def warp_start(self) -> Array:
        """First lane of every warp."""
        return np.repeat(np.arange(self.blocks) * self.threads, self.block_warps) + np.tile(np.arange(self.block_warps) * 32, self.blocks)

    @cached_property
    def warp_size(self) -> Array:
        """Lanes that exist, of every warp."""
        return np.tile(np.minimum(32, self.threads - np.arange(self.block_warps) * 32), self.blocks)

    @cached_property
    def existing(self) -> Array:
        """Mask of the lanes that exist, uint32, of every warp."""
        masks: Array = ((np.uint64(1) << self.warp_size.astype(np.uint64)) - np.uint64(1)).astype(np.uint32)
        return masks


class Group:
    """See the module. Everything about its lanes is computed when first asked for."""

    def __init__(self, shape: Shape, index: Array | None) -> None:
        self.shape = shape
        self.index = index
        self.n = shape.lanes if index is None else len(index)
        self.memory: dict[Any, Any] = {}
        """Results that depend on the lanes alone, by whoever computed them."""

    def pick(self, every: Array) -> Array:
        """Of a value for every lane of the chunk, those of this group."""
        return every if self.index is None else every[self.index]

    @cached_property
    def lanes(self) -> Array:
        return np.arange(self.n) if self.index is None else self.index

    @cached_property
    def warp(self) -> Array:
        return self.pick(self.shape.warp)

    @cached_property
    def place(self) -> Array:
        return self.pick(self.shape.place)

    @cached_property
    def thread(self) -> Array:
        return self.pick(self.shape.thread)

    @cached_property
    def block(self) -> Array:
        return self.pick(self.shape.block)

    @cached_property
    def starts(self) -> Array:
        """Positions in the group where a new warp begins."""
        if self.index is None:
            return self.shape.warp_start
        return np.concatenate(([0], np.flatnonzero(np.diff(self.warp)) + 1))

    @cached_property
    def warps(self) -> Array:
        """Numbers of the warps with a lane in the group."""
        return self.warp[self.starts]

    @cached_property
    def counts(self) -> Array:
        """Lanes of each of `warps` that are in the group."""
        return np.diff(self.starts, append=self.n)

    @cached_property
    def rank(self) -> Array:
        """For every lane of the group, the place of its warp in `warps`."""
        return np.repeat(np.arange(len(self.starts)), self.counts)

    @cached_property
    def full(self) -> bool:
        """True when every warp has all 32 lanes in the group."""
        return self.n == 32 * len(self.starts)

    @cached_property
    def active(self) -> Array:
        """Mask of the lanes in the group, uint32, for each of `warps`."""
        return np.bitwise_or.reduceat(self.bit, self.starts)

    @cached_property
    def bit(self) -> Array:
        """1 << %laneid, uint32."""
        return np.uint32(1) << self.place.astype(np.uint32)

    @cached_property
    def position(self) -> Array:
        """For every lane of the chunk its position in the group, -1 if it is not in."""
        found = np.full(self.shape.lanes, -1)
        found[self.lanes] = np.arange(self.n)
        return found

    def part(self, chosen: Array) -> "Group":
        """The lanes where `chosen` (a bool for each lane of the group) is true."""
        return Group(self.shape, self.lanes[chosen])

    def spread(self, value: Array) -> Array:
        """A value of one element, or of one for each lane, as one for each lane."""
        return value if value.size == self.n else np.broadcast_to(value, (self.n,))

    def rows(self, value: Array) -> Array:
        """[n] -> [warps, 32]: a row for each warp, where absent lanes repeat the warp's first present one."""
        value = self.spread(value)
        if self.full:
            return value.reshape(-1, 32)
        table = np.repeat(value[self.starts], 32)
        table[self.rank * 32 + self.place] = value
        return table.reshape(-1, 32)

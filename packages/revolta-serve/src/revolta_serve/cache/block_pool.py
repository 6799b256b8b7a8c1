"""The ids of the token blocks: who owns which, and whether somebody may have another one now.

An owner says at its start how many blocks it may ever need and then claims them as it grows. A claim is granted only if afterwards
everybody could still finish, oldest first: once all its elders have finished, an owner has what is free, what they held and what it
holds itself, and that must reach its worst case. Then the oldest owner always gets what it asks for, so nobody waits for ever.
(Dijkstra's banker, with the order of finishing fixed by age.)
"""

from collections.abc import Iterator
from dataclasses import dataclass, field


@dataclass(slots=True)
class _Holding:
    most: int
    """Blocks the owner may ever need."""
    claimed: int
    """Blocks that are its own, those not handed out yet included."""
    blocks: list[int] = field(default_factory=list)
    """Those handed out, in the order taken."""


class BlockPool:
    """num_blocks ids, 0 .. num_blocks-1. Owners are request numbers; their age is the order in which they entered."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        # A stack whose top is the lowest id first, so that a small load touches little memory.
        self._stack = list(range(num_blocks - 1, -1, -1))
        self._free = num_blocks
        self._holdings: dict[int, _Holding] = {}
        # Without a release nobody's room grows: who was refused this many blocks is refused them again without a walk.
        self._refused: dict[int, int] = {}

    @property
    def num_free(self) -> int:
        """Blocks nobody owns."""
        return self._free

    @property
    def num_owned(self) -> int:
        """Blocks that belong to an owner, handed out or not."""
        return self.num_blocks - self._free

    def owners(self) -> Iterator[tuple[int, tuple[int, ...]]]:
        """Each owner, oldest first, with the blocks handed out to it, in the order taken."""
        for owner, holding in self._holdings.items():
            yield owner, tuple(holding.blocks)

    def room(self, owner: int) -> int:
        """Blocks an owner may claim now; for a stranger, what it may claim as it enters. Walks over the elders."""
        room, held = self._free, 0
        for elder, holding in self._holdings.items():
            if elder == owner:
                break
            held += holding.claimed
            room = min(room, self._free + held - holding.most)
        return room

    def enter(self, owner: int, most: int, count: int) -> bool:
        """Make a new owner, the youngest, that may ever need `most` blocks and claims `count` at once. False if it may not now.

        Raises ValueError if it is in already, or asks for more than it needs or than there are.
        """
        if owner in self._holdings:
            raise ValueError(f"block pool: request {owner} is already in")
        if not count <= most <= self.num_blocks:
            raise ValueError(f"block pool: request {owner} claims {count} blocks of at most {most}, there are {self.num_blocks}")
        if not self._may(owner, count):
            return False
        self._holdings[owner] = _Holding(most, count)
        self._free -= count
        return True

    def claim(self, owner: int, count: int) -> bool:
        """Make `count` more blocks an owner's own; False if it may not have them now. Raises ValueError beyond its worst case."""
        holding = self._holdings[owner]
        if holding.claimed + count > holding.most:
            raise ValueError(f"block pool: request {owner} claims {count} blocks beside {holding.claimed} of at most {holding.most}")
        if not self._may(owner, count):
            return False
        holding.claimed += count
        self._free -= count
        return True

    def take(self, owner: int, count: int) -> tuple[int, ...]:
        """Hand out `count` claimed blocks: their ids. Raises ValueError beyond what was claimed."""
        holding = self._holdings[owner]
        if len(holding.blocks) + count > holding.claimed:
            left = holding.claimed - len(holding.blocks)
            raise ValueError(f"block pool: request {owner} takes {count} blocks of {left} claimed")
        taken = tuple(self._stack.pop() for _ in range(count))
        holding.blocks.extend(taken)
        return taken

    def release(self, owner: int) -> None:
        """Give back everything an owner holds. Raises KeyError for a stranger."""
        holding = self._holdings.pop(owner)
        self._free += holding.claimed
        self._stack.extend(reversed(holding.blocks))
        self._refused.clear()

    def _may(self, owner: int, count: int) -> bool:
        if count >= self._refused.get(owner, count + 1):
            return False
        if count <= self.room(owner):
            return True
        self._refused[owner] = count
        return False

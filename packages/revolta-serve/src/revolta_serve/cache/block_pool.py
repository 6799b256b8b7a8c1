"""The ids of the token blocks: who owns which, how many are promised, how many are left.

A request first reserves all the blocks it may ever need and then takes them as it grows. A request that was let in can therefore
always finish.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field


@dataclass(slots=True)
class _Holding:
    blocks: list[int] = field(default_factory=list)
    promised: int = 0
    """Blocks reserved and not yet taken."""


class BlockPool:
    """num_blocks ids, 0 .. num_blocks-1. Owners are request numbers."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        # A stack whose top is the lowest id first, so that a small load touches little memory.
        self._free = list(range(num_blocks - 1, -1, -1))
        self._promised = 0
        self._holdings: dict[int, _Holding] = {}

    @property
    def num_free(self) -> int:
        """Blocks nobody owns, promised ones included."""
        return len(self._free)

    @property
    def num_owned(self) -> int:
        """Blocks that belong to a request."""
        return self.num_blocks - len(self._free)

    @property
    def num_available(self) -> int:
        """Blocks a new request can reserve."""
        return len(self._free) - self._promised

    def owners(self) -> Iterator[tuple[int, tuple[int, ...]]]:
        """Each owner with its blocks, in the order taken."""
        for owner, holding in self._holdings.items():
            yield owner, tuple(holding.blocks)

    def can_reserve(self, count: int) -> bool:
        """Whether `count` more blocks can be promised."""
        return count <= self.num_available

    def reserve(self, owner: int, count: int) -> None:
        """Promise `count` blocks to a new owner. Raises ValueError if it already has a promise or too few are available."""
        if owner in self._holdings:
            raise ValueError(f"block pool: request {owner} already holds a reservation")
        if not self.can_reserve(count):
            raise ValueError(f"block pool: request {owner} asks for {count} blocks, {self.num_available} are available")
        self._holdings[owner] = _Holding(promised=count)
        self._promised += count

    def take(self, owner: int, count: int) -> tuple[int, ...]:
        """Turn `count` promised blocks into owned ones and return their ids. Raises ValueError beyond the promise."""
        holding = self._holdings[owner]
        if count > holding.promised:
            raise ValueError(f"block pool: request {owner} takes {count} blocks of {holding.promised} promised")
        taken = tuple(self._free.pop() for _ in range(count))
        holding.blocks.extend(taken)
        holding.promised -= count
        self._promised -= count
        return taken

    def release(self, owner: int) -> None:
        """Give back everything an owner holds, taken or promised. Raises KeyError for a stranger."""
        holding = self._holdings.pop(owner)
        self._promised -= holding.promised
        self._free.extend(reversed(holding.blocks))

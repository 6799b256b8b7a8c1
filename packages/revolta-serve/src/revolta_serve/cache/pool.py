"""A pool of numbered things, token blocks or state slots: which are free. What the others hold is their holders' business."""


class Pool:
    """Ids 0 .. size-1. Every id taken must come back exactly once."""

    def __init__(self, what: str, size: int) -> None:
        """`what` names the things in errors."""
        self.what, self.size = what, size
        # A stack whose top is the lowest id first, so that a small load touches little memory.
        self._free = list(range(size - 1, -1, -1))
        self._taken = bytearray(size)

    @property
    def num_free(self) -> int:
        """Ids nobody has taken."""
        return len(self._free)

    @property
    def taken(self) -> set[int]:
        """Ids that have not come back; looks at all of them."""
        return {id for id, taken in enumerate(self._taken) if taken}

    def take(self) -> int:
        """Take one id. Raises ValueError if none is free."""
        if not self._free:
            raise ValueError(f"no {self.what} left of {self.size}")
        id = self._free.pop()
        self._taken[id] = 1
        return id

    def give(self, id: int) -> None:
        """Give one id back. Raises ValueError for one that is not taken."""
        if not (0 <= id < self.size and self._taken[id]):
            raise ValueError(f"{self.what} {id} of {self.size} is not taken; it cannot be given back")
        self._taken[id] = 0
        self._free.append(id)

"""The ids of the state slots: the recurrent state of each running request lives in exactly one."""

from collections.abc import Iterator


class StatePool:
    """num_slots ids, 0 .. num_slots-1. Owners are request numbers."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._free = list(range(num_slots - 1, -1, -1))
        self._slots: dict[int, int] = {}

    @property
    def num_free(self) -> int:
        """Slots nobody owns."""
        return len(self._free)

    @property
    def num_owned(self) -> int:
        """Slots that belong to a request."""
        return len(self._slots)

    def owners(self) -> Iterator[tuple[int, int]]:
        """Each owner with its slot."""
        yield from self._slots.items()

    def allocate(self, owner: int) -> int:
        """Give a new owner a slot. Raises ValueError if it has one already or none is left."""
        if owner in self._slots:
            raise ValueError(f"state pool: request {owner} already has slot {self._slots[owner]}")
        if not self._free:
            raise ValueError(f"state pool: no slot left of {self.num_slots} for request {owner}")
        slot = self._free.pop()
        self._slots[owner] = slot
        return slot

    def release(self, owner: int) -> None:
        """Give a slot back. Raises KeyError for a stranger."""
        self._free.append(self._slots.pop(owner))

"""How often each id occurs, kept in order of the ids: what penalties are computed from.

A new id shifts the ones above it in memory, which for the whole vocabulary takes microseconds; counting one that is there takes a binary
search. Nothing is ever counted again, so a token costs the same after a hundred thousand others.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int32]

ROOM = 64
"""Ids that arrays are first made for, beyond those known; then they double."""


class Occurrences:
    """Ids in ascending order with their counts. Ids of `known` are there from the start with a count of 0."""

    def __init__(self, known: Sequence[int], counted: Sequence[int]) -> None:
        ids, inverse = np.unique(np.array((*known, *counted), np.int32), return_inverse=True)
        self._size = len(ids)
        self._ids, self._counts = (np.zeros(self._size + ROOM, np.int32) for _ in range(2))
        self._ids[: self._size] = ids
        self._counts[: self._size] = np.bincount(inverse[len(known) :], minlength=self._size)

    @property
    def ids(self) -> Ids:
        """i32[S] ascending; a view that is valid until the next `add`."""
        return self._ids[: self._size]

    @property
    def counts(self) -> Ids:
        """i32[S] occurrences of each id; a view like `ids`."""
        return self._counts[: self._size]

    def add(self, token: int) -> None:
        """Count one more occurrence."""
        size, at = self._size, int(np.searchsorted(self.ids, np.int32(token)))
        if at == size or self._ids[at] != token:
            if size == len(self._ids):
                self._ids, self._counts = (np.concatenate((x, np.zeros_like(x))) for x in (self._ids, self._counts))
            for x, value in ((self._ids, token), (self._counts, 0)):
                x[at + 1 : size + 1] = x[at:size]
                x[at] = value
            self._size += 1
        self._counts[at] += 1

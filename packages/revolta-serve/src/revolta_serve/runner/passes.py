"""How many slices share a model pass: as many as the ops take. A row's bits do not depend on the others, so it changes nothing else."""

from collections.abc import Callable, Iterator, Sequence

from revolta_serve.cache.layout import WIDEST
from revolta_serve.types import Slice
from sm70kernels.rows import TILE

MOST_REQUESTS = 64
"""Sequences of a pass."""

MOST_DECODE_ROWS = 64
MOST_PREFILL_ROWS = 8192
"""Rows of a pass, padding included."""


def singles(slices: Sequence[Slice]) -> Iterator[list[Slice]]:
    """Passes of answer slices with one row each."""
    return _packed(slices, lambda piece: 1, MOST_DECODE_ROWS)


def several(slices: Sequence[Slice]) -> Iterator[list[Slice]]:
    """Passes of answer slices with more rows: each may be padded to the widest."""
    return _packed(slices, lambda piece: WIDEST, MOST_DECODE_ROWS)


def prompts(slices: Sequence[Slice]) -> Iterator[list[Slice]]:
    """Passes of prompt slices, each in tiles of its own."""
    return _packed(slices, lambda piece: -(-len(piece.tokens) // TILE["prefill"]) * TILE["prefill"], MOST_PREFILL_ROWS)


def _packed(slices: Sequence[Slice], rows: Callable[[Slice], int], most: int) -> Iterator[list[Slice]]:
    """Consecutive slices, as many as fit."""
    group: list[Slice] = []
    total = 0
    for piece in slices:
        count = rows(piece)
        if group and (total + count > most or len(group) == MOST_REQUESTS):
            yield group
            group, total = [], 0
        group.append(piece)
        total += count
    if group:
        yield group

"""Where another prompt is likely to part from this one: the token positions at which stored work is worth keeping.

Positions are absolute, ascending and not rounded; whoever stores a state rounds them down to its grid.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

STRETCH = 2048
"""Tokens without a position of their own, at most."""
LAST_MESSAGES = 4
"""Messages at the end of a conversation whose starts count: a client edits, repeats or drops the last ones."""


@dataclass(frozen=True, slots=True)
class Marks:
    """Where the text of a prompt has its joints."""

    places: tuple[int, ...] = ()
    """Ascending and above 0."""
    opening: int = 0
    """The end of the system text and tools, with which many prompts begin; one of the places, 0 where there is none."""

    def shifted(self, dropped: int) -> "Marks":
        """The marks of a prompt that has lost its first `dropped` tokens."""
        return Marks(tuple(place - dropped for place in self.places if place > dropped), max(0, self.opening - dropped))


def chat_marks(ids: Sequence[int], start: int | None, *, system: bool, generation: bool) -> Marks:
    """Positions at which a conversation may part from its siblings.

    The end of the system block, the starts of the last messages and the end of the history. start: the id that opens a message (None
    where the vocabulary has none); the text of messages never produces it. system: the prompt opens with a block of system text or
    tools. generation: it ends with the opening of the answer, which belongs to no message.
    """
    starts = [] if start is None else list(_places(ids, start))
    opening = starts[1] if system and len(starts) > 1 else 0
    marks = {opening}
    if generation:
        marks.update(starts[-1:])
        starts = starts[:-1]
    return Marks(tuple(sorted({*marks, *starts[-LAST_MESSAGES:]} - {0})), opening)


def spread(places: Iterable[int], length: int) -> tuple[int, ...]:
    """GenerateRequest.boundaries of a prompt of `length` tokens: its own places, its end, and others every STRETCH tokens between."""
    boundaries: list[int] = []
    last = 0
    for mark in sorted({length, *(place for place in places if 0 < place < length)}):
        boundaries += [*range(last + STRETCH, mark, STRETCH), mark]
        last = mark
    return tuple(boundaries)


def _places(ids: Sequence[int], token: int) -> Iterable[int]:
    """Every position of a token."""
    place = -1
    try:
        while True:
            place = ids.index(token, place + 1)
            yield place
    except ValueError:
        return

"""The queue between the engine's outputs and one client: never blocks the writer, bounded by merging.

While nobody reads, consecutive deltas of one kind of one choice become one. A choice changes kind once, so a client that reads
nothing costs at most three entries per choice, whatever the length of the answer (their text is bounded by max_tokens).
"""

import asyncio
from collections import deque
from dataclasses import dataclass, field

from revolta_serve.text.events import Delta, Event, Finish, merge


@dataclass
class _Entry:
    choice: int
    deltas: list[Delta] = field(default_factory=list)
    finish: Finish | None = None


class Mailbox:
    """Events of all choices of one request, in the order of each choice. One reader."""

    def __init__(self) -> None:
        self._entries: deque[_Entry] = deque()
        self._last: dict[int, _Entry] = {}
        self._failure: Exception | None = None
        self._filled = asyncio.Event()

    def put(self, choice: int, event: Event) -> None:
        """Add an event."""
        last = self._last.get(choice)
        if isinstance(event, Finish):
            self._entries.append(_Entry(choice, finish=event))
        elif last is not None and last.deltas and last.deltas[-1].kind == event.kind:
            last.deltas.append(event)
        else:
            entry = self._last[choice] = _Entry(choice, [event])
            self._entries.append(entry)
        self._filled.set()

    def fail(self, error: Exception) -> None:
        """End everything: the reader gets the first error given, at once and from then on."""
        self._failure = self._failure or error
        self._filled.set()

    async def get(self) -> tuple[int, Event]:
        """The next event, when there is one. Safe to cancel: nothing is lost. Raises what `fail` was given."""
        while self._failure is None and not self._entries:
            self._filled.clear()
            await self._filled.wait()
        if self._failure is not None:
            raise self._failure
        entry = self._entries.popleft()
        if entry.finish is not None:
            return entry.choice, entry.finish
        if self._last.get(entry.choice) is entry:
            del self._last[entry.choice]
        return entry.choice, merge(entry.deltas)

    def __len__(self) -> int:
        return len(self._entries)

"""The queue between the engine's outputs and one client: never blocks the writer, bounded by merging.

While nobody reads, consecutive deltas of one kind of one choice become one, as they come. A choice changes kind once, so a client
that reads nothing costs at most three entries per choice, whatever the length of the answer, and what they hold is the text itself:
its bytes, four bytes a token, and the logprobs, where it asked for them, as MessagePack.
"""

import asyncio
from array import array
from collections import deque
from itertools import pairwise

import msgspec

from revolta_serve.text.alignment import Placed
from revolta_serve.text.events import Delta, Event, Finish

_packed = msgspec.msgpack.Encoder()
_unpacked = msgspec.msgpack.Decoder(tuple[Placed, ...])


class _Growing:
    """A delta that still grows: appending costs the length of what is appended."""

    def __init__(self, first: Delta) -> None:
        self.kind = first.kind
        self._text = bytearray()
        self._tokens = array("i")
        self._logprobs = bytearray()
        self._ends = array("q", (0,))
        self._prompt_logprobs = first.prompt_logprobs
        self.append(first)

    def append(self, delta: Delta) -> None:
        self._text += delta.text.encode()
        self._tokens.extend(delta.tokens)
        self._generated = delta.generated
        if delta.logprobs:
            _packed.encode_into(delta.logprobs, self._logprobs, -1)
            self._ends.append(len(self._logprobs))

    def delta(self) -> Delta:
        packed = memoryview(self._logprobs)
        return Delta(
            kind=self.kind,
            text=self._text.decode(),
            tokens=tuple(self._tokens),
            generated=self._generated,
            logprobs=tuple(placed for start, end in pairwise(self._ends) for placed in _unpacked.decode(packed[start:end])),
            prompt_logprobs=self._prompt_logprobs,
        )


class Mailbox:
    """Events of all choices of one request, in the order of each choice. One reader."""

    def __init__(self) -> None:
        self._entries: deque[tuple[int, _Growing | Finish]] = deque()
        self._last: dict[int, _Growing] = {}
        self._failure: Exception | None = None
        self._filled = asyncio.Event()

    def put(self, choice: int, event: Event) -> None:
        """Add an event."""
        last = self._last.get(choice)
        if isinstance(event, Finish):
            self._entries.append((choice, event))
        elif last is not None and last.kind == event.kind:
            last.append(event)
        else:
            self._last[choice] = _Growing(event)
            self._entries.append((choice, self._last[choice]))
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
        choice, entry = self._entries.popleft()
        if isinstance(entry, Finish):
            return choice, entry
        if self._last.get(choice) is entry:
            del self._last[choice]
        return choice, entry.delta()

    def close(self) -> None:
        """Drop everything, a failure included. The reader must not come back."""
        self._entries.clear()
        self._last.clear()
        self._failure = None

    def __len__(self) -> int:
        return len(self._entries)

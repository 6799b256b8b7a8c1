"""Clients that ask at the same time, on plain sockets: what each got, when, and what it had to wait for."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from support.answers import Answer, fold
from support.traffic import Ask, Conversation

PATIENCE = 120.0
"""Seconds without a byte after which a client gives up: nothing in these tests is so slow."""


class BadAnswerError(AssertionError):
    """A client got an error, or something that is no answer."""


@dataclass(slots=True)
class Done:
    """What became of a request."""

    ask: Ask
    answer: Answer | None = None
    """None: its client has left."""
    refusals: int = 0
    """Answers of status 429, after each of which the client came back."""
    longest_gap: int = 0
    """Most events that other streams got between two of this one."""
    longest_wait: float = 0.0
    """Most seconds between two events of this one."""


@dataclass(slots=True)
class Crowd:
    """Clients of one server. `on_done` is called after every request with the number of those done."""

    url: str
    on_done: Callable[[int], None] = lambda count: None
    done: list[Done] = field(default_factory=list)
    events: int = 0
    """Of all streams so far."""

    async def talk(self, conversations: Iterable[Conversation], streams: int) -> None:
        """Lead all conversations, `streams` at a time. The first failure ends everything."""
        coming = iter(conversations)
        async with asyncio.TaskGroup() as group:
            for _ in range(streams):
                group.create_task(self._client(coming))

    async def ask(self, ask: Ask) -> Done:
        """One request, and once more as often as the server says that it has no room."""
        done = Done(ask)
        while (seconds := await self._attempt(done)) is not None:
            done.refusals += 1
            await asyncio.sleep(seconds)
        self.done.append(done)
        self.on_done(len(self.done))
        return done

    async def _client(self, coming: Iterator[Conversation]) -> None:
        for conversation in coming:
            ask = next(conversation)
            while True:
                done = await self.ask(ask)
                try:
                    ask = conversation.send(done.answer)
                except StopIteration:
                    break

    async def _attempt(self, done: Done) -> float | None:
        """Ask; the seconds to wait if there was no room, else None."""
        ask = done.ask
        host, port = self.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port), limit=1 << 24)
        try:
            content = json.dumps(ask.body).encode()
            head = f"POST {ask.path} HTTP/1.1\r\nhost: {host}\r\ncontent-type: application/json\r\ncontent-length: {len(content)}\r\n\r\n"
            writer.write(head.encode() + content)
            await writer.drain()
            if ask.leave is not None and ask.leave.after == "seconds":
                await asyncio.sleep(ask.leave.amount)
                return None
            return await self._read(reader, done)
        finally:
            writer.transport.abort()

    async def _read(self, reader: asyncio.StreamReader, done: Done) -> float | None:
        ask = done.ask
        async with asyncio.timeout(PATIENCE):
            first, *lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        status = int(first.split()[1])
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        if ask.leave is not None and not ask.leave.amount and status == 200:
            return None
        if "content-length" in headers:
            async with asyncio.timeout(PATIENCE):
                body = await reader.readexactly(int(headers["content-length"]))
            if status == 429:
                return float(headers["retry-after"])
            if status != 200 or ask.body.get("stream"):
                raise BadAnswerError(f"{ask.name}: {status} {body.decode()} for {ask}")
            done.answer = fold([json.loads(body)])
            return None
        done.answer = await self._read_stream(reader, done)
        return None

    async def _read_stream(self, reader: asyncio.StreamReader, done: Done) -> Answer | None:
        """The answer; None if the client leaves while it reads."""
        ask, pieces = done.ask, list[dict[str, Any]]()
        seen, since = 0, 0.0
        async for event in _events(reader):
            now = time.monotonic()
            if pieces:
                done.longest_gap = max(done.longest_gap, self.events - seen)
                done.longest_wait = max(done.longest_wait, now - since)
            self.events += 1
            seen, since = self.events, now
            if event == b"[DONE]":
                return fold(pieces)
            piece = json.loads(event)
            if "error" in piece:
                raise BadAnswerError(f"{ask.name}: {piece} for {ask}")
            pieces.append(piece)
            if ask.leave is not None and len(pieces) >= ask.leave.amount:
                return None
        raise BadAnswerError(f"{ask.name}: the stream ended after {len(pieces)} events without [DONE]: {ask}")


async def _events(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    """Data of the server-sent events of a chunked body; comments are passed over."""
    rest = b""
    while True:
        async with asyncio.timeout(PATIENCE):
            size = int(await reader.readuntil(b"\r\n"), 16)
            chunk = await reader.readexactly(size + 2)
        if not size:
            return
        *events, rest = (rest + chunk[:-2]).split(b"\n\n")
        for event in events:
            if event.startswith(b"data: "):
                yield event.removeprefix(b"data: ")

"""The queue of one client: ordered per choice, merged while nobody reads, never in the writer's way."""

import asyncio
import time
import tracemalloc

import pytest

from revolta_serve.api.mailbox import Mailbox
from revolta_serve.text.alignment import Placed
from revolta_serve.text.events import AnswerUsage, Delta, Event, Finish, Kind
from support.script_engine import scripted_logprobs


def delta(text: str, generated: int, kind: Kind = "content") -> Delta:
    return Delta(kind=kind, text=text, tokens=(generated,), generated=generated)


FINISH = Finish(reason="stop", stop=None, tokens=(), usage=AnswerUsage(prompt=1, cached=0, generated=3, reasoning=1))


def drain(mailbox: Mailbox, count: int) -> list[tuple[int, Event]]:
    async def run() -> list[tuple[int, Event]]:
        return [await mailbox.get() for _ in range(count)]

    return asyncio.run(run())


def test_deltas_of_one_kind_merge_and_kinds_do_not() -> None:
    mailbox = Mailbox()
    for event in (delta("a", 1, "reasoning"), delta("b", 2, "reasoning"), delta("c", 3), delta("d", 4), FINISH):
        mailbox.put(0, event)
        mailbox.put(1, event)
    assert len(mailbox) == 6
    assert drain(mailbox, 6) == [
        (choice, event)
        for event in (
            Delta(kind="reasoning", text="ab", tokens=(1, 2), generated=2),
            Delta(kind="content", text="cd", tokens=(3, 4), generated=4),
            FINISH,
        )
        for choice in (0, 1)
    ]


def test_logprobs_merge_with_their_text() -> None:
    mailbox = Mailbox()
    known = (scripted_logprobs(3, 2), scripted_logprobs(4, 2))
    placed = tuple(Placed(scripted_logprobs(token, 20), token, bool(token % 2)) for token in range(3))
    mailbox.put(0, Delta(kind="content", text="a", tokens=(0,), generated=1, logprobs=placed[:1], prompt_logprobs=known))
    mailbox.put(0, delta("b", 2))
    mailbox.put(0, Delta(kind="content", text="c", tokens=(3,), generated=3, logprobs=placed[1:]))
    [(_, merged)] = drain(mailbox, 1)
    assert merged == Delta(kind="content", text="abc", tokens=(0, 2, 3), generated=3, logprobs=placed, prompt_logprobs=known)


def test_logprobs_wait_packed() -> None:
    """20 likely tokens take 20 x 13 bytes, not 20 tuples of two objects each."""
    mailbox, count = Mailbox(), 500
    tracemalloc.start()
    try:
        for token in range(count):
            placed = Placed(scripted_logprobs(token, 20), token, True)
            mailbox.put(0, Delta(kind="content", text="a", tokens=(token,), generated=token, logprobs=(placed,)))
        taken, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert taken < 1000 * count, "growing buffers keep some room, objects would take more than 2000 bytes a token"


def test_what_has_been_read_is_not_merged_into() -> None:
    mailbox = Mailbox()
    mailbox.put(0, delta("a", 1))
    assert drain(mailbox, 1) == [(0, delta("a", 1))]
    mailbox.put(0, delta("b", 2))
    assert drain(mailbox, 1) == [(0, delta("b", 2))]


@pytest.mark.parametrize("text", ["x", "wörter ", "\U0001f642"])
def test_what_nobody_reads_takes_the_room_of_its_text(text: str) -> None:
    count = 20_000
    events = [delta(text, number) for number in range(100)] * (count // 100)
    needed = count * (len(text.encode()) + 4)
    mailbox = Mailbox()
    tracemalloc.start()
    try:
        for event in events:
            mailbox.put(0, event)
        taken, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(mailbox) == 1
    assert taken < 1.5 * needed + 20_000, "growing buffers keep some room, objects of each event would take 100 bytes and more"
    [(_, merged)] = drain(mailbox, 1)
    assert merged == Delta(kind="content", text=text * count, tokens=tuple(range(100)) * (count // 100), generated=99)


def test_putting_takes_the_time_of_the_piece() -> None:
    """A client that never reads must not make the engine's outputs slower and slower."""
    mailbox, piece, spans = Mailbox(), delta("word " * 100, 1), []
    for _ in range(5):
        began = time.perf_counter()
        for _ in range(4000):
            mailbox.put(0, piece)
        spans.append(time.perf_counter() - began)
    assert min(spans[3:]) < 10 * min(spans[:2])


def test_a_failure_comes_first_and_stays() -> None:
    mailbox = Mailbox()
    mailbox.put(0, delta("a", 1))
    mailbox.fail(KeyError("first"))
    mailbox.fail(KeyError("second"))
    for _ in range(2):
        with pytest.raises(KeyError, match="first"):
            drain(mailbox, 1)


def test_waiting_may_be_given_up_and_resumed() -> None:
    async def run() -> tuple[int, Event]:
        mailbox = Mailbox()
        for _ in range(3):
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.001):
                    await mailbox.get()
        asyncio.get_running_loop().call_later(0.01, mailbox.put, 0, delta("a", 1))
        return await mailbox.get()

    assert asyncio.run(run()) == (0, delta("a", 1))

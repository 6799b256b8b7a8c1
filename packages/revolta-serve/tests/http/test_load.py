"""Many clients at once on a server whose cache is too small for them: nobody is forgotten, every answer is right, nothing stays behind."""

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from revolta_serve.testing import RunningServer, running_server
from revolta_serve.weights.tiny import make_tiny
from support import journal
from support.answers import Answer
from support.crowd import Crowd
from support.growth import Growth
from support.traffic import COMPLETIONS, LONGEST, TURNS, Ask, conversation
from support.wire import get, metrics, wait_until_idle

SEED = 1
PROBE = Ask("probe", COMPLETIONS, {"prompt": "It is a truth", "max_tokens": 20, "temperature": 1, "seed": 7, "logprobs": 2})
KILOBYTES_PER_REQUEST = 20.0
SETTLED = 100
"""Requests after which everything that is made once has been made."""


@dataclass(frozen=True, slots=True)
class Load:
    """How many clients ask how often, of a server of what size. Every conversation has one request that is left."""

    streams: int
    conversations: int
    sequences: int
    blocks: int
    slots: int
    queue: int

    @property
    def settings(self) -> dict[str, Any]:
        """The pools force preemptions; everything about reuse is as by default."""
        schedule = {"max_model_len": LONGEST, "max_num_seqs": self.sequences, "max_num_batched_tokens": 512, "max_queue": self.queue}
        schedule |= {"audit_steps": 50, "stall_steps": 100}
        return {
            **journal.SETTINGS, "cache.num_blocks": self.blocks, "cache.num_slots": self.slots,
            **{f"schedule.{name}": value for name, value in schedule.items()},
        }  # fmt: skip


FEW = Load(streams=16, conversations=12, sequences=8, blocks=33, slots=14, queue=4)
MANY = Load(streams=64, conversations=100, sequences=64, blocks=150, slots=80, queue=256)

EVENTS = ("num_preemptions", "replayed_tokens", "prefix_cache_hits", "kv_blocks_evicted", "snapshots_evicted")
"""What a load is for. Who meets whom is decided by the clock, so a load goes on until all of it has happened."""

ROUNDS = 12
"""Times a load is repeated at most, with other conversations."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """A server after its load."""

    load: Load
    server: RunningServer
    crowd: Crowd
    growth: Growth
    probe: Answer | None
    """What the server said to PROBE before."""
    before: dict[str, float]
    """Metrics, as are those of after."""
    after: dict[str, float]
    rounds: int

    @property
    def conversations(self) -> int:
        """Of all rounds; each has one request that is left."""
        return self.rounds * self.load.conversations


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four layers have every kind of state."""
    directory = tmp_path_factory.mktemp("model") / "tiny"
    make_tiny(directory, layers=4)
    return directory


@pytest.fixture(scope="module", params=[pytest.param(FEW, id="few"), pytest.param(MANY, id="many", marks=pytest.mark.full)])
def loaded(request: pytest.FixtureRequest, tiny: Path) -> Iterator[Loaded]:
    load: Load = request.param
    with running_server(tiny, load.settings) as server:
        growth = Growth({"api": server.pid, "engine": server.engine})

        def sample(count: int) -> None:
            if count % 25 == 0:
                growth.sample(count)

        crowd, probe = Crowd(server.url, sample), ask(server, PROBE)
        before = after = metrics(server.url)
        for number in range(ROUNDS):
            coming = range(number * load.conversations, (number + 1) * load.conversations)
            asyncio.run(crowd.talk((conversation(SEED, each) for each in coming), load.streams))
            wait_until_idle(server.url, 10)
            after = metrics(server.url)
            if (
                all(after[f"{name}_total"] > before[f"{name}_total"] for name in EVENTS)
                and interrupted(server, crowd)
                and (load is MANY or any(each.refusals for each in crowd.done))
            ):
                break
        yield Loaded(load, server, crowd, growth, probe, before, after, number + 1)


def interrupted(server: RunningServer, crowd: Crowd) -> set[str]:
    """The answered requests that were preempted on the way."""
    preempted = {name for name, each in journal.ended(server).items() if any(line.get("preemptions") for line in each)}
    return preempted & {each.ask.name for each in crowd.done if each.answer}


def ask(server: RunningServer, request: Ask) -> Answer | None:
    """One request while nobody else asks."""
    return asyncio.run(Crowd(server.url).ask(request)).answer


def test_every_request_is_answered_or_left(loaded: Loaded) -> None:
    load, done = loaded.load, loaded.crowd.done
    assert len({each.ask.name for each in done}) == len(done) == TURNS * loaded.conversations
    assert {each.ask.name for each in done if each.answer is None} == {each.ask.name for each in done if each.ask.leave}
    assert sum(each.answer is None for each in done) == loaded.conversations
    assert bool(sum(each.refusals for each in done)) == (load is FEW), "only its queue is too short for its clients"


def test_what_the_server_counted(loaded: Loaded) -> None:
    """The events that this load is about have happened, and no others."""
    grown = {name: loaded.after[name] - loaded.before[name] for name in loaded.before}
    left, lines = loaded.conversations, journal.ended(loaded.server)
    # A request that was refused is over before its client leaves.
    assert left / 2 < grown["client_disconnects_total"] <= left
    assert loaded.load is FEW or grown["client_disconnects_total"] == left
    for name in EVENTS:
        assert grown[f"{name}_total"] > 0, name
    assert grown["corrupted_requests_total"] == 0
    assert loaded.after["scheduler_stalled_requests"] == 0
    answered = {each.ask.name for each in loaded.crowd.done if each.answer}
    assert interrupted(loaded.server, loaded.crowd), "an answer that is checked below was interrupted"
    assert {line["finish"] for each in lines.values() for line in each} <= {"stop", "length", "repetition", "abort"}
    assert set(journal.places(lines)) >= {"queue", "answer"}
    assert answered <= set(lines)
    assert not journal.troubles(loaded.server)


def test_nothing_is_left_behind(loaded: Loaded) -> None:
    """And the books of the cache balance: an engine whose books do not ends when it is idle."""
    assert get(loaded.server.url, "/health").status_code == 200
    assert loaded.after["kv_blocks_cached"] > 0
    assert loaded.after["state_slots_cached"] > 0
    with pytest.raises(TimeoutError):
        loaded.server.wait(0.3)
    assert ask(loaded.server, PROBE) == loaded.probe
    if loaded.load is MANY:  # few requests make no slope
        slopes = loaded.growth.slopes(SETTLED)
        assert max(slopes.values()) < 1024 * KILOBYTES_PER_REQUEST, f"bytes per request {slopes}: {loaded.growth.samples}"


def test_every_answer_is_that_of_the_request_alone(loaded: Loaded) -> None:
    """Bit for bit, logprobs too; but for those few that reused states over generated text, whose tokens hardly ever differ."""
    lines = journal.ended(loaded.server)
    alone = Crowd(loaded.server.url)
    wrong: list[tuple[Ask, Any, Any]] = []
    near = differ = 0

    async def compare() -> None:
        nonlocal near, differ
        for done in loaded.crowd.done:
            if done.answer is None:
                continue
            cold = (await alone.ask(done.ask.alone())).answer
            assert cold is not None
            if all(line["seamless"] for line in lines[done.ask.name]):
                if cold != done.answer:
                    wrong.append((done.ask, done.answer, cold))
            else:
                near += 1
                differ += cold.tokens != done.answer.tokens

    asyncio.run(compare())
    assert not wrong, f"{len(wrong)} differ, the first: {wrong[0]}"
    assert differ <= max(1, near // 10), f"{differ} of {near} have other tokens"
    wait_until_idle(loaded.server.url)
    assert not journal.troubles(loaded.server)

"""Six minutes of mixed traffic that swells and ebbs: nothing stalls, nothing grows, and every answer is that of its request alone.

Nothing is reused here that was computed as an answer, so that all of it is the same bit for bit.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from revolta_serve.testing import RunningServer, running_server
from revolta_serve.weights.tiny import make_tiny
from support import journal
from support.answers import Answer
from support.crowd import Crowd
from support.growth import Growth
from support.traffic import LONGEST, MOST_TOKENS, Ask, Conversation, conversation
from support.wire import get, in_use, metrics, wait_until_idle

pytestmark = [pytest.mark.full, pytest.mark.timeout(1800)]

SEED = 20
SECONDS = 360.0
"""Of traffic."""
WAVES = (12, 48, 4, 24)
"""Clients at a time, wave after wave."""
WAVE_SECONDS = 30.0
SILENCE = 60.0
"""Seconds after which a stream that has begun is silent too long, on the slowest of machines."""
KILOBYTES_PER_REQUEST = 10.0
SETTLED = 500
"""Requests after which caches of fixed size are mostly full."""
SETTINGS: dict[str, Any] = {
    **journal.SETTINGS, "cache.generated": False, "cache.num_blocks": 110, "cache.num_slots": 44,
    "schedule.max_model_len": LONGEST, "schedule.max_num_seqs": 32, "schedule.max_num_batched_tokens": 384,
    "schedule.long_prefill_tokens": 256, "schedule.audit_steps": 100, "schedule.stall_steps": 60,
}  # fmt: skip


@dataclass(slots=True)
class Soak:
    """What six minutes of traffic showed."""

    server: RunningServer
    crowd: Crowd
    growth: Growth
    samples: list[dict[str, float]] = field(default_factory=list)
    """Metrics, every second."""
    left_over: list[dict[str, float]] = field(default_factory=list)
    """What was still in use after a wave, if anything was."""


@pytest.fixture(scope="module")
def soak(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Soak]:
    directory: Path = tmp_path_factory.mktemp("model") / "tiny"
    make_tiny(directory, layers=4)
    with running_server(directory, SETTINGS) as server:
        growth = Growth({"api": server.pid, "engine": server.engine})

        def sample(count: int) -> None:
            if count % 25 == 0:
                growth.sample(count)

        made = Soak(server, Crowd(server.url, sample), growth)
        asyncio.run(traffic(made))
        yield made


async def traffic(soak: Soak) -> None:
    """Waves of clients until SECONDS have passed; between two of them nobody asks."""
    watcher = asyncio.create_task(watch(soak))
    end, number = time.monotonic() + SECONDS, 0

    def until(moment: float) -> Iterator[Conversation]:
        nonlocal number
        while time.monotonic() < moment:
            number += 1
            yield conversation(SEED, number)

    wave = 0
    while (now := time.monotonic()) < end:
        await soak.crowd.talk(until(min(end, now + WAVE_SECONDS)), WAVES[wave % len(WAVES)])
        wave += 1
        try:
            await asyncio.to_thread(wait_until_idle, soak.server.url, 10)
        except AssertionError:
            soak.left_over.append(await asyncio.to_thread(in_use, soak.server.url))
    watcher.cancel()
    soak.samples.append(await asyncio.to_thread(metrics, soak.server.url))


async def watch(soak: Soak) -> None:
    """Look at the metrics every second."""
    while True:
        soak.samples.append(await asyncio.to_thread(metrics, soak.server.url))
        await asyncio.sleep(1)


def test_the_traffic_was_mixed(soak: Soak) -> None:
    """Everything that this is about has happened, often."""
    last, done = soak.samples[-1], soak.crowd.done
    fields = Counter(name for each in done if each.answer for name, value in each.ask.fields.items() if value)
    expected = (
        "stream", "n", "stop", "seed", "logprobs", "prompt_logprobs", "presence_penalty", "repetition_penalty", "logit_bias",
        "bad_words", "cache_salt", "echo", "reasoning_effort", "thinking_token_budget", "min_tokens", "ignore_eos", "messages", "prompt",
    )  # fmt: skip
    assert all(fields[name] > 4 for name in expected), fields
    assert len(done) > 600
    for name in ("num_preemptions", "replayed_tokens", "prefix_cache_hits", "kv_blocks_deduplicated", "snapshots_evicted"):
        assert last[f"{name}_total"] > 20, name
    lines = journal.ended(soak.server)
    assert set(journal.places(lines)) == {"queue", "prompt", "answer"}
    # Who leaves after a while may leave when the request has been refused or its answer is there, which is nothing to count.
    left = [each.ask.name for each in done if each.answer is None]
    given_up = sum(any(line["finish"] == "abort" for line in lines.get(name, ())) for name in left)
    assert given_up <= last["client_disconnects_total"] <= len(left)
    assert given_up > 0.9 * len(left)


def test_nothing_stalled(soak: Soak) -> None:
    """No running request was left out of steps, no stream was silent for long, none got nothing while others got all they wanted."""
    assert len(soak.samples) > SECONDS / 4
    assert not any(sample["scheduler_stalled_requests"] for sample in soak.samples)
    assert max(sample["num_requests_running"] for sample in soak.samples) > 16
    done = soak.crowd.done
    assert max(each.longest_wait for each in done) < SILENCE
    # Whoever is preempted resumes before anybody new starts: meanwhile others may finish, and what they got may lie unread.
    assert max(each.longest_gap for each in done) < 2 * max(WAVES) * MOST_TOKENS
    assert not any(each.refusals for each in done)


def test_nothing_is_left_behind(soak: Soak) -> None:
    assert not soak.left_over
    assert get(soak.server.url, "/health").status_code == 200
    assert not journal.troubles(soak.server)
    slopes = soak.growth.slopes(SETTLED)
    assert max(slopes.values()) < 1024 * KILOBYTES_PER_REQUEST, f"bytes per request {slopes}: {soak.growth.samples}"


def test_every_answer_is_that_of_the_request_alone(soak: Soak) -> None:
    """Bit for bit, logprobs too, and cold."""
    lines = journal.ended(soak.server)
    preempted = {name for name, each in lines.items() if any(line.get("preemptions") for line in each)}
    rest = [each for each in soak.crowd.done if each.answer is not None]
    assert any(each.ask.name in preempted for each in rest)
    alone, wrong = Crowd(soak.server.url), list[tuple[Ask, Answer | None, Answer | None]]()

    async def compare() -> None:
        for each in rest:
            cold = (await alone.ask(each.ask.alone())).answer
            if cold != each.answer:
                wrong.append((each.ask, each.answer, cold))

    asyncio.run(compare())
    assert not wrong, f"{len(wrong)} of {len(rest)} differ, the first: {wrong[0]}"
    assert all(line["seamless"] for each in lines.values() for line in each if line["started"])

"""States that are kept on the way and resumed from: bit for bit those of a run that was never interrupted."""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from torch import Tensor

from revolta_serve.runner.runner import Runner
from revolta_serve.types import SamplingParams, StepPlan
from revolta_serve.weights.tiny import make_tiny
from support.drive import Request, load
from support.states import contents, differing, poison, slot_of

SHAPES: dict[str, dict[str, Any]] = {
    "ratio-4": dict(seed=13, layers=4, budget=16),
    "ratio-2": dict(seed=14, layers=4, budget=8, ratio=2, ngram=2, index_heads=12),
    "ratio-8": dict(seed=15, layers=4, budget=16, ratio=8, streams=2, ple_layers=(1, 2), ngram=4, ngram_heads=2, hidden=48, ple_dim=48),
}
SPARE = (9, 10, 11)
LONG = 330


@pytest.fixture(scope="module", params=[(name, "float32") for name in SHAPES] + [("ratio-4", "float16")], ids="-".join)
def runner(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Runner:
    name, dtype = request.param
    directory: Path = tmp_path_factory.mktemp(name)
    make_tiny(directory, **SHAPES[name])
    return load(directory, dtype)


@pytest.fixture(autouse=True)
def forgotten(runner: Runner) -> Iterator[None]:
    """Whatever a test leaves behind, the next one starts with a runner that knows nobody."""
    yield
    runner.step(StepPlan(step=0, slices=(), forget=tuple(range(8))))


@pytest.fixture
def seen(runner: Runner) -> Iterator[dict[int, list[Tensor]]]:
    """Logits of everything sampled, by request."""
    logits: dict[int, list[Tensor]] = {}
    runner.tap = lambda piece, judged: logits.setdefault(piece.request, []).append(judged)
    yield logits
    runner.tap = None


def prompt_of(runner: Runner, length: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(runner.model.config.vocab) for _ in range(length)]


def test_a_slice_keeps_states_on_its_way(runner: Runner) -> None:
    """However the prompt is cut, the state kept at a grid position is that of a prompt which ends there."""
    ids, positions = prompt_of(runner, LONG), (64, 192, 320)
    for chunk in (64, 128, 512):
        poison(runner)
        one = Request(runner, 0, ids)
        while one.done < len(ids):
            count = min(chunk, len(ids) - one.done)
            one.step(count, keep=[(at, slot) for at, slot in zip(positions, SPARE, strict=True) if one.done < at <= one.done + count])
        one.finish()
        for at, slot in zip(positions, SPARE, strict=True):
            short = Request(runner, 1, ids[:at])
            short.prefill()
            assert differing(slot_of(runner, slot), slot_of(runner, short.slot)) == [], (chunk, at)
            short.finish()


def test_a_prompt_goes_on_from_a_snapshot(runner: Runner, seen: dict[int, list[Tensor]]) -> None:
    """In another slot, with the blocks of the first run, and without anything in the ring of raw index keys."""
    poison(runner)
    ids = prompt_of(runner, LONG)
    cold = Request(runner, 0, ids)
    cold.prefill()
    cold.decode(20)
    expected, logits = contents(cold), seen.pop(0)
    cold.finish()
    for kept in (64, 256, 320):
        poison(runner)
        first = Request(runner, 1, ids[: kept + 1], first_block=0)
        first.step(kept + 1, keep=[(kept, SPARE[0])])
        first.finish()
        runner.pools.ring.fill_(torch.nan)
        warm = Request(runner, 2, ids, slot=5, first_block=0)
        warm.resume(kept, SPARE[0])
        warm.prefill(64)
        warm.decode(20)
        assert differing(contents(warm), expected) == [], kept
        assert warm.ids == cold.ids
        judged = seen.pop(2)
        assert len(judged) == len(logits) == 21
        assert all(torch.equal(a, b) for a, b in zip(judged, logits, strict=True))
        warm.finish()


def test_an_answer_comes_back_after_preemption(runner: Runner, seen: dict[int, list[Tensor]]) -> None:
    """From its rolling snapshot, in another slot, through rows whose tokens are known; what it had drawn stays drawn."""
    sampled = SamplingParams(temperature=0.9, top_k=40, seed=7, presence_penalty=0.3, min_tokens=5, ending_tokens=(1,))
    prompt, end = prompt_of(runner, 120, 1), 150
    poison(runner)
    whole = Request(runner, 0, prompt, sampling=sampled)
    whole.prefill()
    whole.decode(end - whole.done)
    expected, logits = contents(whole), seen.pop(0)
    whole.finish()
    for width in (1, 5, 8):
        poison(runner)
        one = Request(runner, 1, prompt, sampling=sampled, first_block=0)
        one.prefill()
        while one.done < 141:
            at = one.done + 1
            one.step(1, "decode", keep=[(at, SPARE[1])] if at % 64 == 0 else [])
        runner.pools.ring.fill_(torch.nan)
        one.resume(128, SPARE[1], slot=3)
        runner.pools.gdn[:, 1] = torch.nan
        one.replay(width)
        one.decode(end - one.done)
        assert one.ids == whole.ids
        assert differing(contents(one), expected) == [], width
        judged = seen.pop(1)
        assert len(judged) == len(logits), "replayed rows are not sampled again"
        assert all(torch.equal(a, b) for a, b in zip(judged, logits, strict=True))
        one.finish()


def test_restores_come_before_everything_else(runner: Runner) -> None:
    """Two requests resume from one slot in the very step in which a third one's snapshot takes it over; restores run in slice order."""
    poison(runner)
    ids = prompt_of(runner, 140, 2)
    cold = Request(runner, 0, ids)
    cold.step(140, keep=[(128, SPARE[0])])
    old = slot_of(runner, SPARE[0])
    other = Request(runner, 1, prompt_of(runner, 63, 3))
    other.prefill()
    one, two = (Request(runner, number, ids, first_block=32 * number) for number in (2, 3))
    for request in (one, two):
        runner.pools.k[:, request.first_block : request.first_block + 3] = runner.pools.k[:, :3]
        runner.pools.v[:, request.first_block : request.first_block + 3] = runner.pools.v[:, :3]
        runner.pools.keys[:, request.first_block : request.first_block + 3] = runner.pools.keys[:, :3]
    one.done, one.restore = 128, SPARE[0]
    two.done, two.restore = 128, one.slot  # what the first restore has just put there
    pieces = (other.slice(1, "decode", keep=[(64, SPARE[0])]), one.slice(12), two.slice(12))
    runner.step(StepPlan(step=0, slices=pieces))
    for request in (one, two):
        assert differing(slot_of(runner, request.slot), slot_of(runner, cold.slot)) == []
    assert differing(slot_of(runner, SPARE[0]), slot_of(runner, other.slot)) == []
    assert differing(slot_of(runner, SPARE[0]), old) == ["gdn", "conv", "ple"]
    for request in (cold, other, one, two):
        request.finish()


def test_a_swapped_block_is_read_and_written_instead_of_the_old_one(runner: Runner, seen: dict[int, list[Tensor]]) -> None:
    poison(runner)
    found = []
    for swapping in (False, True):
        one = Request(runner, 0, prompt_of(runner, 150, 4))
        one.prefill()
        one.decode(3)
        piece = one.slice(1, "decode")
        if swapping:
            for plane in (runner.pools.k, runner.pools.v, runner.pools.keys):
                plane[:, 40], plane[:, 41] = plane[:, 0], plane[:, 2]
                plane[:, 0:3:2] = torch.nan
            piece = replace(piece, swaps=((0, 40), (2, 41)))
        one.ids += runner.step(StepPlan(step=0, slices=(piece,))).slices[0].tokens
        one.decode(20)
        found.append((seen.pop(0), one.ids))
        one.finish()
    assert found[0][1] == found[1][1]
    assert all(torch.equal(a, b) for a, b in zip(found[0][0], found[1][0], strict=True))

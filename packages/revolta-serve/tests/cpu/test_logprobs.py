"""Logprobs of drawn tokens and of the prompt's own: right values, ranks and order, whoever shares the step and however it is cut."""

import math
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from revolta_serve.runner.logprobs import CHUNK
from revolta_serve.runner.runner import Runner
from revolta_serve.types import LOGPROB_FLOOR, SamplingParams, StepPlan, TokenLogprobs
from revolta_serve.weights.tiny import make_tiny
from support.drive import Request, full_pass, load

LONG = 330


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> Runner:
    directory: Path = tmp_path_factory.mktemp("tiny")
    make_tiny(directory, seed=23, layers=4, budget=16)
    return load(directory)


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


def check(told: TokenLogprobs, logits: np.ndarray, token: int, top: int) -> None:
    """Compare with log-softmax in float64 of logits [V]; -inf is the floor."""
    z = logits.astype(np.float64)
    exact = z - z.max() - math.log(np.exp(z - z.max()).sum())
    exact = np.maximum(exact, LOGPROB_FLOOR)
    order = sorted(range(len(z)), key=lambda v: (-z[v], v))
    assert told.token == token
    assert told.rank == 1 + order.index(token)
    assert [v for v, _ in told.top] == order[:top]
    assert all(type(value) is float for value in (told.logprob, *(value for _, value in told.top)))
    np.testing.assert_allclose([told.logprob, *(value for _, value in told.top)], exact[[token, *order[:top]]], rtol=0, atol=5e-6)


def greedy(**changes: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0.0, **changes})


SAMPLED = dict(temperature=0.7, top_k=5, seed=3, frequency_penalty=0.5)


@pytest.mark.parametrize("top", [0, 1, 7])
@pytest.mark.parametrize("sampling", [{}, SAMPLED], ids=["greedy", "sampled"])
def test_drawn_tokens_by_the_models_own_distribution(
    runner: Runner, seen: dict[int, list[Tensor]], sampling: dict[str, Any], top: int
) -> None:
    one = Request(runner, 0, prompt_of(runner, 70), sampling=greedy(logprobs=top, **sampling))
    told = [*one.step(70).logprobs]
    for _ in range(10):
        told += one.step(1, "decode").logprobs
    assert len(told) == len(seen[0]) == 11
    for entry, logits, token in zip(told, seen[0], one.ids[70:], strict=True):
        check(entry, logits.numpy(), token, top)
    one.finish()


def test_drawn_tokens_by_the_distribution_they_are_drawn_from(runner: Runner, seen: dict[int, list[Tensor]]) -> None:
    allowed = (3, 8, 50, 51)
    params = greedy(temperature=0.5, allowed_tokens=allowed, logit_bias=((8, 2.0),), logprobs=6, processed_logprobs=True)
    one = Request(runner, 0, prompt_of(runner, 70), sampling=params)
    (told,) = one.step(70).logprobs
    logits = seen[0][0].numpy()
    processed = np.full(len(logits), -np.inf)
    for token in allowed:
        processed[token] = (logits[token] + (2.0 if token == 8 else 0.0)) / 0.5
    check(told, processed, one.ids[70], 6)
    assert [value for _, value in told.top[4:]] == [LOGPROB_FLOOR] * 2
    one.finish()


def test_no_logprobs_unless_asked_for(runner: Runner) -> None:
    plain = Request(runner, 0, prompt_of(runner, 70))
    result = plain.step(70)
    assert (len(result.tokens), result.logprobs, result.prompt_logprobs) == (1, (), ())
    plain.finish()


def everyone(runner: Runner) -> list[Request]:
    wishes = (greedy(logprobs=2), greedy(logprobs=9, processed_logprobs=True, **SAMPLED), greedy(), greedy(logprobs=0, **SAMPLED))
    return [Request(runner, number, prompt_of(runner, 40 + number, number), sampling=each) for number, each in enumerate(wishes)]


def test_company_changes_no_bit(runner: Runner) -> None:
    alone = []
    for one in everyone(runner):
        told = [one.step(len(one.ids)).logprobs]
        told += [one.step(1, "decode").logprobs for _ in range(4)]
        alone.append(told)
        one.finish()
    together = everyone(runner)
    found: list[list[tuple[TokenLogprobs, ...]]] = [[] for _ in together]
    for step in range(5):
        pieces = [one.slice(1, "decode") if step else one.slice(len(one.ids)) for one in together]
        for one, result, told in zip(together, runner.step(StepPlan(step=0, slices=tuple(pieces))).slices, found, strict=True):
            one.ids += result.tokens
            told.append(result.logprobs)
    assert found == alone
    assert [len(told[0]) for told in found] == [1, 1, 0, 1]
    for one in together:
        one.finish()


def prompt_logprobs(one: Request, chunk: int, told_from: int = 0) -> list[TokenLogprobs]:
    """Run a prompt in slices and collect what it says of its own tokens from row `told_from` on."""
    told: list[TokenLogprobs] = []
    while one.done < one.prompt:
        count = min(chunk, one.prompt - one.done)
        told += one.step(count, logprobs_from=max(0, told_from - one.done)).prompt_logprobs
    return told


def test_a_prompt_by_the_models_own_distribution(runner: Runner) -> None:
    ids = prompt_of(runner, LONG)
    logits, _ = full_pass(runner, ids)
    one = Request(runner, 0, ids, sampling=greedy(prompt_logprobs=3, processed_logprobs=True, **SAMPLED))
    told = prompt_logprobs(one, LONG)
    assert len(told) == LONG - 1, "no position is left out, and nothing is said of what is drawn"
    for entry, row, token in zip(told, logits, ids[1:], strict=False):
        check(entry, row.numpy(), token, 3)
    one.finish()


@pytest.mark.parametrize("told_from", [0, 63, 64, 200, LONG - 2, LONG - 1])
def test_slices_give_the_same_bits(runner: Runner, told_from: int) -> None:
    found = []
    for chunk in (64, 128, LONG):
        one = Request(runner, 0, prompt_of(runner, LONG), sampling=greedy(prompt_logprobs=2))
        found.append(prompt_logprobs(one, chunk, told_from))
        one.finish()
    assert len(found[0]) == LONG - 1 - told_from
    assert found[0] == found[1] == found[2]


def test_a_prompt_that_goes_on_from_a_snapshot_tells_the_rest(runner: Runner) -> None:
    sampling = greedy(prompt_logprobs=2)
    cold = Request(runner, 0, prompt_of(runner, LONG), sampling=sampling)
    first = prompt_logprobs(cold, LONG)
    cold.resume(0, -1)
    cold.ids = cold.ids[:LONG]
    cold.step(192, keep=[(192, 5)], logprobs_from=0)
    cold.resume(192, 5)
    assert prompt_logprobs(cold, 64, 192) == first[192:]
    cold.finish()


def test_company_changes_no_bit_of_a_prompt(runner: Runner) -> None:
    def several() -> list[Request]:
        return [
            Request(runner, n, prompt_of(runner, length, n), sampling=greedy(prompt_logprobs=top, logprobs=1))
            for n, (length, top) in enumerate(((100, 4), (65, 0), (200, 1)))
        ]

    alone = []
    for one in several():
        alone.append(one.step(len(one.ids), logprobs_from=0))
        one.finish()
    together = several()
    result = runner.step(StepPlan(step=0, slices=tuple(one.slice(len(one.ids), logprobs_from=0) for one in together)))
    assert list(result.slices) == alone
    assert [len(each.prompt_logprobs) for each in alone] == [99, 64, 199]
    for one in together:
        one.finish()


def test_memory_is_bounded_by_a_chunk(runner: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    rows: list[int] = []
    head = runner.model.logits
    monkeypatch.setattr(runner.model, "logits", lambda x: rows.append(len(x)) or head(x))
    one = Request(runner, 0, prompt_of(runner, LONG), sampling=greedy(prompt_logprobs=0))
    prompt_logprobs(one, LONG)
    assert rows == [1, CHUNK, CHUNK, LONG - 1 - 2 * CHUNK]
    assert CHUNK <= 128
    one.finish()


def test_a_prompt_whose_logits_are_not_finite_fails_alone(runner: Runner) -> None:
    sampling = greedy(prompt_logprobs=0)
    bad, fine = (Request(runner, number, prompt_of(runner, 80, number), sampling=sampling) for number in (0, 1))
    embedding = runner.model.embedding
    kept = embedding[bad.ids[20]].clone()
    assert bad.ids[20] not in fine.ids
    try:
        embedding[bad.ids[20]] = torch.nan
        pieces: Sequence[Any] = (bad.slice(64, logprobs_from=0), fine.slice(80, logprobs_from=0))
        results = runner.step(StepPlan(step=0, slices=tuple(pieces))).slices
    finally:
        embedding[bad.ids[20]] = kept
    assert [(result.corrupt, len(result.tokens), len(result.prompt_logprobs)) for result in results] == [(True, 0, 0), (False, 1, 79)]
    for one in (bad, fine):
        one.finish()

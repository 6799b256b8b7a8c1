"""Seeded sampling belongs to the request: its tokens are the same in every company, with a warm prefix, in slices, after an abort."""

from collections.abc import Callable
from pathlib import Path

import pytest

from revolta_serve.runner.runner import Runner
from revolta_serve.types import GenerateRequest, SamplingParams
from revolta_serve.weights.tiny import make_tiny
from support.law import SHAPE, Answer, Engine, compare, ids, limits, load, request

PROMPT = ids(1, 200)


def drawn(name: str, seed: int = 42) -> GenerateRequest:
    return request(name, PROMPT, 64, sampling=SamplingParams(temperature=1.0, seed=seed))


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> Runner:
    directory: Path = tmp_path_factory.mktemp("seeds")
    make_tiny(directory, **SHAPE)
    return load(directory, 1024)


@pytest.fixture(scope="module")
def alone(runner: Runner) -> Answer:
    with Engine(runner, limits(runner, prefix=False)) as engine:
        return engine.serve(drawn("alone"))


def company() -> list[GenerateRequest]:
    """Seven that draw in all the ways there are."""
    params = [
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=1.0, seed=7),
        SamplingParams(temperature=1.0, seed=0),
        SamplingParams(temperature=0.3, seed=42, top_k=5),
        SamplingParams(temperature=2.0, seed=3, repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.5),
        SamplingParams(temperature=1.0, seed=4, top_p=0.5, min_p=0.1, logprobs=3),
        SamplingParams(temperature=0.0, logit_bias=((5, 4.0),), bad_words=((3,), (4, 5)), min_tokens=9, ending_tokens=(1,)),
    ]
    return [request(f"other{n}", ids(50 + n, 30 * n + 1), 90, sampling=one) for n, one in enumerate(params)]


def in_company(engine: Engine) -> None:
    engine.add(*company(), drawn("it"))


def twice_at_once(engine: Engine) -> None:
    engine.add(drawn("twin"), drawn("it"))


def warm(engine: Engine) -> None:
    engine.serve(drawn("first", seed=1))
    engine.add(drawn("it"))


def after_an_abort(engine: Engine) -> None:
    engine.add(*company(), drawn("it"))
    for _ in range(20):
        engine.step()
    engine.abort("other1")


def after_an_interruption(engine: Engine) -> None:
    engine.add(*company(), drawn("it"))
    while len(engine.answers["it"].tokens) < 40:
        engine.step()
    engine.scheduler.preempt_all()


@pytest.mark.parametrize("rows", [64, 1024])
@pytest.mark.parametrize("begin", [in_company, twice_at_once, warm, after_an_abort, after_an_interruption])
def test_the_tokens_of_a_seed_are_its_own(runner: Runner, alone: Answer, begin: Callable[[Engine], None], rows: int) -> None:
    with Engine(runner, limits(runner, max_num_batched_tokens=rows + 8, prefill_cap=rows)) as engine:
        begin(engine)
        engine.run()
        answer, twin = engine.answers["it"], engine.answers.get("twin")
    assert (answer.finish, len(answer.tokens)) == ("length", 64)
    assert compare("it", alone, answer, len(PROMPT)) is None
    assert twin is None or twin.tokens == answer.tokens


def test_every_seed_is_another_and_zero_is_one(runner: Runner, alone: Answer) -> None:
    with Engine(runner, limits(runner)) as engine:
        answers = [engine.serve(drawn(f"{n}", seed)).tokens for n, seed in enumerate((0, 0, 1, 42))]
    assert answers[0] == answers[1]
    assert answers[3] == alone.tokens
    assert len({tuple(tokens) for tokens in answers}) == 3

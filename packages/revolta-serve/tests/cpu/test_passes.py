"""More slices than a model pass takes become several passes, and nobody notices."""

from dataclasses import replace

import pytest

from revolta_serve.cache.capacity import capacity
from revolta_serve.config import ModelSource, ServeConfig
from revolta_serve.engine.core import EngineCore, limits
from revolta_serve.engine.worker import local
from revolta_serve.model.model_config import ModelConfig
from revolta_serve.runner import passes
from revolta_serve.runner.runner import Runner
from revolta_serve.scheduler.scheduler import Scheduler
from revolta_serve.types import GenerateRequest, SamplingParams, Slice
from revolta_serve.weights.tiny import make_tiny

REQUESTS = 72
ANSWER = 14


@pytest.fixture(scope="module")
def core(tmp_path_factory):
    directory = tmp_path_factory.mktemp("crowded")
    make_tiny(directory, layers=2, seed=11)
    config = ServeConfig(model=ModelSource(path=str(directory)))
    config = replace(config, schedule=replace(config.schedule, max_num_seqs=REQUESTS, max_num_batched_tokens=8192, max_model_len=128))
    model = ModelConfig.load(directory)
    config = config.resolve(model)
    runner = Runner.load(config, 0)
    return EngineCore(Scheduler(limits(config, model, capacity(config, model))), [local(runner)])


def request(number, name="crowd"):
    prompt = tuple((number * 31 + place * 7) % 97 for place in range(65 + number % 5))
    sampling = SamplingParams(temperature=1.0 if number % 2 else 0.0, seed=number)
    return GenerateRequest(id=f"{name}-{number}", prompt=prompt, max_tokens=ANSWER, sampling=sampling, cache_salt=name)


def run(core, *requests, interrupt=0):
    core.submit(*requests)
    answers: dict[str, list[int]] = {}
    rows = []
    while core.has_work:
        for output in core.step():
            assert output.error is None, output.error
            answers.setdefault(output.id, []).extend(output.tokens)
        rows.append((core.cost.decode_rows, core.cost.prefill_rows))
        if len(rows) == interrupt:
            core.scheduler.preempt_all()
    return answers, rows


def test_a_crowd_answers_as_each_does_alone(core):
    answers, rows = run(core, *(request(number) for number in range(REQUESTS)), interrupt=10)
    assert rows[0][1] > 64 * REQUESTS, "all prompts share the first step, in more rows with padding than a pass has"
    assert max(decode for decode, _ in rows[:10]) == REQUESTS > passes.MOST_DECODE_ROWS
    assert max(decode for decode, _ in rows[10:]) > REQUESTS, "answers are replayed several rows at a time"
    for number in (0, 1, 35, REQUESTS - 1):
        alone, _ = run(core, request(number, "alone"))
        assert answers[f"crowd-{number}"] == alone[f"alone-{number}"]


def piece(tokens):
    return Slice(request=0, kind="prefill", slot=0, start=0, tokens=(0,) * tokens, before=())


@pytest.mark.parametrize(
    ("counts", "grouped"),
    [
        ([8192], [1]),
        ([8192, 1], [1, 1]),
        ([8128, 64], [2]),
        ([8129, 64], [1, 1]),
        ([1] * 65, [64, 1]),
        ([], []),
    ],
)
def test_prompts_fill_a_pass(counts, grouped):
    assert [len(group) for group in passes.prompts([piece(count) for count in counts])] == grouped


def test_answers_fill_a_pass():
    assert [len(group) for group in passes.singles([piece(1)] * 130)] == [64, 64, 2]
    assert [len(group) for group in passes.several([piece(2)] * 9)] == [8, 1]

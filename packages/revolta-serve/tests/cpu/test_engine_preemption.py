"""Requests without a limit on a real model, in blocks that hold only one of them at its longest: some give way, and nothing changes."""

from dataclasses import replace

import pytest

from revolta_serve.config import CacheConfig, ModelSource, ScheduleConfig, ServeConfig
from revolta_serve.runner.runner import Runner
from revolta_serve.scheduler.scheduler import Scheduler
from revolta_serve.weights.tiny import make_tiny
from support.serving import limits, request, serve

LENGTH = 256
"""max_model_len: four blocks."""
BLOCKS = 7
"""One request of that length and a block for each of three others."""


@pytest.fixture(scope="module")
def runner(tmp_path_factory):
    directory = tmp_path_factory.mktemp("tiny")
    model = make_tiny(directory, seed=5, layers=4, budget=16)
    config = ServeConfig(
        model=ModelSource(path=str(directory)), cache=CacheConfig(num_blocks=BLOCKS), schedule=ScheduleConfig(max_model_len=LENGTH)
    )
    return Runner.load(config.resolve(model), 0)


def test_four_requests_without_a_limit_give_way_and_say_what_they_say_alone(runner):
    requests = [request(str(n), [9 + n] * (5 + 4 * n), LENGTH, temperature=0.8 * (n % 2), seed=n) for n in range(4)]
    rules = replace(limits(runner), max_model_len=LENGTH)
    scheduler = Scheduler(rules)
    together = serve(runner, scheduler, requests)
    status = scheduler.status
    assert sum(step.decode_rows == 4 for step in together.steps) >= 64 - max(len(one.prompt) for one in requests)
    assert status.preemptions >= 2
    assert status.replayed_tokens > 0
    assert status.blocks_used == status.slots_used == 0
    for one in requests:
        alone = serve(runner, Scheduler(rules), [one])
        assert together.tokens[one.id] == alone.tokens[one.id]
        assert len(one.prompt) + len(alone.tokens[one.id]) == LENGTH

"""The law, bitwise: random requests under every kind of disturbance give the logits that each gives alone and cold in one slice."""

import statistics
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import pytest

from revolta_serve.model.model_config import GRID
from revolta_serve.runner.runner import Runner
from revolta_serve.weights.tiny import make_tiny
from support.law import SHAPE, load
from support.law_cases import LONGEST, Case, Outcome, Setting, experiment, measured

SMALLEST = LONGEST // GRID
FEW, MANY, SEED = 32, 300, 2

SETTINGS = [
    Setting(name="alone, 64", seqs=1, rows=64, aborts=0.1, events={"prefix_hits": 15_000}),
    Setting(name="alone, 128, smallest pools", seqs=1, rows=128, blocks=SMALLEST, slots=1, order=1, events={"blocks_evicted": 500}),
    Setting(
        name="alone, 1664, small pools", seqs=1, rows=1664, blocks=100, slots=10, order=-1, aborts=0.1,
        events={"prefix_hits": 1_000, "blocks_evicted": 500, "snapshots_evicted": 50},
    ),
    Setting(name="alone, 8192", seqs=1, rows=8192, order=2, events={"prefix_hits": 15_000}),
    Setting(
        name="8, 64, smallest pools", seqs=8, rows=64, blocks=SMALLEST, slots=8, order=3, aborts=0.1,
        events={"preemptions": 5, "blocks_evicted": 500, "snapshots_evicted": 50},
    ),
    Setting(
        name="8, 128, small pools", seqs=8, rows=128, blocks=SMALLEST, slots=12, pace=0.5, limits={"prefill_cap": 512},
        events={"preemptions": 10, "prefix_hits": 1_000, "replayed_tokens": 50},
    ),
    Setting(
        name="8, 64, interrupted", seqs=8, rows=64, blocks=48, slots=10, order=4, aborts=0.1, interrupts=0.02, resets=0.5,
        limits={"prefill_cap": 256},
        events={"preemptions": 100, "preemptions_in_prefill": 20, "prefix_hits": 1_000, "replayed_tokens": 1_000},
    ),
    Setting(
        name="8, 128, squeezed", seqs=8, rows=128, blocks=80, slots=24, pace=0.2, interrupts=0.04, squeezes=0.5,
        limits={"policy": "priority", "prefill_cap": 512},
        events={"preemptions": 100, "preemptions_in_prefill": 5, "rolling_lost": 20, "replayed_tokens": 1_000},
    ),
    Setting(
        name="8, 1664, by priority", seqs=8, rows=1664, blocks=64, slots=24, order=-1, interrupts=0.002, resets=0.5,
        limits={"policy": "priority"},
        events={"preemptions": 20, "prefix_hits": 2_000},
    ),
    Setting(name="8, 8192", seqs=8, rows=8192, order=5, aborts=0.1, events={"prefix_hits": 10_000, "blocks_deduplicated": 1}),
    Setting(
        name="8, 128, answers reused", seqs=8, rows=128, pace=0.15, interrupts=0.002, resets=0.5,
        limits={"generated": True, "max_num_batched_tokens": 136},
        events={"generated_hits": 5, "prefix_hits": 10_000},
    ),
]  # fmt: skip

EVENTS = {
    "preemptions": 20, "preemptions_in_prefill": 5, "rolling_lost": 5, "prefix_hits": 10_000, "replayed_tokens": 100, "blocks_evicted": 100,
    "snapshots_evicted": 100, "snapshots_skipped": 20, "blocks_deduplicated": 20, "generated_hits": 1,
}  # fmt: skip
"""What must happen in all settings together, even with few requests."""


class Trial:
    """A number of requests, and what became of them under each setting. Everything is computed once."""

    def __init__(self, runner: Runner, count: int) -> None:
        self.runner = runner
        self.cases: Sequence[Case] = measured(runner, count, seed=SEED)
        self.outcome = cache(lambda number: experiment(runner, self.cases, SETTINGS[number]))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory: Path = tmp_path_factory.mktemp("law")
    make_tiny(directory, **SHAPE)
    return directory


@pytest.fixture(
    scope="module",
    params=[
        (FEW, "float32"),
        pytest.param((MANY, "float32"), marks=pytest.mark.full),
        pytest.param((FEW, "float16"), marks=pytest.mark.full),
    ],
    ids=lambda param: f"{param[0]} in {param[1]}",
)
def trial(request: pytest.FixtureRequest, checkpoint: Path) -> Trial:
    count, dtype = request.param
    return Trial(load(checkpoint, LONGEST, dtype=dtype), count)


def test_the_requests_are_worth_the_name(trial: Trial) -> None:
    lengths = [case.length for case in trial.cases]
    assert statistics.median(lengths) >= 200 > 2 * trial.runner.model.config.dense_positions, "most prompts are beyond the indexer's budget"
    assert sum(length >= 2000 for length in lengths) >= len(lengths) // 15
    assert sum(length > GRID for length in lengths) >= len(lengths) / 2
    assert sum(case.crosses_in_decode for case in trial.cases) >= len(lengths) / 2
    sampling = [case.request.sampling for case in trial.cases]
    for part in (
        [params for params in sampling if params.temperature == 0],
        [params for params in sampling if params.temperature > 0],
        [params for params in sampling if params.needs_history],
        [case for case in trial.cases if case.answer.logprobs],
        [case for case in trial.cases if case.answer.prompt_logprobs],
    ):
        assert len(part) >= len(lengths) // 40


@pytest.mark.parametrize("number", range(len(SETTINGS)), ids=lambda number: SETTINGS[number].name)
def test_logits_are_those_of_the_request_alone(trial: Trial, number: int) -> None:
    outcome = trial.outcome(number)
    setting, status = outcome.setting, outcome.status
    assert not outcome.differences, str(outcome)
    assert setting.seqs // 2 < outcome.widest <= setting.seqs
    assert outcome.rows["prefill"] == status.prompt_tokens == sum(answer.computed for answer in outcome.answers.values())
    assert (outcome.tolerated > 0) == (status.generated_hits > 0) == bool(setting.limits.get("generated"))
    ended = [answer.finish for answer in outcome.answers.values()]
    assert ended.count("abort") == len(ended) - ended.count("length") == round(setting.aborts * len(ended))
    if len(trial.cases) == MANY:
        assert outcome.widest == setting.seqs
        assert missing(status, setting.events) == {}


@pytest.mark.parametrize("number", range(len(SETTINGS)), ids=lambda number: SETTINGS[number].name)
def test_prompts_are_cut_as_the_setting_says(trial: Trial, number: int) -> None:
    outcome = trial.outcome(number)
    size, wanted, longest = outcome.setting.rows, 0, 0
    for case in trial.cases:
        answer = outcome.answers[case.request.id]
        # One that has the engine for itself may take a whole step.
        cuts = [cut for cut in answer.cuts if cut.others or outcome.setting.seqs == 1]
        for cut in cuts:
            assert cut.start % GRID == 0
            assert cut.rows % GRID == 0 or cut.start + cut.rows == case.length
            assert cut.rows <= size
        longest = max([longest, *(cut.rows for cut in cuts)])
        if answer.record is None or answer.finish == "abort" or answer.record.preemptions or len(cuts) < len(answer.cuts):
            continue
        rows = case.length - answer.cached
        wanted = max(wanted, rows)
        assert (answer.computed, answer.record.slices) == (rows, len(cuts))
        fewest, most = -(-rows // size), -(-rows // GRID)
        assert len(cuts) == fewest if outcome.setting.seqs == 1 else fewest <= len(cuts) <= most
    assert longest >= min(size, wanted), "some slice is as long as it may be"


def test_everything_happens_that_could_disturb(trial: Trial) -> None:
    outcomes: list[Outcome] = [trial.outcome(number) for number in range(len(SETTINGS))]
    totals = {name: sum(getattr(outcome.status, name) for outcome in outcomes) for name in EVENTS}
    assert {name: count for name, count in totals.items() if count < EVENTS[name]} == {}
    assert sum(answer.verify_rows for outcome in outcomes for answer in outcome.answers.values()) > 50
    starts = [start for outcome in outcomes for answer in outcome.answers.values() for start in answer.starts]
    assert any(start.kind == "decode" for start in starts), "somebody came back in the middle of an answer"


def missing(status: object, events: dict[str, int]) -> dict[str, int]:
    """Counts of a status that are below what they must be."""
    counts = {name: getattr(status, name) for name in events}
    return {name: count for name, count in counts.items() if count < events[name]}

"""Hits over generated text: the answer is not that of a cold start bit for bit, but as near as two orders of the same sums.

Conversations are held with reuse of generated text. Each of their prompts is then computed cold, and every prompt row that both have
computed is compared: the log-probability of the token that follows, the experts it chose, the index blocks it attended to.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from revolta_serve.model import moe, qsa
from revolta_serve.model.batch import Batch
from revolta_serve.model.flash_next import Hidden
from revolta_serve.model.pools import Pools
from revolta_serve.runner.runner import Runner
from revolta_serve.types import GenerateRequest, StepPlan, StepResult
from revolta_serve.weights.tiny import make_tiny
from support.law import SHAPE, Engine, Talk, ids, limits, load

NEAR = 1e-4
"""Natural-log difference that counts as none."""


@dataclass(frozen=True, slots=True)
class Row:
    """What one prompt row gave."""

    logprobs: Tensor
    """f32[V]"""
    experts: tuple[frozenset[int], ...]
    """Of each layer."""
    attended: tuple[frozenset[int], ...]
    """Index blocks, of each sparse attention layer; empty where the pass had no row that chooses."""


@dataclass(slots=True)
class Measure:
    """Sums over all compared rows."""

    rows: int = 0
    near: int = 0
    largest: float = 0.0
    equal: int = 0
    experts: int = 0
    flipped_experts: int = 0
    blocks: int = 0
    flipped_blocks: int = 0

    def add(self, warm: Row, cold: Row, following: int) -> None:
        difference = float((warm.logprobs[following] - cold.logprobs[following]).abs())
        self.rows += 1
        self.near += difference <= NEAR
        self.largest = max(self.largest, difference)
        self.equal += torch.equal(warm.logprobs, cold.logprobs)
        self.experts += sum(map(len, cold.experts))
        self.flipped_experts += _flips(warm.experts, cold.experts)
        self.blocks += sum(map(len, cold.attended))
        self.flipped_blocks += _flips(warm.attended, cold.attended)


def _flips(some: tuple[frozenset[int], ...], others: tuple[frozenset[int], ...]) -> int:
    return sum(len(other - one) for one, other in zip(some, others, strict=True))


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> Runner:
    directory: Path = tmp_path_factory.mktemp("tolerance")
    make_tiny(directory, **SHAPE)
    return load(directory, 4096)


@contextmanager
def watching(runner: Runner) -> Iterator[dict[int, Row]]:
    """What every prompt row gives, by position, while one request is served at a time."""
    rows: dict[int, Row] = {}
    routed: list[Tensor] = []
    selected: list[Tensor] = []
    forward, ratio = runner.model.forward, runner.model.config.index_ratio

    def route(*arguments: Any) -> tuple[Tensor, Tensor]:
        ids, weights = original_route(*arguments)
        routed.append(ids)
        return ids, weights

    def select(*arguments: Any) -> Tensor:
        chosen: Tensor = original_select(*arguments)
        selected.append(chosen)
        return chosen

    def passed(batch: Batch, pools: Pools, *rest: Any) -> Hidden:
        routed.clear()
        selected.clear()
        hidden = forward(batch, pools, *rest)
        if batch.kind == "prefill":
            logprobs = runner.model.logits(hidden.mixed).log_softmax(1)
            for row, position in enumerate(batch.position.tolist()):
                if position >= 0:
                    experts = tuple(frozenset(ids[row].tolist()) for ids in routed)
                    attended = tuple(frozenset((sel[row][sel[row] >= 0] // ratio).tolist()) for sel in selected)
                    rows[position] = Row(logprobs[row], experts, attended)
        return hidden

    original_route, original_select = moe.moe_route, qsa.qsa_select
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(moe, "moe_route", route)
        patch.setattr(qsa, "qsa_select", select)
        patch.setattr(runner.model, "forward", passed)
        yield rows


def measure(runner: Runner, talks: int, turns: int, spoil: Callable[[Pools, int], None] | None = None) -> Measure:
    """Hold conversations warm and compare each of their prompts with a cold start. `spoil` changes every snapshot before its use."""
    result, warm, step = Measure(), list[tuple[GenerateRequest, dict[int, Row]]](), runner.step

    def spoiled(plan: StepPlan) -> StepResult:
        for piece in plan.slices:
            if spoil and piece.restore >= 0:
                spoil(runner.pools, piece.restore)
        return step(plan)

    with watching(runner) as rows, pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner, "step", spoiled)
        with Engine(runner, limits(runner)) as engine:
            for number in range(talks):
                talk = Talk(engine, f"talk {number}", ids(number, 40 * number))
                for turn in range(turns):
                    rows.clear()
                    one, answer = talk.turn(150, 90)
                    assert sorted(rows) == list(range(answer.cached, len(one.prompt)))
                    if turn:
                        warm.append((one, dict(rows)))
            assert engine.scheduler.status.generated_hits == len(warm) == talks * (turns - 1)
        for one, mine in warm:
            rows.clear()
            with Engine(runner, limits(runner, prefix=False)) as engine:
                engine.serve(one)
            for position, row in mine.items():
                if position + 1 < len(one.prompt):
                    result.add(row, rows[position], one.prompt[position + 1])
    return result


def check(found: Measure, rows: int) -> None:
    assert found.rows >= rows
    assert found.equal < found.rows / 100, f"another form has other bits: {found}"
    assert found.near >= 0.99 * found.rows, f"{found}"
    assert found.experts > found.rows
    assert found.flipped_experts <= 0.01 * found.experts, f"{found}"
    assert found.blocks > found.rows
    assert found.flipped_blocks <= 0.01 * found.blocks, f"{found}"


def test_reused_answers_are_near(runner: Runner) -> None:
    check(measure(runner, 2, 3), 500)


@pytest.mark.full
@pytest.mark.parametrize("shape", [SHAPE, {"layers": 8, "seed": 4}], ids=["small", "default"])
def test_reused_answers_are_near_in_thousands_of_rows(tmp_path: Path, shape: dict[str, Any]) -> None:
    make_tiny(tmp_path, **shape)
    check(measure(load(tmp_path, 4096), 5, 7), 5000)


def forget_convolution(pools: Pools, slot: int) -> None:
    pools.conv[:, slot] = 0


def forget_state(pools: Pools, slot: int) -> None:
    pools.gdn[:, slot] = 0


def forget_ngrams(pools: Pools, slot: int) -> None:
    pools.ple[:, slot] = 0


@pytest.mark.parametrize("spoil", [forget_convolution, forget_state, forget_ngrams])
def test_a_forgotten_state_is_not_near(runner: Runner, spoil: Callable[[Pools, int], None]) -> None:
    """A test of the tests above: one kind of state that is not restored is far outside the tolerance."""
    found = measure(runner, 1, 3, spoil)
    assert found.near < 0.95 * found.rows, f"{found}"

"""Prefix hits: what is reused is not computed, everything that is restored counts, and the answer is that of a cold start bit for bit."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from torch import Tensor

from revolta_serve.model.model_config import GRID
from revolta_serve.model.pools import Pools
from revolta_serve.runner.runner import Runner
from revolta_serve.types import GenerateRequest, SamplingParams, Slice, StepPlan, StepResult
from revolta_serve.weights.tiny import make_tiny
from support.law import SHAPE, Answer, Engine, Talk, compare, ids, limits, load, request

CHUNK = 256
STEP = 6144
"""Rows of one slice where nothing cuts it."""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory: Path = tmp_path_factory.mktemp("hits")
    make_tiny(directory, **SHAPE)
    return directory


@pytest.fixture(scope="module")
def runner(checkpoint: Path) -> Runner:
    return load(checkpoint, STEP)


def serving(runner: Runner, rows: int = STEP, **changes: Any) -> Engine:
    """An engine whose prompt slices have at most `rows` rows."""
    return Engine(runner, limits(runner, **{"max_num_batched_tokens": rows + 8, "prefill_cap": rows, "long_prefill": rows, **changes}))


def cold(runner: Runner, one: GenerateRequest) -> Answer:
    """The request alone, with nothing to reuse, its prompt in one slice if a step can hold it."""
    with serving(runner, STEP, prefix=False) as engine:
        answer = engine.serve(one)
    assert (answer.cached, answer.computed, len(answer.cuts)) == (0, len(one.prompt), -(-len(one.prompt) // STEP))
    return answer


def same(runner: Runner, one: GenerateRequest, answer: Answer) -> bool:
    """Whether a whole answer has the bits of a cold start. Not while another engine is open: each has the pools for itself."""
    assert answer.finish == "length"
    return compare(one.id, cold(runner, one), answer, len(one.prompt)) is None


@pytest.mark.parametrize("length", [65, 300, 1000])
def test_rows_that_are_reused_are_not_computed(runner: Runner, length: int) -> None:
    with serving(runner, CHUNK) as engine:
        engine.serve(request("first", ids(1, length), 20))
        assert engine.rows["prefill"] == length
        again = engine.serve(request("again", ids(1, length), 20))
        assert again.cached == (length - 1) // GRID * GRID > 0
        assert engine.rows["prefill"] == 2 * length - again.cached == engine.scheduler.status.prompt_tokens
        assert engine.rows["decode"] == 2 * 19
    assert same(runner, request("again", ids(1, length), 20), again)


@pytest.mark.parametrize("length", [1, 2, 3, 63, 64, 65, 128, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK + 3])
def test_warm_is_cold_at_every_edge(runner: Runner, length: int) -> None:
    params = SamplingParams(temperature=0.0, logprobs=5)
    asked = [request(f"{n}", ids(length, length) + ids(extra, extra), 5, sampling=params) for n, extra in enumerate((0, 0, 1, 2, 3))]
    with serving(runner, CHUNK) as engine:
        answers = [engine.serve(one) for one in asked]
    assert [answer.cached for answer in answers] == [0, (length - 1) // GRID * GRID, *[length // GRID * GRID] * 3]
    for one, answer in zip(asked, answers, strict=True):
        assert same(runner, one, answer)
        assert [len(entry.top) for entry in answer.logprobs] == [5] * 5


@pytest.mark.parametrize("rows", [64, STEP])
@pytest.mark.parametrize("length", [150, 257, 448, 600])
def test_nothing_of_a_prefix_is_forgotten(runner: Runner, length: int, rows: int) -> None:
    """With sparse attention active, and marks of the n-gram segments on both sides of the place where the hit ends."""
    prompt, mark = ids(length, length), runner.model.config.eos
    end = length // GRID * GRID
    prompt[end - 2] = prompt[min(end, length - 1)] = mark
    assert end > runner.model.config.dense_positions
    asked = [request(f"{n}", prompt + tail, 40) for n, tail in enumerate(([], ids(3, 30), ids(4, 70), [mark, *ids(5, 20)]))]
    with serving(runner, rows) as engine:
        answers = [engine.serve(one) for one in asked]
    assert [answer.cached for answer in answers] == [0, end, end, end]
    assert all(same(runner, one, answer) for one, answer in zip(asked, answers, strict=True))


# What a hit restores, one by one.

Tamper = Callable[[Pools, Slice, Tensor, Tensor], None]
"""Changes pools, given the resuming slice, the ids of its blocks and the ids of all others."""


def noise(plane: Tensor, places: Tensor | list[int], layer: int | None = None) -> None:
    """Overwrite these blocks or slots of a plane [layers, ids, ...], of one layer or of all."""
    for at in range(len(plane)) if layer is None else [layer]:
        plane[at, places] = torch.randn(plane[at, places].shape, generator=torch.Generator().manual_seed(at))


def blocks(name: str, pools: Pools, piece: Slice, held: Tensor, others: Tensor) -> None:
    noise(getattr(pools, name), held)


def state(name: str, layer: int, pools: Pools, piece: Slice, held: Tensor, others: Tensor) -> None:
    noise(getattr(pools, name), [piece.slot], layer)


def ring(pools: Pools, piece: Slice, held: Tensor, others: Tensor) -> None:
    noise(pools.ring, [piece.slot])


def elsewhere(pools: Pools, piece: Slice, held: Tensor, others: Tensor) -> None:
    for plane in (pools.k, pools.v, pools.keys):
        noise(plane, others)
    slots = [slot for slot in range(pools.gdn.shape[1]) if slot != piece.slot]
    for plane in (pools.gdn, pools.conv, pools.ple, pools.ring):
        noise(plane, slots)


RESTORED: dict[str, Tamper] = {
    **{name: partial(blocks, name) for name in ("k", "v", "keys")},
    **{f"{name} of layer {layer}": partial(state, name, layer) for name in ("gdn", "conv") for layer in (0, 1)},
    "ple": partial(state, "ple", 0),
}


def resumed(runner: Runner, patch: pytest.MonkeyPatch, tamper: Tamper | None = None, before: tuple[int, ...] = ()) -> Answer:
    """The answer of a prompt that resumes at 256 of 300 tokens; right after the restore, `tamper` has its way.

    before: ids to tell the runner instead of those that precede the slice.
    """
    step, forward = runner.step, runner.model.forward
    with serving(runner) as engine:
        engine.serve(request("first", ids(1, 300)))
        engine.add(request("second", ids(1, 300), 4))

        def stepped(plan: StepPlan) -> StepResult:
            piece = plan.slices[0]
            if piece.restore < 0:
                return step(plan)
            assert (piece.start, len(piece.blocks)) == (256, 5)

            def passed(batch: Any, pools: Pools, *rest: Any) -> Any:
                patch.setattr(runner.model, "forward", forward)
                held = torch.tensor(piece.blocks[:4])
                others = torch.tensor([block for block in range(pools.k.shape[1]) if block not in piece.blocks])
                if tamper:
                    tamper(pools, piece, held, others)
                return forward(batch, pools, *rest)

            patch.setattr(runner.model, "forward", passed)
            return step(replace(plan, slices=(replace(piece, before=before or piece.before),)))

        patch.setattr(runner, "step", stepped)
        engine.run()
        patch.setattr(runner, "step", step)
        answer = engine.answers["second"]
    assert all(torch.isfinite(judged).all() for judged in answer.logits.values())
    return answer


@pytest.mark.parametrize("kind", RESTORED)
def test_every_kind_of_state_is_restored(runner: Runner, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """Overwriting any one of them right after the restore changes the very first logits: each is read, so each must be right."""
    changed = resumed(runner, monkeypatch, RESTORED[kind])
    assert not torch.equal(changed.logits[300], resumed(runner, monkeypatch).logits[300])


@pytest.mark.parametrize("place", [0, 1])
def test_the_ids_before_a_hit_count(runner: Runner, monkeypatch: pytest.MonkeyPatch, place: int) -> None:
    true = tuple(reversed(ids(1, 256)[-2:]))
    changed = resumed(runner, monkeypatch, before=tuple((id + 1) % 300 if at == place else id for at, id in enumerate(true)))
    assert not torch.equal(changed.logits[300], resumed(runner, monkeypatch, before=true).logits[300])


@pytest.mark.parametrize("tamper", [ring, elsewhere])
def test_nothing_else_matters_to_a_hit(runner: Runner, monkeypatch: pytest.MonkeyPatch, tamper: Tamper) -> None:
    """Neither the ring of raw index keys, which is empty on the grid, nor any block or slot of somebody else, the snapshot's included."""
    one = request("second", ids(1, 300), 4)
    assert same(runner, one, resumed(runner, monkeypatch))
    assert same(runner, one, resumed(runner, monkeypatch, tamper))


# Who finds what.


@pytest.mark.parametrize("at_once", [False, True])
def test_a_shared_system_text_is_computed_once(runner: Runner, at_once: bool) -> None:
    system = ids(0, 2000)
    users = [request(f"user{n}", system + ids(100 + n, 50), 8, boundaries=(2000,)) for n in range(10)]
    with serving(runner, 512) as engine:
        if at_once:
            engine.add(*users)
        for one in users:
            if not at_once:
                engine.add(one)
                engine.run()
        engine.run()
        answers = [engine.answers[one.id] for one in users]
        assert [answer.cached for answer in answers] == [0] + 9 * [2000 // GRID * GRID]
        assert engine.rows["prefill"] == 2050 + 9 * (2050 - 2000 // GRID * GRID)
        status = engine.scheduler.status
        assert (status.prefix_queries, status.prefix_hits) == (10 * 2050, 9 * 1984)
        assert status.misses["cold"] == 1
    assert all(same(runner, one, answer) for one, answer in zip(users[-2:], answers[-2:], strict=True))


def test_a_shared_text_that_nobody_announced_is_found_by_the_second_and_reused_by_the_third(runner: Runner) -> None:
    with serving(runner) as engine:
        answers = [engine.serve(request(f"{n}", ids(0, 1000) + ids(n + 1, 50))) for n in range(3)]
        assert [answer.cached for answer in answers] == [0, 0, 960]
        assert answers[1].record is not None
        assert answers[1].record.miss == "no_snapshot"


@pytest.mark.parametrize("generated", [True, False])
def test_a_parent_and_its_children_do_not_evict_each_other(runner: Runner, generated: bool) -> None:
    """In a state pool with room for the states of one running request, three tips and one more."""
    system, turns = ids(0, 640), []
    with serving(runner, num_slots=2 + 3 + 1, max_num_seqs=1, generated=generated) as engine:
        talks = {name: Talk(engine, name, system) for name in "PAB"}
        lengths = {"P": 300, "A": 1000, "B": 1000}
        for name in "PABABP":
            talk = talks[name]
            known = len(talk.said) if talk.turns else len(system)
            one, answer = talk.turn(50 if talk.turns else lengths[name])
            if name != "P" or talk.turns > 1:
                assert answer.cached >= known - 20 - 2 * GRID, f"turn {talk.turns} of {name} is not warm: {answer.record}"
            turns.append((one, answer))
    assert generated or all(same(runner, one, answer) for one, answer in turns)


def test_a_long_talk_leaves_an_older_one_alone(runner: Runner) -> None:
    with serving(runner, num_slots=6, max_num_seqs=1) as engine:
        older, linear = Talk(engine, "older", ids(1, 700)), Talk(engine, "linear", ids(2, 300))
        older.turn(20)
        for number in range(20):
            before = len(linear.said)
            _, answer = linear.turn(100)
            assert number == 0 or answer.cached >= before - 2 * GRID
        known = len(older.said)
        _, answer = older.turn(30)
        assert answer.cached >= known - 20 - GRID, f"{answer.record}"
        assert engine.scheduler.status.snapshots_evicted >= 20 - 6


def talk_for_long(runner: Runner, tokens: int, generated: bool) -> None:
    """20 turns of one conversation of `tokens` tokens: each computes what is new and at most two blocks."""
    with serving(runner, 2048, generated=generated) as engine:
        talk = Talk(engine, "long", [])
        last = 0
        for number in range(20):
            one, answer = talk.turn(tokens // 20 - 30, 30)
            assert number == 0 or answer.computed < 2 * GRID + len(one.prompt) - last
            assert answer.computed == len(one.prompt) - answer.cached
            last = len(one.prompt)
        assert len(talk.said) == tokens // 20 * 20
        assert engine.rows["prefill"] < tokens + 20 * 2 * GRID
        assert (engine.scheduler.status.generated_hits > 0) == generated
    assert generated or same(runner, one, answer)


@pytest.mark.parametrize("generated", [True, False])
def test_a_conversation_stays_warm(runner: Runner, generated: bool) -> None:
    talk_for_long(runner, 5000, generated)


@pytest.mark.full
@pytest.mark.parametrize("generated", [True, False])
def test_a_long_conversation_stays_warm(checkpoint: Path, generated: bool) -> None:
    talk_for_long(load(checkpoint, 51_200, max_num_seqs=1), 50_000, generated)


@pytest.mark.parametrize("slices", [1, 5])
def test_an_aborted_prompt_is_not_lost(runner: Runner, slices: int) -> None:
    one = request("again", ids(1, 1000), 5)
    with serving(runner, 64) as engine:
        engine.add(replace(one, id="aborted"), request("other", ids(2, 500)))
        while len(engine.answers["aborted"].cuts) < slices:
            engine.step()
        engine.abort("aborted")
        engine.run()
        answer = engine.serve(one)
        assert answer.cached == slices * 64
    assert same(runner, one, answer)


def test_an_aborted_answer_is_not_lost(runner: Runner) -> None:
    with serving(runner) as engine:
        one = request("aborted", ids(1, 300), 500)
        engine.add(one)
        while len(engine.answers["aborted"].tokens) < 150:
            engine.step()
        engine.abort("aborted")
        said = engine.answers["aborted"].tokens
        assert engine.serve(request("again", ids(1, 300) + said + ids(2, 9))).cached == 448


def test_only_the_same_salt_shares(runner: Runner) -> None:
    asked = [request(f"{n}", ids(1, 200), 5, cache_salt=salt) for n, salt in enumerate(("", "a", "b", "a", ""))]
    with serving(runner) as engine:
        answers = [engine.serve(one) for one in asked]
    assert [answer.cached for answer in answers] == [0, 0, 0, 192, 192]
    assert all(same(runner, one, answer) for one, answer in zip(asked, answers, strict=True))


def test_prompt_logprobs_are_computed_and_not_reused(runner: Runner) -> None:
    asked = request("asked", ids(1, 200), 5, sampling=SamplingParams(temperature=0.0, prompt_logprobs=2))
    with serving(runner, 64) as engine:
        engine.serve(request("first", ids(1, 200), 5))
        answer = engine.serve(asked)
        assert (answer.cached, answer.computed, len(answer.prompt_logprobs)) == (0, 200, 199)
    assert same(runner, asked, answer)


@pytest.mark.parametrize("moment", ["prompt", "answer"])
def test_who_resumed_from_an_answer_resumes_from_it_again(runner: Runner, moment: str) -> None:
    """A hit over generated text has bits of its own; a preemption keeps those too."""

    def run(preempt: bool) -> Answer:
        with serving(runner, 64, max_num_seqs=2) as engine:
            talk = Talk(engine, "talk", ids(1, 200))
            talk.turn(10, 150)
            one = request("next", talk.said + ids(2, 300), 100)
            engine.add(one)
            answer = engine.answers["next"]
            while len(answer.cuts) < 3 or (moment == "answer" and len(answer.tokens) < 80):
                engine.step()
            if preempt:
                engine.scheduler.preempt_all()
            engine.run()
            assert answer.record is not None
            assert (answer.record.seamless, answer.record.preemptions) == (False, int(preempt))
            assert len(answer.starts) == 1 + preempt
            return answer

    undisturbed, preempted = run(False), run(True)
    assert compare("next", undisturbed, preempted, 660) is None
    assert preempted.starts[-1].start > preempted.starts[0].start, "it did not begin where it had begun"

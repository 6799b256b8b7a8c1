"""Several answer rows of a request in one pass are as many passes of one row: logits, pools, snapshots, all of it bit for bit."""

import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from revolta_serve.errors import EngineError
from revolta_serve.runner.runner import Runner
from revolta_serve.types import Slice, StepPlan
from revolta_serve.weights.tiny import make_tiny
from sm70kernels.op import record
from support.drive import Request, load
from support.states import contents, differing, poison, slot_of

SHAPES: dict[str, dict[str, Any]] = {
    "ratio-4": dict(seed=3, layers=4, budget=16),
    "ratio-2": dict(seed=4, layers=4, budget=8, ratio=2, ngram=2, index_heads=12),
    "ratio-8": dict(seed=5, layers=4, budget=16, ratio=8, streams=2, ple_layers=(1, 2), ngram=4, ngram_heads=2, hidden=48, ple_dim=48),
}
SPARE = 7


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


def known(runner: Runner, number: int, prompt: int, answer: int) -> Request:
    """A request whose whole answer is known beforehand."""
    rng = random.Random(number * 1000 + prompt)
    ids = [rng.randrange(runner.model.config.vocab) for _ in range(prompt + answer)]
    one = Request(runner, number, ids)
    one.prompt = prompt
    return one


def run(one: Request, widths: Sequence[int], keep: Sequence[tuple[int, int]] = ()) -> None:
    """Compute the prompt, then rows of the answer in slices of these widths, each with the snapshots that lie in it."""
    one.prefill()
    for width in widths:
        here = [(at, slot) for at, slot in keep if one.done < at <= one.done + width]
        one.step(width, "decode", keep=here)


CUTS = ((1,) * 20, (8, 8, 4), (3, 5, 7, 5), (2,) * 10, (1, 8, 1, 8, 2))


# Where the answer begins: inside a block of tokens, where attention turns sparse, before block ends, far into the context.
@pytest.mark.parametrize("prompt", [1, 12, 57, 64, 120, 250])
def test_rows_together_are_rows_one_by_one(runner: Runner, seen: dict[int, list[Tensor]], prompt: int) -> None:
    found = []
    for widths in CUTS:
        poison(runner)
        one = known(runner, 0, prompt, 20)
        run(one, widths)
        assert one.done == prompt + 20
        found.append((contents(one), seen.pop(0), one.ids[-1]))
        one.finish()
    plain, logits, token = found[0]
    assert torch.isfinite(logits[0]).all()
    for widths, (together, judged, drawn) in zip(CUTS[1:], found[1:], strict=True):
        assert differing(together, plain) == [], widths
        assert len(logits) == len(judged) == 1, "only the end of what is known is sampled"
        assert torch.equal(logits[0], judged[0]), widths
        assert token == drawn


@pytest.mark.parametrize("start", [57, 60, 63, 121])
def test_a_snapshot_inside_the_rows(runner: Runner, start: int) -> None:
    grid = -(-start // 64) * 64
    kept = []
    for cut in ((1,) * 8, (8,)):
        poison(runner)
        one = known(runner, 0, start, 9)
        run(one, cut, [(grid, SPARE)])
        kept.append(slot_of(runner, SPARE))
        one.finish()
        until = known(runner, 1, start, grid - start)
        until.ids = one.ids[:grid]
        run(until, (1,) * (grid - start))
        kept.append(slot_of(runner, 1))
        until.finish()
    single, there, together, again = kept
    assert differing(there, again) == []
    assert differing(single, there) == []
    assert differing(together, there) == []
    assert not any(plane.isnan().any() for plane in together.values())


def test_company_is_invisible(runner: Runner, seen: dict[int, list[Tensor]]) -> None:
    """Requests of different widths, single rows and a prompt in one plan, each as if it were alone."""
    shapes = [(9, 8), (64, 3), (61, 5), (30, 1), (130, 1)]

    def prepared() -> list[Request]:
        poison(runner)
        several = [known(runner, number, prompt, answer) for number, (prompt, answer) in enumerate(shapes)]
        for one in several:
            one.prefill()
        return several

    alone = []
    for number in range(len(shapes)):
        several = prepared()
        several[number].step(shapes[number][1], "decode")
        alone.append(contents(several[number]))
        for one in several:
            one.finish()
    apart = {number: logits.pop() for number, logits in seen.items()}
    seen.clear()
    several = prepared()
    newcomer = Request(runner, 6, [3, 1, 4, 1, 5] * 20)
    pieces = [one.slice(answer, "decode") for one, (_, answer) in zip(several, shapes, strict=True)]
    result = runner.step(StepPlan(step=0, slices=(*pieces, newcomer.slice(100))))
    assert [piece.request for piece in result.slices] == [0, 1, 2, 3, 4, 6]
    assert (result.decode_rows, result.prefill_rows) == (18, 100)
    for number, one in enumerate(several):
        assert differing(contents(one), alone[number]) == [], number
        assert torch.equal(seen[number][-1], apart[number]), number
        one.finish()
    newcomer.finish()


def verify(runner: Runner, piece: Slice, accepted: int) -> None:
    """A verify pass of which only the first rows stand."""
    runner.builder.admit(piece)
    with torch.inference_mode():
        batch = runner.builder.verify([piece])
        runner.model.forward(batch, runner.pools)
        runner.model.commit(batch, torch.tensor([accepted], dtype=torch.int32), runner.pools)


@pytest.mark.parametrize("start", [12, 60])
def test_rows_that_do_not_stand_leave_no_trace(runner: Runner, seen: dict[int, list[Tensor]], start: int) -> None:
    """After a pass whose last rows are rejected the request goes on as if they had never been computed."""
    keep = [(64, SPARE)] if start == 60 else []
    poison(runner)
    one = known(runner, 0, start, 24)
    run(one, (1,) * 24, keep)
    plain, kept, (logits,) = contents(one), slot_of(runner, SPARE), seen.pop(0)
    one.finish()
    for accepted in (0, 1, 3, 4, 7, 8):
        poison(runner)
        one = known(runner, 0, start, 24)
        one.prefill()
        one.ids, right = one.ids[: start + accepted] + [5] * (24 - accepted), one.ids
        verify(runner, one.slice(8, "decode", keep=keep), accepted)
        stored = slot_of(runner, SPARE)
        one.ids, one.done = right, start + accepted
        one.replay(1)
        assert one.done == start + 24
        assert differing(contents(one), plain) == [], accepted
        assert torch.equal(seen.pop(0)[-1], logits), accepted
        if keep and accepted >= 4:
            assert differing(stored, kept) == [], accepted
        else:
            assert all(plane.isnan().all() for plane in stored.values()), "a snapshot of rejected rows is not kept"
        one.finish()


def test_a_pass_that_advanced_its_states_has_nothing_to_commit(runner: Runner) -> None:
    one = known(runner, 0, 5, 2)
    one.prefill()
    piece = one.slice(1, "decode")
    runner.builder.admit(piece)
    batch = runner.builder.decode([piece])
    with pytest.raises(EngineError, match="nothing to commit"):
        runner.model.commit(batch, batch.rows, runner.pools)


def test_only_what_is_sampled_reaches_the_head(runner: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    rows: list[int] = []
    head = runner.model.logits
    monkeypatch.setattr(runner.model, "logits", lambda x: rows.append(len(x)) or head(x))
    poison(runner)
    several = [known(runner, number, 70, 9) for number in range(4)]
    for one in several:
        one.prefill()
    assert rows == []
    widths = (9, 8, 9, 8)
    for one in (several[0], several[2]):
        one.step(1, "decode")
    assert rows == []
    runner.step(StepPlan(step=0, slices=tuple(one.slice(8, "decode") for one in several)))
    assert rows == [2], widths
    for one in several:
        one.finish()


def test_op_calls_do_not_grow_with_rows_or_requests(runner: Runner) -> None:
    def calls(count: int, width: int) -> list[str]:
        poison(runner)
        several = [known(runner, number, 70, width) for number in range(count)]
        for one in several:
            one.prefill()
        with record() as names:
            runner.step(StepPlan(step=0, slices=tuple(one.slice(width, "decode") for one in several)))
        for one in several:
            one.finish()
        return names

    few, many = calls(1, 2), calls(5, 8)
    assert few == many
    assert [few.count(name) for name in ("conv_replay", "gdn_replay", "ple_replay", "lm_head_logits")] == [1, 1, 1, 1]

"""The law: a request's logits do not depend on who else is in the batch, where its rows lie, or how its prompt was cut."""

import random
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from revolta_serve.errors import EngineError
from revolta_serve.runner.runner import Runner
from revolta_serve.scheduler.scheduler import Scheduler
from revolta_serve.types import GenerateRequest, StepPlan
from revolta_serve.weights.tiny import make_tiny
from sm70kernels import rows
from sm70kernels.op import record
from support.drive import Request, load
from support.serving import Trace, limits, request, serve

FILLERS = 4


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tiny")
    make_tiny(directory, seed=3, layers=4, budget=16)
    return directory


@pytest.fixture(scope="module")
def runner(checkpoint: Path) -> Runner:
    return load(checkpoint)


def random_requests(runner: Runner, count: int, seed: int) -> list[GenerateRequest]:
    rng = random.Random(seed)
    vocab = runner.model.config.vocab
    return [
        request(
            f"r{i}",
            [rng.randrange(vocab) for _ in range(rng.choice((1, 2, 7, 63, 64, 65, 90, 130, 200)))],
            rng.randrange(3, 16),
            **({} if i % 2 else {"temperature": 0.8, "top_k": 50, "top_p": 0.95, "seed": i}),
        )
        for i in range(count)
    ]


def fillers(runner: Runner) -> list[GenerateRequest]:
    return [request(f"filler{i}", [5 + i] * (3 + 40 * i), 1500) for i in range(FILLERS)]


def together(runner: Runner, measured: list[GenerateRequest]) -> Trace:
    """The measured requests among long-running ones that keep the batch full."""
    done = {one.id: one.max_tokens for one in measured}
    return serve(
        runner,
        Scheduler(limits(runner)),
        fillers(runner) + measured,
        until=lambda trace: all(len(trace.tokens[name]) == count for name, count in done.items()),
    )


def differing(runner: Runner, batched: Trace, measured: list[GenerateRequest]) -> list[str]:
    """Names of requests whose logits alone are not those in the batch, bit for bit."""
    found = []
    for one in measured:
        alone = serve(runner, Scheduler(limits(runner)), [one])
        same = len(alone.logits[one.id]) == len(batched.logits[one.id]) == one.max_tokens and all(
            torch.equal(a, b) for a, b in zip(alone.logits[one.id], batched.logits[one.id], strict=True)
        )
        if not same or alone.tokens[one.id] != batched.tokens[one.id]:
            found.append(one.id)
    return found


def test_alone_equals_batched(runner: Runner) -> None:
    measured = random_requests(runner, 100, seed=1)
    batched = together(runner, measured)
    for one in measured:
        assert len(batched.companions[one.id]) == one.max_tokens - 1
        assert all(decode_rows >= FILLERS for decode_rows in batched.companions[one.id])
    assert differing(runner, batched, measured) == []


def test_alone_equals_batched_in_half_precision(checkpoint: Path) -> None:
    half = load(checkpoint, dtype="float16")
    measured = random_requests(half, 12, seed=3)
    assert differing(half, together(half, measured), measured) == []


def test_plain_matrix_products_would_be_seen(runner: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    """A test of the test above: with torch's own linear on unpadded rows, batch mates change bits."""

    def plain(_rows: int, _n: int, _k: int) -> rows.Product:
        return rows.Product(F.linear, 1)

    monkeypatch.setattr(rows, "product", plain)
    measured = random_requests(runner, 8, seed=2)
    assert differing(runner, together(runner, measured), measured) != []


@pytest.mark.parametrize("length", [65, 128, 191, 300, 700])
def test_slices_of_any_size_give_the_same_bits(runner: Runner, length: int) -> None:
    rng = random.Random(length)
    prompt = [rng.randrange(runner.model.config.vocab) for _ in range(length)]
    seen: list[list[Tensor]] = []
    for chunk in (64, 128, 8192):
        logits: list[Tensor] = []
        runner.tap = lambda _piece, judged, into=logits: into.append(judged)
        one = Request(runner, 0, prompt)
        one.prefill(chunk)
        one.decode(8)
        one.finish()
        seen.append(logits)
    runner.tap = None
    for other in seen[1:]:
        assert all(torch.equal(a, b) for a, b in zip(seen[0], other, strict=True))


def test_block_placement_is_invisible(runner: Runner) -> None:
    prompt = [7, 3, 9] * 60
    seen = []
    for number, (slot, block) in enumerate(((0, 0), (5, 77), (2, 13))):
        logits: list[Tensor] = []
        runner.tap = lambda _piece, judged, into=logits: into.append(judged)
        one = Request(runner, number, prompt, slot=slot, first_block=block)
        one.prefill(64)
        one.decode(5)
        one.finish()
        seen.append(logits)
    runner.tap = None
    assert all(torch.equal(a, b) for other in seen[1:] for a, b in zip(seen[0], other, strict=True))


def test_op_calls_per_step_do_not_grow_with_rows(runner: Runner) -> None:
    def calls(count: int) -> list[str]:
        several = [Request(runner, n, [n + 1] * 70) for n in range(count)]
        for one in several:
            one.prefill()
        with record() as names:
            runner.step(StepPlan(step=0, slices=tuple(one.slice(1, "decode") for one in several)))
        with record() as prefill_names:
            fresh = [Request(runner, 10 + n, [n + 1] * 70, slot=8 + n, first_block=128 + 2 * n) for n in range(count)]
            runner.step(StepPlan(step=0, slices=tuple(one.slice(70) for one in fresh), forget=tuple(range(count))))
        runner.step(StepPlan(step=0, slices=(), forget=tuple(range(10, 10 + count))))
        return names + prefill_names

    one, many = calls(1), calls(4)
    assert one == many
    assert len(one) > 50


def test_a_number_in_use_is_not_taken_for_a_new_request(runner: Runner) -> None:
    first = Request(runner, 0, [1, 2, 3])
    first.prefill()
    with pytest.raises(EngineError, match="request number 0"):
        Request(runner, 0, [4, 5]).prefill()
    first.finish()

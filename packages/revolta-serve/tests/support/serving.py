"""Scheduler and runner in one loop, without processes: what a test needs to see every step."""

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from torch import Tensor

from revolta_serve.runner.runner import Runner
from revolta_serve.scheduler.scheduler import Limits, Scheduler
from revolta_serve.types import GenerateRequest, SamplingParams, Slice, StepPlan, StepResult


@dataclass
class Trace:
    """What happened to a set of requests."""

    tokens: dict[str, list[int]] = field(default_factory=lambda: defaultdict(list))
    logits: dict[str, list[Tensor]] = field(default_factory=lambda: defaultdict(list))
    steps: list[StepResult] = field(default_factory=list)
    companions: dict[str, list[int]] = field(default_factory=lambda: defaultdict(list))
    """Decode rows of every step in which the request decoded."""


def limits(runner: Runner, budget: int = 2048, seqs: int = 8, cap: int = 1664) -> Limits:
    """Scheduler limits that fit the runner's pools."""
    report, config = runner.report, runner.model.config
    return Limits(
        max_num_seqs=seqs,
        max_num_batched_tokens=budget,
        prefill_cap=cap,
        max_model_len=min(config.max_positions, 2048),
        max_queue=1000,
        num_blocks=report.num_blocks,
        num_slots=report.num_slots,
        history=config.ngram - 1,
        mark=config.eos,
    )


def request(name: str, prompt: Iterable[int], max_tokens: int, **sampling: float) -> GenerateRequest:
    """A greedy request unless sampling says otherwise."""
    params = SamplingParams(**{"temperature": 0.0, **sampling})  # type: ignore[arg-type]
    return GenerateRequest(id=name, prompt=tuple(prompt), max_tokens=max_tokens, sampling=params)


def serve(
    runner: Runner,
    scheduler: Scheduler,
    requests: Iterable[GenerateRequest],
    until: Callable[[Trace], bool] | None = None,
) -> Trace:
    """Serve the requests to their end, or until the caller has seen enough (the rest is then aborted)."""
    trace = Trace()
    names: dict[int, str] = {}

    def tap(piece: Slice, judged: Tensor) -> None:
        trace.logits[names[piece.request]].append(judged)

    scheduler.add(tuple(requests))
    runner.tap = tap
    try:
        while scheduler.has_work and not (until is not None and until(trace)):
            plan = scheduler.schedule()
            assert plan is not None
            names |= {number: held.source.id for number, held in scheduler.running.items()}
            result = runner.step(plan)
            for output in scheduler.update(result):
                trace.tokens[output.id] += output.tokens
            trace.steps.append(result)
            for piece in plan.slices:
                if piece.kind == "decode":
                    trace.companions[names[piece.request]].append(result.decode_rows)
    finally:
        runner.tap = None
    for live in list(scheduler.live):
        scheduler.abort(live)
    runner.step(StepPlan(step=0, slices=(), forget=tuple(names)))
    return trace

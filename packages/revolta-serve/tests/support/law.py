"""The law as an experiment: one request gives the same logits, bit for bit, whatever else the engine does.

An `Engine` is a scheduler and a runner in one loop. What nobody owns in its pools is NaN at all times, so that a row which reads a block
or a state that was never stored, or that was given away, does not go unnoticed.
"""

import random
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from revolta_serve.cache.pool import Pool
from revolta_serve.config import ModelSource, ScheduleConfig, ServeConfig
from revolta_serve.model.model_config import GRID, ModelConfig
from revolta_serve.runner.runner import Runner
from revolta_serve.scheduler.limits import Limits
from revolta_serve.scheduler.scheduler import Scheduler
from revolta_serve.types import FinishReason, GenerateRequest, Output, RequestRecord, SamplingParams, Slice, StepPlan, TokenLogprobs

SHAPE: dict[str, Any] = dict(
    layers=3, layer_types=("linear_attention", "full_attention", "linear_attention"), ple_layers=(3,), budget=64, tokens=320,
    hidden=32, heads=2, kv_heads=1, head_dim=16, index_heads=2, index_dim=16, gdn_key_heads=1, gdn_value_heads=2, streams=2, rank=8,
    experts=8, experts_per_token=2, expert_width=16, shared_width=16, ngram_heads=2, ngram_base=499, max_positions=65536, seed=3,
)  # fmt: skip
"""The smallest model in which every kind of state feeds every other: attention reads what a delta rule wrote, a second delta rule and the
n-gram history follow it. Attention is sparse from position 67 on."""

AUDIT_STEPS = 25


def load(directory: Path, max_model_len: int, *, dtype: Literal["float32", "float16"] = "float32", **schedule: int) -> Runner:
    """A runner of one rank whose pools hold everything a test can want."""
    config = ServeConfig(
        model=ModelSource(path=str(directory), dtype=dtype), schedule=ScheduleConfig(max_model_len=max_model_len, **schedule)
    )
    return Runner.load(config.resolve(ModelConfig.load(directory)), 0)


def limits(runner: Runner, **changes: Any) -> Limits:
    """Limits that let everything through at once, in all of the runner's pools."""
    report, config = runner.report, runner.model.config
    ample: dict[str, Any] = dict(
        max_num_seqs=8, max_num_batched_tokens=1 << 20, prefill_cap=1 << 20, max_model_len=runner.builder.table.shape[1] * GRID,
        max_queue=100_000, num_blocks=report.num_blocks, num_slots=report.num_slots, history=config.ngram - 1, mark=config.eos,
    )  # fmt: skip
    return Limits(**ample | changes)


def request(name: str, prompt: list[int] | tuple[int, ...], max_tokens: int = 1, **fields: Any) -> GenerateRequest:
    """A greedy request unless told otherwise."""
    return GenerateRequest(id=name, prompt=tuple(prompt), max_tokens=max_tokens, **{"sampling": SamplingParams(temperature=0.0), **fields})


class Cut(NamedTuple):
    """A prompt slice."""

    start: int
    rows: int
    others: int
    """Other requests that ran or waited then."""


@dataclass(slots=True)
class Answer:
    """What came of one request."""

    tokens: list[int] = field(default_factory=list)
    logits: dict[int, Tensor] = field(default_factory=dict)
    """f32[V] by the position of the token that was drawn from them."""
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    cuts: list[Cut] = field(default_factory=list)
    """Its prompt slices, those after preemptions included."""
    starts: list[Slice] = field(default_factory=list)
    """The slices with which it started, the first time and after every preemption."""
    verify_rows: int = 0
    """Known answer rows that were computed beside others in one slice."""
    finish: FinishReason | None = None
    record: RequestRecord | None = None

    @property
    def computed(self) -> int:
        """Prompt rows computed."""
        return sum(cut.rows for cut in self.cuts)

    @property
    def progress(self) -> int:
        """Prompt slices and tokens until now."""
        return len(self.cuts) + len(self.tokens)

    @property
    def cached(self) -> int:
        """Prompt tokens that were reused."""
        assert self.record is not None, "it has not ended"
        return self.record.cached_tokens


class Engine:
    """A scheduler and a runner, step by step. A context: the runner serves one at a time."""

    def __init__(self, runner: Runner, limits: Limits) -> None:
        self.runner, self.scheduler = runner, Scheduler(limits)
        self.answers: dict[str, Answer] = {}
        self.rows = {"prefill": 0, "decode": 0}
        """What the runner says it has computed."""
        self.steps = self.widest = 0
        """Steps done, and the most requests in one of them."""
        self._names: dict[int, str] = {}
        self._known: set[int] = set()
        pools = runner.pools
        self._blocks, self._slots = (pools.k, pools.v, pools.keys), (pools.gdn, pools.conv, pools.ple, pools.ring)
        for plane in (*self._blocks, *self._slots):
            plane.fill_(torch.nan)
        self._taken: dict[str, np.ndarray[Any, Any]] = {}

    def add(self, *requests: GenerateRequest) -> None:
        """Queue requests, all at once."""
        self.scheduler.add(requests, float(self.steps))
        self.answers |= {one.id: Answer() for one in requests}

    def abort(self, name: str) -> bool:
        """End a request between two steps; False if it had ended."""
        output = self.scheduler.abort(name, float(self.steps))
        self._take([output] if output else [])
        return output is not None

    def step(self) -> StepPlan | None:
        """One step; None if there was nothing to compute."""
        plan = self.scheduler.schedule(float(self.steps))
        if plan is None:
            self._take(self.scheduler.collect())
            return None
        self._names |= {number: held.source.id for number, held in self.scheduler.running.items()}
        self._known = (self._known - set(plan.forget)) | {piece.request for piece in plan.slices}
        for piece in plan.slices:
            self._note(piece)
        self.runner.tap = self._tap
        try:
            result = self.runner.step(plan)
        finally:
            self.runner.tap = None
        self.rows["prefill"] += result.prefill_rows
        self.rows["decode"] += result.decode_rows
        self.steps += 1
        self.widest = max(self.widest, len(plan.slices))
        self._take(self.scheduler.update(result, float(self.steps)))
        if self.steps % AUDIT_STEPS == 0:
            self.scheduler.audit()
        self._spoil()
        return plan

    def run(self) -> None:
        """Steps until every request has ended."""
        while self.scheduler.has_work:
            assert self.step() is not None or not self.scheduler.has_work, "requests wait and nothing runs"

    def serve(self, one: GenerateRequest) -> Answer:
        """Serve one request to its end, whatever else is there."""
        self.add(one)
        self.run()
        return self.answers[one.id]

    def __enter__(self) -> "Engine":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Abort what is left and let the runner forget everything. The books must balance, unless something has failed already."""
        if kind is None:
            for name in self.scheduler.live:
                self.abort(name)
            self.scheduler.audit()
            status = self.scheduler.status
            assert (status.blocks_used, status.slots_used, status.running, status.waiting) == (0, 0, 0, 0), status
        self.runner.step(StepPlan(step=self.steps, slices=(), forget=tuple(self._known)))

    def _note(self, piece: Slice) -> None:
        answer = self.answers[self._names[piece.request]]
        if piece.sampling is not None:
            answer.starts.append(piece)
        if piece.kind == "prefill":
            answer.cuts.append(Cut(piece.start, len(piece.tokens), len(self.scheduler.live) - 1))
        elif len(piece.tokens) > 1:
            answer.verify_rows += len(piece.tokens)

    def _tap(self, piece: Slice, judged: Tensor) -> None:
        answer, position = self.answers[self._names[piece.request]], piece.start + len(piece.tokens)
        assert position not in answer.logits, f"request {self._names[piece.request]}: position {position} is drawn twice"
        answer.logits[position] = judged

    def _take(self, outputs: list[Output]) -> None:
        for output in outputs:
            answer = self.answers[output.id]
            answer.tokens += output.tokens
            answer.logprobs += output.logprobs
            answer.prompt_logprobs += output.prompt_logprobs
            answer.finish, answer.record = output.finish, output.record
            assert output.finish != "error", f"request {output.id}: {output.error}"

    def _spoil(self) -> None:
        """Overwrite whatever has been given back since the last step."""
        cache = self.scheduler.storage.cache
        for pool, planes in ((cache.blocks, self._blocks), (cache.slots, self._slots)):
            taken = _taken(pool)
            before = self._taken.get(pool.what)
            given = np.flatnonzero(before & ~taken) if before is not None else []
            for plane in planes if len(given) else ():
                plane[:, torch.from_numpy(given)] = torch.nan
            self._taken[pool.what] = taken


def _taken(pool: Pool) -> "np.ndarray[Any, Any]":
    return np.frombuffer(bytes(pool._taken), np.bool_)


def ids(seed: int | str, count: int) -> list[int]:
    """Random ids of the model's vocabulary."""
    rng = random.Random(seed)
    return [rng.randrange(SHAPE["tokens"]) for _ in range(count)]


class Talk:
    """A conversation: every turn says all that was said before, the answers included, and something new."""

    def __init__(self, engine: Engine, name: str, opening: list[int]) -> None:
        self.engine, self.name, self.said, self.turns = engine, name, opening, 0

    def turn(self, new: int, answer: int = 20) -> tuple[GenerateRequest, Answer]:
        """Say `new` more tokens and take an answer: the request and what came of it."""
        self.turns += 1
        before = len(self.said)
        self.said = self.said + ids(f"{self.name} {self.turns}", new)
        one = request(f"{self.name}{self.turns}", self.said, answer, boundaries=(before, len(self.said)))
        given = self.engine.serve(one)
        self.said = self.said + given.tokens
        return one, given


@dataclass(frozen=True, slots=True)
class Difference:
    """Where an answer is not the reference's."""

    name: str
    position: int
    """Of the token drawn."""
    largest: float
    """Between two logits; NaN where one of them is no number, 0 where only the tokens differ."""

    def __str__(self) -> str:
        return f"request {self.name}, position {self.position}: largest difference {self.largest:g}"


def compare(name: str, expected: Answer, answer: Answer, length: int) -> Difference | None:
    """The first position at which an answer to a prompt of `length` tokens differs from the reference, in logits or tokens.

    An aborted answer is compared as far as it goes; any other must go as far as the reference.
    """
    for position, judged in answer.logits.items():
        reference = expected.logits[position]
        if not torch.equal(reference, judged):
            return Difference(name, position, float((reference - judged).abs().max()))
    count = len(answer.tokens)
    if answer.tokens != expected.tokens[:count]:
        place = next(place for place in range(count) if answer.tokens[place] != expected.tokens[place])
        return Difference(name, length + place, 0.0)
    if answer.finish != "abort" and count != len(expected.tokens):
        return Difference(name, length + count, 0.0)
    if answer.logprobs != expected.logprobs[: len(answer.logprobs)]:
        return Difference(name, length, 0.0)
    told = len(answer.prompt_logprobs)
    if answer.prompt_logprobs != expected.prompt_logprobs[:told] or (answer.finish != "abort" and told != len(expected.prompt_logprobs)):
        return Difference(name, 0, 0.0)
    return None

"""Random requests with their answers alone and cold, and settings of the engine under which nothing about them may change."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from msgspec.structs import replace

from revolta_serve.cache.retention import UNPROVEN
from revolta_serve.model.model_config import GRID
from revolta_serve.runner.runner import Runner
from revolta_serve.types import EngineStatus, GenerateRequest, SamplingParams
from support.law import Answer, Difference, Engine, compare, limits

LONG = 13
"""Every so manieth request has a prompt of 2,000 tokens or more."""

LONGEST = 2560
"""Tokens of prompt and answer together: the smallest legal pool holds one such request."""


@dataclass(frozen=True, slots=True)
class Case:
    """A request and what it must give."""

    request: GenerateRequest
    answer: Answer

    @property
    def length(self) -> int:
        return len(self.request.prompt)

    @property
    def crosses_in_decode(self) -> bool:
        """Whether rows of its answer lie in more than one block."""
        return self.length // GRID != (self.length + self.request.max_tokens - 2) // GRID


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """One way to run all requests. `blocks` and `slots` of 0: as many as the runner has."""

    name: str
    seqs: int
    rows: int
    """Most rows of a prompt slice."""
    blocks: int = 0
    slots: int = 0
    order: int = 0
    """Of arrival: 0 as they are, -1 reversed, else the seed of a shuffle."""
    pace: float = 0.0
    """Requests that arrive in a step, on average; 0: all before the first."""
    aborts: float = 0.0
    """Part of the requests that is ended after a random number of slices and tokens, perhaps none."""
    interrupts: float = 0.0
    """Part of the steps after which all running requests go back to the queue."""
    squeezes: float = 0.0
    """Part of those interrupts with which somebody needs so many slots that every answer's end and superseded snapshot is evicted."""
    resets: float = 0.0
    """Part of those interrupts that empty the prefix cache too: then nothing is evicted, all is forgotten."""
    limits: dict[str, Any] = field(default_factory=dict)
    events: dict[str, int] = field(default_factory=dict)
    """Counts of EngineStatus that the whole number of requests must reach at least."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a run under a setting showed."""

    setting: Setting
    answers: dict[str, Answer]
    status: EngineStatus
    differences: list[Difference]
    tolerated: int
    """Requests that are not compared, as they reused states over generated text and their records say so."""
    widest: int
    rows: dict[str, int]

    def __str__(self) -> str:
        found = "\n".join(f"  {difference}" for difference in self.differences[:10])
        return f"under {self.setting.name}: {len(self.differences)} requests differ from alone, cold, in one slice\n{found}\n{self.status}"


def _squeeze(engine: Engine) -> None:
    cache = engine.scheduler.storage.cache
    taken = list(iter(lambda: cache.take_slot(UNPROVEN), -1))
    for slot in taken:
        cache.slots.give(slot)


def measured(runner: Runner, count: int, seed: int) -> list[Case]:
    """`count` requests, each served alone and cold, its prompt in one slice: the reference that every setting is held to."""
    rng, cases = random.Random(seed), list[Case]()
    for number in range(count):
        drawn = _request(rng, number, runner.model.config.vocab, cases)
        with Engine(runner, limits(runner, prefix=False)) as engine:
            answer = engine.serve(drawn)
        positions = range(len(drawn.prompt), len(drawn.prompt) + drawn.max_tokens)
        if answer.finish != "length" or list(answer.logits) != list(positions) or [cut.rows for cut in answer.cuts] != [len(drawn.prompt)]:
            raise AssertionError(f"the reference of {drawn.id} is none: {answer}")
        cases.append(Case(drawn, answer))
    return cases


def experiment(runner: Runner, cases: Sequence[Case], setting: Setting) -> Outcome:
    """Serve all requests under a setting and compare every logit with the reference."""
    rng = random.Random(f"{setting.name} {setting.order}")
    changes: dict[str, Any] = dict(
        max_num_seqs=setting.seqs, max_num_batched_tokens=setting.rows if setting.seqs == 1 else LONGEST * setting.seqs,
        prefill_cap=setting.rows, long_prefill=setting.rows, generated=False,
    )  # fmt: skip
    sizes = {name: size for name, size in (("num_blocks", setting.blocks), ("num_slots", setting.slots)) if size}
    coming = list(cases)
    if setting.order:
        coming.reverse() if setting.order < 0 else random.Random(setting.order).shuffle(coming)
    picked = rng.sample(cases, round(setting.aborts * len(cases)))
    doomed = {case.request.id: rng.choice((rng.randrange(3), rng.randrange(case.request.max_tokens))) for case in picked}
    with Engine(runner, limits(runner, **(changes | sizes | setting.limits))) as engine:
        due = 0.0
        while coming or engine.scheduler.has_work:
            due = due + setting.pace if setting.pace else len(coming)
            while coming and (due >= 1 or not engine.scheduler.has_work):
                engine.add(coming.pop(0).request)
                due -= 1
            engine.step()
            for name in [name for name, most in doomed.items() if name in engine.answers and engine.answers[name].progress >= most]:
                del doomed[name]
                engine.abort(name)
            if rng.random() < setting.interrupts:
                engine.scheduler.preempt_all()
                if rng.random() < setting.resets:
                    engine.scheduler.reset_cache()
                if rng.random() < setting.squeezes:
                    _squeeze(engine)
        status = engine.scheduler.status
    differences, tolerated = [], 0
    for case in cases:
        name, record = case.request.id, engine.answers[case.request.id].record
        if record is not None and not record.seamless:
            tolerated += 1
        elif difference := compare(name, case.answer, engine.answers[name], case.length):
            differences.append(difference)
    return Outcome(setting, engine.answers, status, differences, tolerated, engine.widest, engine.rows)


def _request(rng: random.Random, number: int, vocab: int, earlier: Sequence[Case]) -> GenerateRequest:
    prompt, boundaries = _prompt(rng, number, vocab, earlier)
    params = _sampling(rng, vocab, number)
    if len(prompt) < 700 and rng.random() < 0.06:
        params = replace(params, prompt_logprobs=2)
    tail = GRID - len(prompt) % GRID
    answer = rng.random()  # most end in another block than the prompt, a few go on for long
    wanted = rng.randrange(100, 260) if answer < 0.06 else rng.randrange(1, 30) if answer < 0.4 else tail + rng.randrange(2, 12)
    return GenerateRequest(
        id=f"r{number}",
        prompt=tuple(prompt),
        max_tokens=min(wanted, LONGEST - len(prompt)),
        sampling=params,
        boundaries=boundaries,
        priority=rng.randrange(3),
        tenant=rng.choice("ab"),
    )


def _prompt(rng: random.Random, number: int, vocab: int, earlier: Sequence[Case]) -> tuple[list[int], tuple[int, ...]]:
    """A prompt of one of the kinds that there are, and where it says that others may part from it."""

    def ids(count: int) -> list[int]:
        return [rng.randrange(vocab) for _ in range(count)]

    if number % LONG == LONG // 2:
        old = [case for case in earlier if case.length >= 2000]
        base = list(rng.choice(old).request.prompt[: rng.randrange(500, 2000)]) if old and rng.random() < 0.6 else []
        return base + ids(rng.randrange(2000, 2200) - len(base)), ()
    kind = rng.random()
    short = [case for case in earlier if case.length < 500]
    if kind < 0.28 or len(short) < 4:
        return ids(rng.choice((rng.randrange(1, 64), rng.randrange(64, 260), rng.randrange(200, 400), rng.randrange(250, 800)))), ()
    if kind < 0.5:  # one of three system texts, said to end where it does or not
        length = rng.choice((100, 230, 640))
        system = [random.Random(length * 7 + place).randrange(vocab) for place in range(length)]
        return system + ids(rng.randrange(1, 150)), rng.choice(((), (length,)))
    base = rng.choice(short)
    if kind < 0.64:  # it parts from another somewhere in the middle
        return list(base.request.prompt[: rng.randrange(base.length) + 1]) + ids(rng.randrange(1, 150)), ()
    if kind < 0.84:  # it goes on where another's answer ended
        return [*base.request.prompt, *base.answer.tokens, *ids(rng.randrange(1, 120))], (base.length,)
    if kind < 0.93:  # it has another's blocks, but after something else
        base = max(rng.sample(short, 2), key=lambda case: case.length)
        return ids(GRID) + list(base.request.prompt[GRID:]) + ids(rng.randrange(1, 100)), ()
    whole = base.length // GRID * GRID  # the same again, or nothing but whole blocks of it
    return list(base.request.prompt[: whole if whole and rng.random() < 0.7 else None]), ()


def _sampling(rng: random.Random, vocab: int, number: int) -> SamplingParams:
    """Greedy or drawn, plain or with everything that changes a distribution."""
    fields: dict[str, Any] = {"temperature": 0.0}
    if rng.random() < 0.6:
        fields = {"temperature": rng.choice((0.7, 1.0, 1.5)), "seed": number, "top_k": rng.choice((0, 40)), "top_p": rng.choice((1.0, 0.9))}
        fields["min_p"] = rng.choice((0.0, 0.0, 0.02))
    if rng.random() < 0.4:
        fields |= {"repetition_penalty": rng.choice((1.0, 1.3)), "presence_penalty": rng.choice((0.0, 0.7)), "frequency_penalty": 0.4}
    if rng.random() < 0.2:
        fields["logit_bias"] = tuple((rng.randrange(vocab), rng.choice((-3.0, 2.5))) for _ in range(3))
        fields["bad_words"] = tuple((rng.randrange(vocab), rng.randrange(vocab)) for _ in range(40))
        fields |= {"min_tokens": 10, "ending_tokens": (1, 2)}
    if rng.random() < 0.2:
        fields["logprobs"] = rng.choice((0, 3))
    return SamplingParams(**fields)

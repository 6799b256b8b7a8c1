"""What the scheduler and the cache cost the host, without a model: CPU time of this process, never of a step's arithmetic.

    step      planning and accounting of one step with 256 decoding requests, with contexts of 10,000 and of 100,000 tokens each
    lookup    finding a prompt of 500,000 tokens in the prefix cache, known and unknown, beside hashing its blocks
    answer    the same of one token of one request, early and after 10,000 tokens of its answer

Medians; where two are compared they alternate in one run. Prints, writes JSON, and fails if a goal is missed.

    python bench/serve/bench_host.py [--steps 400] [--out results/serve_host]

A relative --out is taken from bench/.
"""

import argparse
import gc
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from harness import ROOT, machine_line, save
from revolta_serve.cache import keys
from revolta_serve.cache.prefix_cache import PrefixCache
from revolta_serve.scheduler.limits import Limits
from revolta_serve.scheduler.scheduler import Scheduler
from revolta_serve.types import GenerateRequest, SamplingParams, SliceResult, StepPlan, StepResult

REQUESTS = 256
CONTEXTS = (10_000, 100_000)
PROMPT = 500_000
EARLY, LATE = 1, 10_000
"""Answer lengths whose next tokens are compared."""
GOALS = {"step": 1.0, "lookup": 5.0}
"""Milliseconds."""
MOST_GROWTH = 1.1
"""Cost of a late token by that of an early one, at most."""


def scheduler(requests: int, context: int, answer: int) -> Scheduler:
    """A scheduler in which so many requests of so many prompt tokens have their first token."""
    blocks = requests * (-(-(context + answer) // 64) + 1)
    limits = Limits(
        max_num_seqs=requests, max_num_batched_tokens=1 << 15, prefill_cap=1 << 15, max_model_len=context + answer, max_queue=requests,
        num_blocks=blocks, num_slots=3 * requests, history=2, mark=0,
    )  # fmt: skip
    made = Scheduler(limits)
    for number in range(requests):
        prompt, params = (number,) * context, SamplingParams(seed=number)
        made.add([GenerateRequest(id=str(number), prompt=prompt, max_tokens=answer - 1, sampling=params)])
    while len(made.running) < requests or any(not request.decoding for request in made.running.values()):
        step(made)
    return made


def step(made: Scheduler) -> float:
    """Run a step with an answer that costs nothing; returns the milliseconds of CPU time spent on the plan and on the result."""
    begun = time.process_time()
    plan = made.schedule(0.0)
    planned = time.process_time()
    assert plan is not None
    result = answer(plan)
    made_up = time.process_time()
    made.update(result, 0.0)
    return 1000 * (time.process_time() - made_up + planned - begun)


def answer(plan: StepPlan) -> StepResult:
    """A token for whoever asks for one."""
    return StepResult(step=plan.step, slices=tuple(SliceResult(piece.request, (7,) if piece.sample else ()) for piece in plan.slices))


def steps(count: int) -> dict[int, float]:
    """Milliseconds of a step by context length, alternating."""
    made = {context: scheduler(REQUESTS, context, 4 * count) for context in CONTEXTS}
    gc.collect()
    gc.freeze()
    times: dict[int, list[float]] = {context: [] for context in CONTEXTS}
    for _ in range(count):
        for context, one in made.items():
            times[context].append(step(one))
    gc.unfreeze()
    return {context: statistics.median(found) for context, found in times.items()}


def lookups(repeats: int) -> dict[str, float]:
    """Milliseconds to hash a prompt's blocks and to look them up in a cache that knows all of them or none."""
    prompt, root = tuple(range(PROMPT)), keys.root("bench", "")
    chain = keys.chain(root, prompt)
    empty, full = PrefixCache(1, 1), PrefixCache(len(chain), 1)
    tip = None
    for key in chain:
        taken = full.take_blocks(1)
        assert taken is not None
        tip = full.extend(tip, key, 64, taken[0])
    assert tip is not None
    full.store(tip, full.take_slot())
    found = {"hash": _median(lambda: keys.chain(root, prompt), repeats)}
    found["unknown"] = _median(lambda: empty.match(chain, seamless_only=False), repeats)
    full.index.release(tip)
    assert full.match(chain, seamless_only=False).depth == len(chain)

    def resume() -> None:
        node = full.match(chain, seamless_only=False).node
        assert node is not None
        full.resume(node)
        full.back_out(node)

    return {**found, "known, with its block ids": _median(resume, repeats)}


def answers(count: int) -> dict[int, float]:
    """Microseconds of one token of one request at two lengths of its answer, alternating."""
    made = {length: scheduler(1, 64, LATE + 3 * 64 * count) for length in (EARLY, LATE)}
    for _ in range(LATE):
        step(made[LATE])
    # A step of one request is too short for the clock: whole blocks of 64 are timed, so that both cross as many grid positions.
    times: dict[int, list[float]] = {length: [] for length in made}
    for _ in range(count):
        for length, one in made.items():
            times[length].append(sum(step(one) for _ in range(64)) / 64 * 1000)
    return {length: statistics.median(found) for length, found in times.items()}


def _median(call: Any, repeats: int) -> float:
    return statistics.median(_timed(call, repeats))


def _timed(call: Any, repeats: int) -> Iterator[float]:
    for _ in range(repeats):
        begun = time.process_time()
        call()
        yield 1000 * (time.process_time() - begun)


def main() -> int:
    """Measure, print, save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=400, help="timed steps of each kind")
    parser.add_argument("--out", type=Path, default=Path("results/serve_host"), help="result file without its suffix")
    arguments = parser.parse_args()
    print(machine_line(1))
    by_context = steps(arguments.steps)
    for context, cost in by_context.items():
        print(f"step of {REQUESTS} requests with {context:,} tokens each: {cost:.3f} ms of CPU time (goal {GOALS['step']:g})")
    by_kind = lookups(15)
    for kind, cost in by_kind.items():
        goal = "" if kind == "hash" else f" (goal {GOALS['lookup']:g})"
        print(f"prompt of {PROMPT:,} tokens, {kind}: {cost:.2f} ms{goal}")
    by_length = answers(max(4, arguments.steps // 20))
    for length, cost in by_length.items():
        print(f"one token after {length:,}: {cost:.2f} us")
    print(f"ratio late to early: {by_length[LATE] / by_length[EARLY]:.3f} (goal {MOST_GROWTH})")
    missed = [f"a step at {context:,} tokens" for context, cost in by_context.items() if cost > GOALS["step"]]
    missed += [f"the lookup of a prompt that is {kind}" for kind, cost in by_kind.items() if kind != "hash" and cost > GOALS["lookup"]]
    missed += ["a late token"] if by_length[LATE] > MOST_GROWTH * by_length[EARLY] else []
    save(
        ROOT / "bench" / arguments.out.with_suffix(".json"),
        {"goals": GOALS, "step_ms": by_context, "lookup_ms": by_kind, "token_us": by_length, "steps": arguments.steps},
    )
    print(f"goals missed: {', '.join(missed)}" if missed else "all goals are met")
    return bool(missed)


if __name__ == "__main__":
    sys.exit(main())

"""A runner double, and the other side of an engine's loop in the same thread: what arrives is written down as a script."""

import time
from collections import deque
from dataclasses import dataclass

from revolta_serve.engine.messages import Done, Outputs
from revolta_serve.scheduler.limits import Limits
from revolta_serve.types import GenerateRequest, SamplingParams, SliceResult, StepResult

LIMITS = Limits(
    max_num_seqs=2, max_num_batched_tokens=128, prefill_cap=64, max_model_len=500, max_queue=2, num_blocks=16, num_slots=4,
    history=2, mark=0,
)  # fmt: skip
MOST_CALLS = 100_000


def request(id, prompt=3, max_tokens=4, first=0):
    """A prompt of `prompt` tokens: first, first + 1, ..."""
    return GenerateRequest(id=id, prompt=tuple(range(first, first + prompt)), max_tokens=max_tokens, sampling=SamplingParams())


def rows(plan, kind):
    """Rows of a kind that a worker computes for a plan."""
    return sum(len(piece.tokens) for piece in plan.slices if piece.kind == kind)


class Double:
    """Answers every plan with token 7; `fail` makes the next steps raise, `pause` makes each take so long."""

    def __init__(self):
        self.plans, self.fail, self.pause = [], 0, 0.0

    def step(self, plan):
        self.plans.append(plan)
        time.sleep(self.pause)
        if self.fail:
            self.fail -= 1
            raise RuntimeError("no luck")
        slices = tuple(SliceResult(s.request, (7,) if s.sample else ()) for s in plan.slices)
        return StepResult(step=plan.step, slices=slices, decode_rows=rows(plan, "decode"), prefill_rows=rows(plan, "prefill"))


@dataclass
class Steps:
    """Nothing arrives until the engine has computed so many more steps."""

    count: int


@dataclass
class Idle:
    """Nothing arrives until the engine has been ready to wait for it so many times."""

    count: int = 1


@dataclass
class Late:
    """A command that comes a moment later: only while the engine is ready to wait."""

    command: object


class Api:
    """A channel to the api: commands to deliver, functions to call, events to inspect. After the script nothing arrives."""

    def __init__(self, *script):
        self.script, self.events, self.timeouts = deque(script), [], []
        self.calls = 0

    def receive(self, kind, timeout):
        self.calls += 1
        assert self.calls < MOST_CALLS, f"the engine goes round and round, before {list(self.script)}"
        self.timeouts.append(timeout)
        if not self.script:
            time.sleep(min(timeout, 0.005))
            return None
        head = self.script[0]
        if isinstance(head, Steps | Idle):
            if isinstance(head, Idle):
                head.count -= timeout > 0
            if head.count <= 0:
                self.script.popleft()
            return None
        if callable(head):
            self.script.popleft()()
            return None
        if isinstance(head, Late):
            return self.script.popleft().command if timeout > 0 else None
        return self.script.popleft()

    def send(self, event):
        self.events.append(event)
        if isinstance(event, Outputs) and event.cost is not None and self.script and isinstance(self.script[0], Steps):
            self.script[0].count -= 1
            if self.script[0].count <= 0:
                self.script.popleft()

    def outputs(self):
        return [output for event in self.events if isinstance(event, Outputs) for output in event.outputs]

    def finishes(self):
        return [(output.id, output.finish) for output in self.outputs() if output.finish]

    def place(self, ticket):
        """Where in the events a ticket was answered by Done; exactly once."""
        (found,) = [place for place, event in enumerate(self.events) if isinstance(event, Done) and event.ticket == ticket]
        return found

    def done(self, ticket):
        return self.events[self.place(ticket)]

    def place_of_end(self, id):
        """Where in the events a request ended."""
        (found,) = [
            place
            for place, event in enumerate(self.events)
            if isinstance(event, Outputs)
            for output in event.outputs
            if output.id == id and output.finish
        ]
        return found

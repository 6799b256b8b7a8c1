"""The engine's core and loop with a runner double: faults in a step, drains, commands."""

import threading
import time
from collections import deque

import pytest

from revolta_serve.engine.channel import LocalChannel
from revolta_serve.engine.core import MOST_FAILURES, EngineCore
from revolta_serve.engine.messages import Abort, Admitted, Drain, Failed, Outputs, Refused, Submit
from revolta_serve.engine.service import Service
from revolta_serve.errors import EngineUnavailableError
from revolta_serve.scheduler.scheduler import Limits, Scheduler
from revolta_serve.types import GenerateRequest, SamplingParams, SliceResult, StepResult

LIMITS = Limits(
    max_num_seqs=2, max_num_batched_tokens=128, prefill_cap=64, max_model_len=500, max_queue=2, num_blocks=16, num_slots=4,
    history=2, mark=0,
)  # fmt: skip


def request(id, prompt=3, max_tokens=4):
    return GenerateRequest(id=id, prompt=tuple(range(prompt)), max_tokens=max_tokens, sampling=SamplingParams())


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
        return StepResult(step=plan.step, slices=tuple(SliceResult(s.request, (7,) if s.sample else ()) for s in plan.slices))


class Recorder:
    """A channel to another rank that only records."""

    def __init__(self):
        self.sent = []

    def send(self, message):
        self.sent.append(message)

    def close(self):
        pass


@pytest.fixture
def double():
    return Double()


@pytest.fixture
def core(double):
    return EngineCore(Scheduler(LIMITS), [LocalChannel(double.step)])


def test_a_request_runs_to_its_end(core):
    core.submit(request("a"))
    outputs = []
    while core.has_work:
        outputs += core.step()
    assert [token for output in outputs for token in output.tokens] == [7] * 4
    assert outputs[-1].finish == "length"
    assert core.step() == []
    assert core.status.generated_tokens == 4
    assert core.step_began == 0.0


def test_a_failed_step_fails_its_requests_and_the_engine_goes_on(core, double):
    core.submit(request("a"))
    core.submit(request("b"))
    core.step()
    double.fail = 1
    outputs = core.step()
    assert {(o.id, o.finish) for o in outputs} == {("a", "error"), ("b", "error")}
    assert "RuntimeError: no luck" in outputs[0].error
    assert not core.broken
    assert not core.has_work
    core.submit(request("a"))
    while core.has_work:
        core.step()
    assert core.status.slots_used == core.status.blocks_used == 0
    assert double.plans[-4].forget == (0, 1), "the workers hear that the failed requests are gone"


def test_a_model_that_keeps_failing_ends_the_engine(core, double):
    double.fail = MOST_FAILURES
    for number in range(MOST_FAILURES):
        assert not core.broken
        core.submit(request(str(number)))
        core.step()
    assert core.broken


def test_a_failed_step_of_several_ranks_ends_the_engine(double):
    other = Recorder()
    core = EngineCore(Scheduler(LIMITS), [LocalChannel(double.step), other])
    core.submit(request("a"))
    core.step()
    assert other.sent == double.plans, "every rank gets the same plan"
    double.fail = 1
    assert core.step()[0].finish == "error"
    assert core.broken


def test_a_draining_core_accepts_nothing(core):
    core.submit(request("a"))
    core.accepting = False
    with pytest.raises(EngineUnavailableError, match="shutting down"):
        core.submit(request("b"))
    assert [o.finish for o in core.abort_all()] == ["abort"]


class Api:
    """The other side of a service, in the same thread: commands to deliver, events to inspect."""

    def __init__(self, *commands):
        self.commands, self.events = deque(commands), []

    def receive(self, kind, timeout):
        return self.commands.popleft() if self.commands else None

    def send(self, event):
        self.events.append(event)

    def outputs(self):
        return [output for event in self.events if isinstance(event, Outputs) for output in event.outputs]


def test_the_service_answers_commands_in_order_and_drains(core):
    api = Api(
        Submit(5, (request("a"),)), Submit(6, (request("b"), request("a"))), Submit(7, (request("big", 400, 99),)), Abort("big"),
        Abort("nobody"), Drain(60),
    )  # fmt: skip
    assert Service(core, api).run() == 0
    assert [(type(event), event.ticket) for event in api.events[:3]] == [(Admitted, 5), (Refused, 6), (Admitted, 7)]
    assert api.events[1].error == "RequestError"
    assert all(output.id != "b" for output in api.outputs()), "all or none"
    assert [(o.id, o.finish) for o in api.outputs() if o.finish] == [("big", "abort"), ("a", "length")]


def test_a_full_queue_is_refused_with_its_own_error(core):
    api = Api(*(Submit(n, (request(str(n)),)) for n in range(5)), Drain(60))
    Service(core, api).run()
    assert [(e.ticket, e.error) for e in api.events if isinstance(e, Refused)] == [(4, "QueueFullError")]


def test_a_drain_aborts_at_its_deadline(core, double):
    double.pause = 0.01
    api = Api(Submit(0, (request("a", 3, 400),)), Drain(0.1))
    began = time.monotonic()
    assert Service(core, api).run() == 0
    assert 0.1 <= time.monotonic() - began < 2
    assert api.outputs()[-1].finish == "abort"
    assert sum(len(o.tokens) for o in api.outputs()) > 0


def test_a_drain_of_zero_seconds_aborts_at_once(core):
    api = Api(Submit(0, (request("a", 3, 400),)), Drain(0))
    assert Service(core, api).run() == 0
    assert [o.finish for o in api.outputs()] == ["abort"]


def test_a_request_during_a_drain_is_refused(core):
    api = Api(Submit(0, (request("a", 3, 2),)), Drain(60), Submit(1, (request("b"),)))
    assert Service(core, api).run() == 0
    assert api.events[1].error == "EngineUnavailableError"


def test_a_signal_may_ask_for_the_drain(core):
    service = Service(core, Api())
    timer = threading.Timer(0.05, service.drain, [0.0])
    timer.start()
    assert service.run() == 0
    timer.join()


def test_a_broken_core_ends_the_service(core, double):
    double.fail = 99
    api = Api(*(Submit(n, (request(str(n)),)) for n in range(2)))
    service = Service(core, api)
    core.failures = MOST_FAILURES - 1
    assert service.run() == 1
    assert isinstance(api.events[-1], Failed)

"""The engine's core and loop with a runner double: faults in a step, drains, commands, accounts, costs."""

import logging
import threading
import time
from dataclasses import replace

import pytest
from msgspec.structs import replace as changed

from revolta_serve.cache.capacity import capacity
from revolta_serve.config import CacheConfig, ScheduleConfig, ServeConfig
from revolta_serve.engine import core as core_module
from revolta_serve.engine.channel import LocalChannel
from revolta_serve.engine.core import MOST_FAILURES, EngineCore, limits
from revolta_serve.engine.messages import Abort, Admitted, Drain, Failed, Outputs, Refused, Submit
from revolta_serve.engine.service import Service
from revolta_serve.errors import EngineError, EngineUnavailableError
from revolta_serve.scheduler.scheduler import Scheduler
from support.engine_double import LIMITS, Api, Double, Idle, Late, Steps, request
from support.published import read


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
    assert core.cost is None, "the last call computed nothing"


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
    assert [(o.finish, o.error) for o in core.abort_all("that is why")] == [("abort", "that is why")]


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


def test_the_configuration_reaches_the_scheduler():
    schedule = ScheduleConfig(
        max_num_seqs=3, max_num_batched_tokens=1000, prefill_while_decoding=65, max_model_len=777, max_queue=5, policy="priority",
        long_prefill_tokens=130, bypass_limit=6, bypass_seconds=7.5, stall_steps=8,
    )  # fmt: skip
    model = read()
    cache = CacheConfig(num_blocks=99, num_slots=11, prefix=False, generated=False, block_times=True)
    config = ServeConfig(schedule=schedule, cache=cache).resolve(model)
    found = limits(config, model, capacity(config, model), domain="these weights")
    expected = dict(
        max_num_seqs=3, max_num_batched_tokens=1000, prefill_cap=128, max_model_len=777, max_queue=5, policy="priority", long_prefill=192,
        bypass_limit=6, bypass_seconds=7.5, stall_steps=8, num_blocks=99, num_slots=11, prefix=False, generated=False,
        block_times=True, domain="these weights", width=8, history=2, mark=model.eos,
    )  # fmt: skip
    assert {name: getattr(found, name) for name in found.__dataclass_fields__} == expected
    assert limits(replace(config, schedule=replace(schedule, long_prefill_tokens=0)), model, capacity(config, model)).long_prefill == 0


def test_every_step_is_reported_with_its_cost_even_without_outputs(core):
    api = Api(Submit(0, (request("a", 200, 3), request("b", 3, 3))), Drain(60))
    Service(core, api).run()
    costs = [(event.cost, event.outputs) for event in api.events if isinstance(event, Outputs) and event.cost is not None]
    rows = [(cost.decode_rows, cost.prefill_rows) for cost, _ in costs]
    assert rows[0] == (0, 128)
    assert not costs[0][1], "a chunk of a prompt has no outputs"
    assert sum(prefill for _, prefill in rows) == 203
    assert sum(decode for decode, _ in rows) == 4
    assert core.status.steps == len(costs)
    assert sum(cost.seconds for cost, _ in costs) == pytest.approx(core.status.step_seconds)
    assert sum(cost.host_seconds for cost, _ in costs) == pytest.approx(core.status.host_seconds)


def test_time_between_steps_counts_while_there_is_work(monkeypatch):
    clock = [100.0]
    monkeypatch.setattr(core_module.time, "monotonic", lambda: clock[0])

    def step(plan):
        clock[0] += 5
        return Double().step(plan)

    core = EngineCore(Scheduler(LIMITS), [LocalChannel(step)])
    core.submit(request("a", 3, 3))
    clock[0] += 1000
    core.step()
    assert (core.cost.seconds, core.cost.host_seconds) == (5, 0), "an idle engine has no host time"
    clock[0] += 2
    core.step()
    assert (core.cost.seconds, core.cost.host_seconds) == (5, 2)
    clock[0] += 1000
    core.rest()
    core.step()
    assert core.cost.host_seconds == 0, "a pause is nobody's work"
    assert not core.has_work
    clock[0] += 1000
    core.submit(request("b", 3, 1))
    core.step()
    assert core.cost.host_seconds == 0, "nobody was there"
    assert (core.status.step_seconds, core.status.host_seconds) == (20, 2)


def test_requests_that_come_together_start_together(core, double):
    api = Api(Submit(0, (request("a"),)), Late(Submit(1, (request("b"),))), Steps(4), Drain(60))
    Service(core, api, admission_window=60.0).run()
    assert [len(plan.slices) for plan in double.plans] == [2, 2, 2, 2]
    assert 0 < api.timeouts[0] <= 0.1, "nobody is there yet"
    assert 0.1 < api.timeouts[1] <= 60.0
    assert api.timeouts[3:6] == [0, 0, 0], "who runs is not kept waiting"


def test_who_comes_when_others_run_does_not_open_a_window(core, double):
    api = Api(Submit(0, (request("a"),)), Steps(2), Submit(1, (request("b"),)), Late(Submit(2, (request("c"),))), Drain(60))
    Service(core, api, admission_window=60.0).run()
    assert [len(plan.slices) for plan in double.plans] == [1, 1, 2, 2, 1, 1, 1, 1, 1, 1]


def test_without_a_window_the_first_one_starts_at_once(core, double):
    api = Api(Submit(0, (request("a"),)), Late(Submit(1, (request("b"),))), Drain(60))
    Service(core, api).run()
    assert [len(plan.slices) for plan in double.plans] == [1] * 8


def test_no_window_for_what_is_over_before_it_starts(core, double):
    api = Api(Submit(0, (request("a"),)), Abort("a"), Idle(), Drain(60))
    Service(core, api, admission_window=60.0).run()
    assert not double.plans
    assert all(timeout <= 0.1 for timeout in api.timeouts[2:])


def test_counts_follow_every_command(core):
    api = Api(Submit(0, (request("a", 3, 400),)), Steps(2), Submit(1, (request("b"), request("c"))), Drain(0))
    Service(core, api).run()
    place = next(place for place, event in enumerate(api.events) if isinstance(event, Admitted) and event.ticket == 1)
    after = next(event for event in api.events[place:] if isinstance(event, Outputs))
    assert (after.outputs, after.cost) == ((), None)
    assert (after.status.running, after.status.waiting) == (1, 2)


@pytest.fixture
def audits(core, monkeypatch):
    """The steps after which the books were checked."""
    seen, check = [], core.scheduler.audit
    monkeypatch.setattr(core.scheduler, "audit", lambda: (seen.append(core.status.steps), check()))
    return seen


def test_the_books_are_checked_every_so_many_steps_and_when_nobody_is_left(core, audits):
    core.audit_steps = 3
    api = Api(Idle(3), Submit(0, (request("a", 3, 10),)), Steps(10), Idle(3), Submit(1, (request("b", 3, 1),)), Idle(2), Drain(60))
    assert Service(core, api).run() == 0
    assert audits == [3, 6, 9, 10, 11]


def test_the_books_do_not_keep_anybody_waiting(core, audits):
    """A request that comes with the end of another is served first."""
    api = Api(Submit(0, (request("a", 3, 4),)), Steps(4), Submit(1, (request("b", 3, 4),)), Steps(4), Idle(3), Drain(60))
    assert Service(core, api).run() == 0
    assert audits == [8]


def test_the_books_are_checked_before_the_end(core, audits):
    assert Service(core, Api(Submit(0, (request("a", 3, 4),)), Drain(60))).run() == 0
    assert audits == [4]


def test_the_books_are_checked_when_the_last_request_is_aborted(core, audits):
    api = Api(Submit(0, (request("a", 3, 100),)), Steps(5), Abort("a"), Idle(2), Drain(60))
    assert Service(core, api).run() == 0
    assert audits == [5]


def lose_a_block(core):
    core.scheduler.storage.cache.blocks.take()


def lose_a_slot(core):
    core.scheduler.storage.cache.slots.take()


@pytest.mark.parametrize(("lose", "account"), [(lose_a_block, "token blocks"), (lose_a_slot, "state slots")])
def test_wrong_books_end_every_request_and_the_engine(core, caplog, lose, account):
    core.audit_steps = 2
    api = Api(Submit(0, (request("a", 3, 100), request("b", 3, 100), request("c", 3, 100))), Steps(3))
    send = api.send

    def losing(event):
        send(event)
        if core.status.steps == 3 and isinstance(event, Outputs) and event.cost is not None:
            lose(core)

    api.send = losing
    with caplog.at_level(logging.CRITICAL):
        assert Service(core, api).run() == 1
    assert core.status.steps == 4
    ended = [output for output in api.outputs() if output.finish]
    assert [(output.id, output.finish) for output in ended] == [("a", "error"), ("b", "error"), ("c", "error")]
    for text in (ended[0].error, api.events[-1].message, caplog.text):
        assert f"the books of the cache do not balance: {account}" in text
    assert isinstance(api.events[-1], Failed)
    assert "3 requests end with an error" in caplog.text


def test_wrong_books_are_found_when_nobody_is_left(core):
    lose_a_block(core)
    api = Api(Submit(0, (request("a"),)))
    assert Service(core, api).run() == 1
    assert api.finishes() == [("a", "length")]
    assert "do not balance" in api.events[-1].message


def test_a_check_that_fails_in_any_other_way_is_no_better(core, monkeypatch):
    def broken():
        raise KeyError("a node")

    monkeypatch.setattr(core.scheduler, "audit", broken)
    api = Api(Submit(0, (request("a"),)))
    assert Service(core, api).run() == 1
    assert api.events[-1].message == "the books of the cache do not balance: KeyError: 'a node'"


def test_a_step_that_breaks_the_contract_is_an_error_of_its_requests(core, monkeypatch):
    def refuse(now):
        raise EngineError("step 3 has not been answered")

    core.submit(request("a"))
    monkeypatch.setattr(core.scheduler, "schedule", refuse)
    (output,) = core.step()
    assert output.error == "the engine failed in a step: step 3 has not been answered"
    assert core.cost is None


@pytest.mark.parametrize("lost", [{"decode_rows": 3}, {"prefill_rows": 0}, {"decode_rows": 0, "prefill_rows": 2}])
def test_a_worker_that_computed_other_rows_fails_the_step(core, double, monkeypatch, lost):
    work = double.step
    monkeypatch.setattr(core.ranks[0], "_handler", lambda plan: changed(work(plan), **lost))
    core.submit(request("a", 3, 2))
    outputs = core.step() + (core.step() if core.has_work else [])
    assert [output.finish for output in outputs if output.finish] == ["error"]
    assert "were computed" in outputs[-1].error


@pytest.mark.parametrize(("most", "words"), [
    (dict(max_num_batched_tokens=66), "67 rows of 1 requests; at most 66 rows"), (dict(max_num_seqs=0), "may share a step"),
])  # fmt: skip
def test_a_step_larger_than_it_may_be_is_refused(double, most, words):
    scheduler = Scheduler(LIMITS)
    scheduler.add([request("a", 67, 2)])
    plan = scheduler.schedule()
    result = double.step(plan)
    core_module.check_rows(plan, result, LIMITS)
    with pytest.raises(EngineError, match=words):
        core_module.check_rows(plan, result, replace(LIMITS, **most))

"""Pauses: what happens to those that run and those that come, when the answer is given, and that nothing can hang or be lost."""

import os
import random
import signal
from collections import Counter

import pytest

from revolta_serve.engine.channel import LocalChannel
from revolta_serve.engine.core import EngineCore
from revolta_serve.engine.messages import Abort, Drain, Outputs, Pause, Refused, ResetCache, Resume, Submit
from revolta_serve.engine.service import PAUSED, SHUT_DOWN, Service
from revolta_serve.scheduler.scheduler import Scheduler
from support.engine_double import LIMITS, Api, Double, Idle, Steps, request


@pytest.fixture
def double():
    return Double()


@pytest.fixture
def core(double):
    return EngineCore(Scheduler(LIMITS), [LocalChannel(double.step)], audit_steps=1)


def serve(core, *script):
    """Run a script to the end of its drain."""
    api = Api(*script)
    assert Service(core, api).run() == 0
    return api


def tokens(api, id):
    return sum(len(output.tokens) for output in api.outputs() if output.id == id)


def steps_at(api, ticket):
    return api.done(ticket).status.steps


def test_keep_freezes_and_nothing_is_lost(core):
    api = serve(
        core,
        Submit(0, (request("a", 100, 10), request("b", 3, 10), request("c", 3, 10))), Steps(4), Pause(1, "keep", False), Idle(5),
        Resume(2), Drain(60),
    )  # fmt: skip
    paused, resumed = api.done(1).status, api.done(2).status
    assert paused.paused
    assert not resumed.paused
    assert (paused.steps, paused.running, paused.waiting) == (resumed.steps, resumed.running, resumed.waiting) == (4, 2, 1)
    assert paused.blocks_used == resumed.blocks_used > 0
    assert api.finishes() == [("a", "length"), ("b", "length"), ("c", "length")]
    assert [tokens(api, id) for id in "abc"] == [10, 10, 10]
    assert core.status.preemptions == 0


def test_wait_lets_those_finish_that_run_and_starts_nobody(core):
    api = serve(
        core,
        Submit(0, (request("a", 3, 10), request("b", 3, 5), request("c", 3, 5))), Steps(2), Pause(1, "wait", False),
        Submit(2, (request("d", 3, 5),)), Idle(5), Resume(3), Drain(60),
    )  # fmt: skip
    assert api.place_of_end("b") < api.place_of_end("a") < api.place(1) < api.place(3) < api.place_of_end("c")
    assert api.place_of_end("d") > api.place(3)
    reached = api.done(1).status
    assert (reached.running, reached.waiting, reached.steps) == (0, 2, 10)
    assert steps_at(api, 3) == 10, "nobody was started during the pause"


def test_a_pause_of_an_idle_engine_is_reached_at_once(core):
    api = serve(core, *(Pause(n, mode, True) for n, mode in enumerate(("keep", "wait", "abort"))), Idle(), Resume(9), Drain(0))
    assert [api.place(n) for n in (0, 1, 2, 9)] == sorted(api.place(n) for n in (0, 1, 2, 9))


def test_wait_is_reached_though_others_wait(core):
    """Nobody runs, but the queue is not empty: requests that came during a pause of another mode."""
    api = serve(core, Pause(0, "keep", False), Submit(1, (request("a"),)), Pause(2, "wait", False), Idle(4), Resume(3), Drain(60))
    assert api.place(2) < api.place(3)
    assert (steps_at(api, 2), steps_at(api, 3)) == (0, 0)
    assert api.finishes() == [("a", "length")]


def test_abort_ends_those_that_run_and_wait_before_it_answers(core):
    api = serve(
        core,
        Submit(0, (request("a", 3, 99), request("b", 3, 99), request("c", 3, 99))), Steps(3), Pause(1, "abort", True),
        Submit(2, (request("d", 3, 5),)), Idle(4), Resume(3), Drain(60),
    )  # fmt: skip
    ended = [output for output in api.outputs() if output.finish]
    assert [(output.id, output.finish, output.error) for output in ended[:3]] == [(id, "abort", PAUSED) for id in "abc"]
    assert max(api.place_of_end(id) for id in "abc") < api.place(1) < api.place(3) < api.place_of_end("d")
    status = api.done(1).status
    assert (status.running, status.waiting, status.blocks_used, status.slots_used, status.blocks_cached) == (0, 0, 0, 0, 0)
    assert (ended[3].id, ended[3].finish) == ("d", "length"), "who came during the pause was kept"


def test_a_pause_grows_stricter(core):
    api = serve(
        core,
        Submit(0, (request("a", 3, 99), request("b", 3, 6))), Steps(3), Pause(1, "keep", False), Idle(3),
        Pause(2, "wait", False), Steps(5), Pause(3, "abort", False), Idle(2), Resume(4), Drain(60),
    )  # fmt: skip
    assert api.place(1) < api.place_of_end("b") < api.place_of_end("a") < api.place(2) < api.place(3)
    assert steps_at(api, 1) == 3
    assert api.finishes() == [("b", "length"), ("a", "abort")]


def test_a_milder_pause_changes_nothing_and_is_answered_with_the_one_in_force(core):
    api = serve(
        core, Submit(0, (request("a", 3, 20),)), Steps(3), Pause(1, "wait", False), Pause(2, "keep", False), Idle(2), Resume(3), Drain(60)
    )
    assert api.place_of_end("a") < api.place(1) < api.place(2)
    assert tokens(api, "a") == 20


def test_a_milder_pause_does_not_repeat_the_abort(core):
    api = serve(
        core, Pause(0, "abort", False), Submit(1, (request("a"),)), Pause(2, "wait", False), Pause(3, "keep", False), Idle(3), Resume(4),
        Drain(60),
    )  # fmt: skip
    assert api.place(2) < api.place(4)
    assert api.place(3) < api.place(4)
    assert api.finishes() == [("a", "length")]


def test_an_abort_during_a_freeze_is_done_at_once(core):
    api = serve(
        core, Submit(0, (request("a", 3, 99), request("b", 3, 9))), Steps(2), Pause(1, "keep", False), Idle(), Abort("a"), Idle(2),
        Resume(2), Drain(60),
    )  # fmt: skip
    assert api.place(1) < api.place_of_end("a") < api.place(2)
    assert api.finishes() == [("a", "abort"), ("b", "length")]


def test_a_freeze_that_clears_makes_them_start_again_and_loses_nothing(core, double):
    api = serve(
        core, Submit(0, (request("a", 130, 20),)), Steps(12), Pause(1, "keep", True), Idle(3), Resume(2), Drain(60)
    )  # fmt: skip
    status = api.done(1).status
    assert (status.running, status.waiting, status.preemptions) == (0, 1, 1)
    assert status.blocks_used == status.blocks_cached == status.slots_used == status.slots_cached == 0
    assert tokens(api, "a") == 20
    assert core.status.replayed_tokens == 10, "of 12 steps two computed the prompt, and the last of 11 tokens was not fed back yet"
    assert any(len(piece.tokens) > 1 for plan in double.plans for piece in plan.slices if piece.kind == "decode")


@pytest.mark.parametrize("mode", ["wait", "abort"])
@pytest.mark.parametrize("clear", [False, True])
def test_the_cache_is_cleared_when_the_pause_is_reached_and_only_if_asked(core, mode, clear):
    api = serve(core, Submit(0, (request("a", 130, 20),)), Steps(5), Pause(1, mode, clear), Idle(2), Resume(2), Drain(60))
    status = api.done(1).status
    assert (status.blocks_cached > 0, status.slots_cached > 0) == (not clear, not clear)
    assert core.status.preemptions == 0


def test_a_resume_before_the_pause_is_reached_refuses_it(core):
    api = serve(core, Submit(0, (request("a", 3, 50),)), Steps(3), Pause(1, "wait", True), Steps(3), Resume(2), Drain(60))
    (refused,) = [event for event in api.events if isinstance(event, Refused)]
    assert (refused.ticket, refused.error) == (1, "ConflictError")
    assert "ended by a resume" in refused.message
    assert api.place(2) < api.place_of_end("a")
    assert tokens(api, "a") == 50


def test_a_resume_without_a_pause_is_no_mistake(core):
    api = serve(core, Resume(0), Submit(1, (request("a"),)), Drain(60))
    assert not api.done(0).status.paused
    assert api.finishes() == [("a", "length")]


@pytest.mark.parametrize("seconds", [0, 0.05])
@pytest.mark.parametrize("mode", ["keep", "wait"])
def test_a_drain_during_a_pause_ends_at_its_deadline(core, mode, seconds):
    """Frozen ones, and with `wait` those that came after: nobody resumes, so they are given up."""
    api = serve(
        core,
        Submit(0, (request("a", 3, 5), request("b", 3, 5), request("c", 3, 5))), Steps(2), Pause(1, mode, False), Idle(2), Drain(seconds),
    )  # fmt: skip
    lost = "c" if mode == "wait" else "abc"
    ended = {output.id: output for output in api.outputs() if output.finish}
    assert {id for id, output in ended.items() if output.finish == "abort" and output.error == SHUT_DOWN} == set(lost)
    assert len(ended) == 3


def test_a_drain_answers_a_pause_that_is_not_reached(core):
    api = serve(core, Submit(0, (request("a", 3, 99),)), Steps(2), Pause(1, "wait", False), Drain(0))
    assert api.place_of_end("a") < api.place(1)


def test_a_resume_during_a_drain_lets_frozen_ones_finish(core):
    api = serve(core, Submit(0, (request("a", 3, 9),)), Steps(2), Pause(1, "keep", False), Drain(60), Idle(2), Resume(2))
    assert api.finishes() == [("a", "length")]


def test_a_signal_ends_a_frozen_engine(core):
    api = Api(Submit(0, (request("a", 3, 9),)), Steps(2), Pause(1, "keep", False), Idle(3), lambda: os.kill(os.getpid(), signal.SIGUSR1))
    service = Service(core, api)
    before = signal.signal(signal.SIGUSR1, lambda *_: service.drain(0.0))
    try:
        assert service.run() == 0
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert api.finishes() == [("a", "abort")]


def test_a_frozen_engine_waits_and_does_not_spin(core):
    api = Api(Submit(0, (request("a", 3, 9),)), Steps(2), Pause(1, "keep", False), Idle(5), Resume(2), Drain(60))
    Service(core, api).run()
    # A command in hand is followed by one look without waiting; all other looks wait.
    frozen = api.timeouts[api.timeouts.index(0.1, 1) : api.timeouts.index(0.1, 1) + 5]
    assert frozen == [0.1] * 5


def test_a_queue_that_nobody_may_start_is_not_spun_over(core):
    api = Api(Pause(0, "wait", False), Submit(1, (request("a"),)), Idle(5), Resume(2), Drain(60))
    Service(core, api).run()
    assert api.finishes() == [("a", "length")]
    assert api.timeouts.count(0.1) >= 5


@pytest.mark.parametrize("preempt", [False, True])
def test_a_reset_says_what_it_did(core, preempt):
    api = serve(
        core, Submit(0, (request("a", 130, 1),)), Steps(2), Submit(1, (request("b", 400, 20, first=500),)), Steps(6),
        ResetCache(2, preempt), Steps(1), Drain(60),
    )  # fmt: skip
    reset, status = api.done(2).reset, api.done(2).status
    assert (reset.blocks_in_use == 0) == preempt
    assert status.blocks_used == reset.blocks_in_use
    assert reset.blocks_freed == (8 if preempt else 2), "two whole blocks of the first, six of the other"
    assert reset.snapshots_freed > 0
    assert (status.slots_cached, status.preemptions) == (0, int(preempt))
    assert tokens(api, "b") == 20


def test_a_reset_of_an_empty_cache_frees_nothing(core):
    reset = serve(core, ResetCache(0, True), Drain(60)).done(0).reset
    assert (reset.blocks_freed, reset.snapshots_freed, reset.blocks_in_use) == (0, 0, 0)


def test_a_reset_during_a_freeze_tells_of_the_frozen(core):
    api = serve(
        core, Submit(0, (request("a", 130, 20),)), Steps(5), Pause(1, "keep", False), ResetCache(2, False), ResetCache(3, True), Idle(2),
        Resume(4), Drain(60),
    )  # fmt: skip
    assert api.done(2).reset.blocks_in_use > 0
    assert api.done(3).reset.blocks_in_use == 0
    assert tokens(api, "a") == 20


def nothing():
    """A moment in which no command arrives: the engine computes a step, if it may."""


def test_random_orders_lose_no_request_and_no_ticket():
    """Every request ends once, every ticket is answered once, whatever comes when."""
    happened: Counter[str] = Counter()
    for seed in range(60):
        draw = random.Random(seed)
        engine = EngineCore(Scheduler(LIMITS), [LocalChannel(Double().step)], audit_steps=1)
        script, ids, asked = [], [], []
        for ticket in range(30):
            kind = draw.choice(["submit", "submit", "pause", "resume", "reset", "abort", "go on", "go on"])
            if kind == "submit":
                ids.append(f"r{ticket}")
                script.append(Submit(ticket, (request(ids[-1], draw.choice([3, 70, 150]), draw.randint(1, 30)),)))
            elif kind == "pause":
                asked.append(ticket)
                script.append(Pause(ticket, draw.choice(["keep", "wait", "abort"]), draw.random() < 0.5))
            elif kind in ("resume", "reset"):
                asked.append(ticket)
                script.append(Resume(ticket) if kind == "resume" else ResetCache(ticket, draw.random() < 0.5))
            elif kind == "abort":
                script.append(Abort(draw.choice(ids) if ids else "nobody"))
            else:
                script += [nothing] * draw.randint(1, 8)
        api = Api(*script, Drain(draw.choice([0, 0.01])))
        assert Service(engine, api).run() == 0, seed
        refused = {event.ticket for event in api.events if isinstance(event, Refused)}
        ended = [id for id, _ in api.finishes()]
        assert sorted(ended) == sorted(id for id in ids if int(id[1:]) not in refused), seed
        for ticket in asked:
            assert ticket in refused or api.place(ticket) >= 0, seed
        assert engine.status.blocks_used == engine.status.slots_used == 0
        happened.update(output.error or output.finish for output in api.outputs() if output.finish)
        happened["preemptions"] += engine.status.preemptions
        happened["overtaken pauses"] += len(refused & set(asked))
        happened["frozen"] += any(isinstance(event, Outputs) and event.status.paused and event.status.running for event in api.events)
    assert min(happened[name] for name in ("length", PAUSED, SHUT_DOWN, "preemptions", "overtaken pauses", "frozen")) >= 5, happened

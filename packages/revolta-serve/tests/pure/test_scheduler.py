"""What the scheduler does in each situation, one by one."""

import pytest

from revolta_serve.errors import ContextLengthError, EngineError, QueueFullError, RequestError
from revolta_serve.scheduler.scheduler import Scheduler
from revolta_serve.types import SliceResult, StepResult
from support.steps import Service, answer, limits, request, text


def rows(plan):
    return [(piece.request, piece.kind, len(piece.tokens)) for piece in plan.slices]


def test_a_request_from_first_to_last_step():
    scheduler = Scheduler(limits())
    scheduler.add([request(prompt=130, max_tokens=3)])
    first = scheduler.schedule()
    (piece,) = first.slices
    assert (piece.kind, piece.start, len(piece.tokens), piece.blocks) == ("prefill", 0, 130, (0, 1, 2))
    assert (piece.fresh, piece.sample) == (True, True)
    (output,) = scheduler.update(answer(first, 40))
    assert (output.tokens, output.finish, output.record) == ((40,), None, None)
    second = scheduler.schedule()
    (piece,) = second.slices
    assert (piece.kind, piece.start, piece.tokens, piece.before) == ("decode", 130, (40,), (129, 128))
    assert (piece.blocks, piece.sampling) == ((), None)
    scheduler.update(answer(second, 41))
    (output,) = scheduler.update(answer(scheduler.schedule(), 42))
    assert (output.tokens, output.finish) == ((42,), "length")
    assert (output.record.prompt_tokens, output.record.generated_tokens, output.record.slices) == (130, 3, 1)
    assert not scheduler.has_work
    assert (scheduler.status.generated_tokens, scheduler.status.prompt_tokens, scheduler.status.steps) == (3, 130, 3)
    scheduler.add([request("b")])
    assert scheduler.schedule().forget == (0,)


def test_a_stop_id_is_the_last_token_and_is_named():
    service = Service(worker=False)
    service.add(request(stop=(7,), max_tokens=5))
    service.finish()
    output = service.ended["a"]
    assert (output.tokens, output.finish, output.stop_token) == ((7,), "stop", 7)


def test_a_length_names_no_stop_id():
    service = Service(worker=False)
    service.run(request(stop=(8,), max_tokens=2))
    assert service.ended["a"].stop_token is None


def test_the_model_length_ends_an_answer():
    service = Service()
    service.run(request(prompt=598, max_tokens=10))
    assert len(service.said["a"]) == 2
    assert service.ended["a"].finish == "length"


def test_decode_rows_come_first_and_cap_the_prompts():
    service = Service(num_blocks=40)
    service.add(request("short", 5, 20))
    service.step()
    service.add(request("long", text(1, 500), 1))
    assert rows(service.step()) == [(0, "decode", 1), (1, "prefill", 64)]


def test_alone_a_prompt_takes_the_whole_budget_down_to_the_grid():
    service = Service()
    service.add(request("long", 500, 1))
    assert rows(service.step()) == [(0, "prefill", 192)]


def test_a_short_prompt_fits_beside_a_long_one_that_must_wait_for_the_grid():
    service = Service(num_blocks=40, max_num_batched_tokens=260)
    service.add(request("a", text(1, 450), 1), request("b", text(2, 5), 1))
    assert rows(service.step()) == [(0, "prefill", 256)], "less than a chunk is left: nobody starts"
    service.step()
    service.finish()
    service.add(request("c", text(3, 150), 1), request("d", text(2, 5), 1))
    assert rows(service.step()) == [(2, "prefill", 150), (3, "prefill", 5)]


def test_a_long_prompt_leaves_room_for_others():
    service = Service(num_blocks=60, long_prefill=64, max_num_batched_tokens=200)
    service.add(request("a", text(1, 500), 9))
    assert rows(service.step()) == [(0, "prefill", 192)], "while it is alone it may have all"
    service.add(request("b", text(2, 100), 9))
    assert rows(service.step()) == [(0, "prefill", 64), (1, "prefill", 64)]
    assert rows(service.step()) == [(0, "prefill", 64), (1, "prefill", 36)]
    assert rows(service.step()) == [(1, "decode", 1), (0, "prefill", 64)]
    service.finish()


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
@pytest.mark.parametrize("longs", [1, 2, 3])
def test_a_short_prompt_starts_at_once_however_many_long_ones_run(longs, policy):
    """Most of a step goes to those that were first, a chunk of it to each of the others."""
    service = Service(
        worker=False, policy=policy, num_blocks=2000, max_num_batched_tokens=1024, prefill_cap=832, max_model_len=40_000, num_slots=40,
        max_num_seqs=5, long_prefill=512,
    )  # fmt: skip
    service.add(*(request(f"long {number}", text(number, 30_000), 4, priority=9) for number in range(longs)))
    service.steps(longs)
    assert len(service.scheduler.running) == longs
    service.add(request("short", text(50, 20), 2))
    assert (longs, "prefill", 20) in rows(service.step())
    service.add(request("middle", text(51, 300), 2))
    service.steps(6)
    assert {"short", "middle"} <= set(service.ended)


def test_where_a_step_has_one_chunk_those_that_run_have_it():
    service = Service(num_blocks=60, max_num_batched_tokens=68, prefill_cap=64)
    service.add(request("a", text(1, 200), 2))
    service.step()
    service.add(request("b", text(2, 5), 2))
    assert [rows(service.step()) for _ in range(2)] == [[(0, "prefill", 64)], [(0, "prefill", 64)]]
    assert rows(service.step()) == [(0, "prefill", 8)]


def test_choices_are_queued_together_or_not_at_all():
    scheduler = Scheduler(limits(max_num_seqs=2, max_queue=2, num_slots=2))
    scheduler.add([request(id) for id in "abc"])
    said = "for 2 more: 3 requests are waiting, the limit is 2 beside the 2 that the next step may start; try again"
    with pytest.raises(QueueFullError, match=said):
        scheduler.add([request("d"), request("e")])
    with pytest.raises(RequestError, match="'f' is already in use"):
        scheduler.add([request("f"), request("f")])
    with pytest.raises(ContextLengthError):
        scheduler.add([request("g"), request("h", 600)])
    with pytest.raises(RequestError, match="5 answers are asked for at once, the server never takes more than 4"):
        scheduler.add([request(id) for id in "defgh"])
    assert scheduler.live == ["a", "b", "c"]
    scheduler.add([request("d")])
    assert [each.number for each in scheduler.waiting] == [0, 1, 2, 3], "refused ones used no number"


def test_the_queue_is_bounded_beside_those_the_next_step_takes():
    service = Service(max_num_seqs=1, max_queue=2, num_slots=1)
    for id in "abc":
        service.add(request(id))
    with pytest.raises(QueueFullError, match="limit is 2"):
        service.add(request("d"))
    service.step()
    with pytest.raises(QueueFullError, match="limit is 2"):
        service.add(request("d"))
    service.finish()


def test_an_id_may_be_used_again_only_after_its_end():
    service = Service()
    service.add(request())
    with pytest.raises(RequestError, match="'a' is already in use"):
        service.add(request())
    service.abort("a")
    service.run(request())
    service.assert_empty()


def test_an_abort_ends_a_request_wherever_it_is():
    service = Service(max_num_seqs=1)
    service.add(request("runs", 300, 9), request("waits", 10))
    service.step()
    output = service.abort("runs")
    assert (output.finish, output.record.generated_tokens) == ("abort", 0)
    output = service.abort("waits")
    assert (output.finish, output.record) == ("abort", None), "it never ran"
    assert service.abort("waits") is None
    assert service.abort("unknown") is None
    service.assert_empty()


def test_nothing_is_aborted_preempted_or_reset_while_a_step_is_open():
    service = Service()
    service.add(request())
    plan = service.plan()
    scheduler = service.scheduler
    for call in (lambda: scheduler.abort("a"), scheduler.preempt_all, scheduler.reset_cache, scheduler.schedule):
        with pytest.raises(EngineError, match="step 0 has not been answered"):
            call()
    service.answer(plan)
    assert service.abort("a").finish == "abort"
    service.assert_empty()


def test_results_must_answer_the_plan():
    scheduler = Scheduler(limits())
    with pytest.raises(EngineError, match="the result of step 3 does not answer the plan None"):
        scheduler.update(StepResult(step=3, slices=()))
    scheduler.add([request()])
    plan = scheduler.schedule()
    for wrong in (StepResult(step=plan.step + 1, slices=answer(plan).slices), StepResult(step=plan.step, slices=())):
        with pytest.raises(EngineError, match="does not answer the plan 0"):
            scheduler.update(wrong)
    with pytest.raises(EngineError, match="a: 0 tokens for a slice that asks for one"):
        scheduler.update(StepResult(step=plan.step, slices=(SliceResult(0, ()),)))
    scheduler.fail("as the engine does then")
    scheduler.add([request("b", 300)])
    plan = scheduler.schedule()
    with pytest.raises(EngineError, match="b: 1 tokens for a slice that asks for none"):
        scheduler.update(StepResult(step=plan.step, slices=(SliceResult(1, (5,)),)))


def test_a_failure_ends_everybody_and_keeps_nothing():
    service = Service(max_num_seqs=2)
    service.run("before", prompt=200, max_tokens=70)
    service.add(request("a", text(1, 100), 9), request("b", text(2, 100), 9), request("waits", 9, 9))
    service.steps(3)
    service.plan()
    outputs = service.scheduler.fail("it broke")
    assert [(output.id, output.finish, output.error) for output in outputs] == [(id, "error", "it broke") for id in ("a", "b", "waits")]
    assert [output.record is not None for output in outputs] == [True, True, False]
    service.take(outputs)
    service.assert_empty()
    assert (service.status.blocks_cached, service.status.slots_cached) == (0, 0)
    record = service.run("after", prompt=200, max_tokens=2)
    assert (record.cached_tokens, record.miss) == (0, "cold")
    service.assert_solo("after")


def test_who_has_ended_in_a_step_that_fails_later_hears_of_its_own_end():
    scheduler = Scheduler(limits(max_num_batched_tokens=600))
    scheduler.add([request("a", text(1, 5), 1), request("b", text(2, 5), 9)])
    plan = scheduler.schedule()
    with pytest.raises(EngineError, match="b: 0 tokens"):
        scheduler.update(StepResult(step=plan.step, slices=(SliceResult(0, (5,)), SliceResult(1, ()))))
    assert scheduler.has_work
    outputs = scheduler.fail("it broke")
    assert [(output.id, output.finish) for output in outputs] == [("a", "length"), ("b", "error")]
    assert not scheduler.has_work


def test_an_answer_that_is_not_finite_fails_alone_and_its_path_is_forgotten():
    service = Service(num_blocks=40, max_num_batched_tokens=600)
    service.run("before", prompt=[*range(128), 1], max_tokens=1)
    service.add(request("a", [*range(128), *text(1, 100)], 9), request("b", text(2, 100), 9))
    service.steps(3)
    outputs = service.answer(service.plan(), corrupt={1})
    assert [(output.id, output.finish) for output in outputs] == [("a", "error"), ("b", None)]
    assert "not finite" in service.ended["a"].error
    assert service.ended["a"].record.generated_tokens == 3
    assert service.status.corrupted == 1
    service.finish()
    service.assert_solo("b")
    assert service.run("again", prompt=[*range(128), *text(1, 100)], max_tokens=1).cached_tokens == 0
    service.assert_solo("again")
    service.assert_empty()


def test_a_block_that_others_use_survives_the_fall_of_one():
    service = Service(num_blocks=40, max_num_batched_tokens=600)
    service.run("before", prompt=[*range(128), 1], max_tokens=1)
    service.add(request("a", [*range(128), *text(1, 100)], 9), request("b", [*range(128), *text(2, 100)], 9))
    service.step()
    service.answer(service.plan(), corrupt={1})
    service.finish()
    service.assert_solo("b")
    assert service.run("again", prompt=[*range(128), *text(2, 100)], max_tokens=1).cached_tokens == 192


def test_a_pause_keeps_new_requests_waiting():
    service = Service()
    service.add(request("a", 10, 5))
    service.step()
    service.scheduler.admitting = False
    service.add(request("b", text(2, 10), 3))
    for _ in range(4):
        assert [piece.request for piece in service.step().slices] == [0]
    assert service.step() is None
    assert service.scheduler.live == ["b"]
    service.scheduler.admitting = True
    service.finish()
    service.assert_empty()


def test_in_a_pause_those_that_were_preempted_go_on():
    service = Service()
    service.add(request("a", 10, 5))
    service.step()
    service.scheduler.preempt_all()
    service.add(request("b", text(2, 10), 3))
    service.scheduler.admitting = False
    while service.step() is not None:
        assert list(service.scheduler.running) in ([0], [])
    assert service.scheduler.live == ["b"]


def test_a_record_tells_the_times_of_the_first_start_and_the_first_token():
    service = Service(max_num_batched_tokens=67)
    service.add(request("a", 100, 4), now=1.0)
    service.step(now=3.0)
    service.answer(service.plan(now=4.0), now=5.5)
    service.scheduler.preempt_all()
    service.answer(service.plan(now=6.0), now=7.0)
    for _ in range(3):
        service.answer(service.plan(now=8.0), now=9.5)
    record = service.ended["a"].record
    assert (record.queue_seconds, record.prefill_seconds, record.decode_seconds) == (2.0, 2.5, 4.0)
    assert (record.preemptions, record.slices) == (1, 3)


def test_the_work_of_a_step_does_not_grow_with_the_context():
    class Watched(list):
        copied = 0

        def __getitem__(self, index):
            item = super().__getitem__(index)
            Watched.copied += len(item) if isinstance(index, slice) else 1
            return item

        def __iter__(self):
            raise AssertionError("a context is walked")

    service = Service(worker=False, max_model_len=100_000, num_blocks=2000, max_num_batched_tokens=100_000)
    service.add(request("a", 50_000, 200))
    service.step()
    live = service.scheduler.running[0]
    live.tokens, live.keys = Watched(live.tokens), Watched(live.keys)
    for _ in range(130):
        service.scheduler.update(answer(service.scheduler.schedule()))
    assert Watched.copied <= 130 * 5 + 2 * 70, "a few ids a row, and once a block"

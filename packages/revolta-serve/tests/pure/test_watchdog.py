"""A running request that others pass by for too long: it is noticed, preempted, and the second time given up."""

import logging

from support.steps import Service, request, text


def passed_by(**changes):
    """Two long prompts take all that a step has for prompts while a third one answers: the fourth request gets no row."""
    service = Service(
        max_num_seqs=4, num_blocks=120, max_model_len=2000, max_num_batched_tokens=260, prefill_cap=64, long_prefill=64,
        policy="priority", **changes,
    )  # fmt: skip
    service.add(request("late", text(9, 400), 3, priority=1), *first(0))
    service.step()
    assert len(service.scheduler.running) == 4
    return service


def first(number):
    return [request(f"{name} {number}", text(20 * number + place, length), answer, priority=0)
            for place, (name, length, answer) in enumerate((("long", 1500, 1), ("other", 1500, 1), ("answers", 5, 300)))]  # fmt: skip


def late(service):
    return next(each for each in service.scheduler.running.values() if each.source.id == "late")


def test_a_request_that_is_left_out_counts_the_steps():
    service = passed_by(stall_steps=100)
    service.steps(19)
    assert (late(service).skipped, service.status.stalled) == (19, 0)
    service.step()
    assert (late(service).skipped, service.status.stalled) == (20, 2), "the second of the long ones waits for the first"


def test_a_row_ends_the_count():
    service = passed_by(stall_steps=100)
    service.steps(8)
    service.abort("long 0")
    service.abort("other 0")
    service.step()
    assert late(service).skipped == 0


def test_it_is_preempted_and_then_given_up(caplog):
    service = passed_by(stall_steps=5)
    caplog.set_level(logging.ERROR)
    service.steps(5)
    assert service.scheduler.live[0] == "late"
    assert not any(each.source.id == "late" for each in service.scheduler.running.values())
    assert any("request late: no row in 5 steps, other prompts took" in line for line in caplog.messages)
    for id in list(service.scheduler.live):
        if id != "late":
            service.abort(id)
    service.add(*first(1))
    service.step()
    assert late(service).preemptions == 1
    service.steps(5)
    output = service.ended["late"]
    assert (output.finish, output.error) == ("error", "the request made no progress in 5 steps, twice; it was given up")
    assert output.record.preemptions == 1
    service.finish()
    service.assert_empty()


def test_those_that_get_their_rows_are_left_alone():
    service = passed_by(stall_steps=5)
    service.abort("late")
    service.abort("other 0")
    service.finish()
    assert service.status.preemptions == 0
    assert (service.ended["long 0"].finish, service.ended["answers 0"].finish) == ("length", "length")

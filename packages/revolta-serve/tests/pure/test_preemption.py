"""Those that go last give way, come back from their own states, and nothing they say tells of it."""

import pytest

from revolta_serve.types import SamplingParams
from support.steps import Service, request, text


def crowd(**changes):
    """Three answers that outgrow the blocks there are."""
    service = Service(**{"num_blocks": 6, "max_num_seqs": 3, "num_slots": 9, **changes})
    service.add(*(request(id, text(place, 60), 200) for place, id in enumerate("abc")))
    return service


def test_the_last_by_arrival_gives_way_and_everybody_ends():
    service = crowd()
    service.step()
    while not service.status.preemptions:
        service.step()
    assert [each.number for each in service.scheduler.running.values()] == [0, 1]
    assert service.status.blocks_used == 6
    service.finish()
    service.assert_empty()
    assert [service.ended[id].record.preemptions > 0 for id in "abc"] == [False, True, True]
    for id in "abc":
        service.assert_solo(id)


def test_the_last_by_priority_gives_way():
    service = Service(num_blocks=6, max_num_seqs=3, num_slots=9, policy="priority")
    service.add(*(request(id, text(place, 60), 200, priority=-place) for place, id in enumerate("abc")))
    service.finish()
    assert [service.ended[id].record.preemptions > 0 for id in "abc"] == [True, True, False]
    for id in "abc":
        service.assert_solo(id)


def test_a_prompt_takes_blocks_from_answers_behind_it():
    service = Service(num_blocks=8, max_num_seqs=3, max_num_batched_tokens=200, prefill_cap=64, policy="priority")
    service.add(request("late", text(2, 60), 300, priority=1))
    service.step()
    service.add(request("first", text(1, 400), 9, priority=0))
    while not service.status.preemptions:
        service.step()
    assert service.status.preemptions_in_prefill == 0
    service.finish()
    for id in ("late", "first"):
        service.assert_solo(id)


def test_a_prompt_behind_gives_way_to_an_answer():
    service = Service(num_blocks=8, max_num_seqs=3, max_num_batched_tokens=200, prefill_cap=64)
    service.add(request("first", text(1, 60), 300))
    service.step()
    service.add(request("late", text(2, 440), 9))
    service.step()
    # Seven blocks are promised to the prompt; the answer needs its second before they are handed out.
    service.finish()
    record = service.ended["late"].record
    assert service.status.preemptions_in_prefill == record.preemptions > 0
    for id in ("late", "first"):
        service.assert_solo(id)
    service.assert_empty()


def test_those_that_come_back_go_before_new_ones():
    service = Service(max_num_seqs=2)
    service.add(request("a", text(1, 10), 20), request("b", text(2, 10), 20))
    service.step()
    service.add(request("new", text(3, 10), 2))
    service.scheduler.preempt_all()
    assert service.scheduler.live == ["a", "b", "new"]
    assert [each.source.id for each in service.scheduler.waiting] == ["a", "b", "new"]
    service.step()
    assert sorted(service.scheduler.running) == [0, 1]
    service.finish()


def test_one_that_comes_back_is_introduced_anew():
    service = Service()
    service.add(request("a", 70, 20))
    service.steps(3)
    service.scheduler.preempt_all()
    plan = service.plan()
    assert plan.forget == (0,)
    (piece,) = plan.slices
    assert piece.sampling is not None
    assert (piece.kind, piece.start, piece.tokens, piece.sample) == ("prefill", 64, tuple(range(64, 70)), False)
    assert (len(piece.blocks), piece.restore >= 0) == (2, True)
    service.answer(plan)
    (piece,) = service.step().slices
    assert (piece.kind, piece.start, len(piece.tokens), piece.sample) == ("decode", 70, 3, True), "two said before, and the next"
    service.finish()
    service.assert_solo("a")


def test_known_rows_come_several_a_step_and_say_nothing():
    service = Service(width=8, num_slots=1)  # no slot for a snapshot: it begins from nothing
    service.add(request("a", 10, 40))
    service.steps(20)
    before = service.status
    service.scheduler.preempt_all()
    plans = service.steps(4)
    rows = [(piece.kind, len(piece.tokens), piece.sample) for plan in plans for piece in plan.slices]
    assert rows == [("prefill", 10, False), ("decode", 8, False), ("decode", 8, False), ("decode", 4, True)]
    assert service.status.replayed_tokens == 19
    assert service.status.generated_tokens == before.generated_tokens + 1
    service.finish()
    service.assert_solo("a")


def test_a_replay_leaves_a_row_to_everybody_else():
    service = Service(max_num_seqs=3, max_num_batched_tokens=67, num_slots=3)
    service.add(*(request(id, text(place, 10), 60) for place, id in enumerate("abc")))
    service.steps(40)
    service.scheduler.preempt_all()
    for _ in range(12):
        plan = service.step()
        assert {piece.request for piece in plan.slices} == set(service.scheduler.running)
    service.finish()
    for id in "abc":
        service.assert_solo(id)


def test_a_replay_of_many_leaves_a_row_to_each():
    service = Service(max_num_seqs=40, max_num_batched_tokens=104, num_blocks=80, num_slots=40)
    service.add(*(request(str(number), [number], 30) for number in range(40)))
    service.steps(15)
    service.scheduler.preempt_all()
    plans = [service.step() for _ in range(4)]
    assert [len(plan.slices) for plan in plans] == [40] * 4
    assert max(len(piece.tokens) for plan in plans for piece in plan.slices) == 8
    service.finish()
    for number in range(40):
        service.assert_solo(str(number))


def test_nobody_starts_in_the_step_in_which_somebody_gives_way():
    service = crowd()
    service.step()
    service.add(request("small", text(9, 5), 2))
    plan = None
    while not service.status.preemptions:
        plan = service.step()
    assert [piece.sampling for piece in plan.slices] == [None, None]
    assert service.status.waiting == 2
    service.finish()
    service.assert_empty()


def test_an_answer_comes_back_from_its_rolling_snapshot():
    service = Service()
    service.add(request("a", 10, 200))
    service.steps(140)
    each = service.scheduler.running[0]
    assert (each.computed, each.rolling_at) == (149, 128)
    service.scheduler.preempt_all()
    (piece,) = service.step().slices
    assert (piece.kind, piece.start, piece.restore, len(piece.tokens)) == ("decode", 128, each.tip.slot, 8)
    service.finish()
    assert service.status.replayed_tokens == 21
    assert service.status.rolling_lost == 0
    service.assert_solo("a")


def test_a_rolling_snapshot_that_was_evicted_meanwhile_is_counted():
    service = Service(max_num_seqs=1, num_slots=3, policy="priority")
    service.add(request("a", 10, 200, priority=1))
    service.steps(140)
    service.scheduler.preempt_all()
    service.add(request("between", text(2, 200), 2, priority=0, boundaries=(64, 128), opening=64))
    service.finish()
    assert service.status.rolling_lost == 1
    for id in ("a", "between"):
        service.assert_solo(id)


def test_a_rolling_snapshot_whose_first_state_was_only_planned_is_none():
    service = Service(num_blocks=9, max_num_seqs=3, policy="priority", max_num_batched_tokens=200)
    service.add(request("late", text(1, 100), 100, priority=1))
    service.steps(20)
    late = service.scheduler.running[0]
    assert late.computed == 119
    service.add(request("grows", text(2, 60), 30, priority=0))
    service.steps(3)
    service.add(request("prompt", text(3, 380), 2, priority=0))
    service.steps(5)
    assert (late.computed, late.rolling) == (127, -1)
    service.scheduler.storage.cache.give_up(late.tip)  # the state of its prompt has made room for another one
    # In this step it would reach the grid for the first time, but the prompt needs its last block, which the other answer has taken.
    plan = service.step()
    assert ([piece.request for piece in plan.slices], service.status.preemptions) == ([1, 2], 1)
    assert [node.depth for node in service.scheduler.storage.cache.snapshots] == [5], "of the other prompt"
    service.finish()
    for id in ("late", "grows", "prompt"):
        service.assert_solo(id)


@pytest.mark.parametrize("generated", [True, False])
def test_a_preempted_request_resumes_from_its_own_answer_whatever_others_may(generated):
    service = Service(generated=generated)
    service.add(request("a", 10, 200))
    service.steps(140)
    service.scheduler.preempt_all()
    assert service.step().slices[0].start == 128
    service.finish()
    service.assert_solo("a")


def test_with_the_cache_off_a_preempted_request_still_finds_its_own_work():
    service = Service(prefix=False)
    service.add(request("a", 200, 100))
    service.steps(80)
    service.scheduler.preempt_all()
    assert service.step().slices[0].start == 256
    service.finish()
    service.assert_solo("a")


def test_a_prompt_that_is_preempted_on_the_grid_goes_on_where_it_was():
    service = Service(num_blocks=20)
    service.add(request("a", 500, 9))
    service.step()
    service.scheduler.preempt_all()
    assert service.status.snapshots_stored == 1
    plan = service.step()
    assert (plan.slices[0].start, len(plan.slices[0].tokens)) == (192, 192)
    service.finish()
    assert service.status.prompt_tokens == 500
    assert service.ended["a"].record.slices == 3
    service.assert_solo("a")


def test_after_a_reset_all_is_computed_again():
    service = Service()
    service.add(request("a", 100, 100))
    service.steps(80)
    service.scheduler.preempt_all()
    service.scheduler.reset_cache()
    assert service.step().slices[0].start == 0
    service.finish()
    service.assert_solo("a")
    record = service.ended["a"].record
    assert (record.preemptions, record.seamless, record.cached_tokens) == (1, True, 0)


def test_a_request_that_has_reused_another_answer_comes_back_along_its_path():
    service = Service(num_blocks=40)
    service.run("first", prompt=100, max_tokens=100)
    prompt = [*range(100), *service.said["first"], 1, 2, 3]
    service.add(request("next", prompt, 100))
    service.steps(80)
    assert service.scheduler.running[1].cached == 192
    said = list(service.said["next"])
    service.scheduler.preempt_all()
    assert service.step().slices[0].start == 256
    service.finish()
    other = Service(num_blocks=40)
    other.run("first", prompt=100, max_tokens=100)
    other.run("next", prompt=prompt, max_tokens=100)
    assert other.said["next"] == service.said["next"]
    assert service.said["next"][: len(said)] == said
    assert not service.ended["next"].record.seamless


def test_one_that_may_not_use_answers_does_not_take_its_own_prompt_from_an_answer():
    service = Service(num_blocks=40)
    service.run("first", prompt=100, max_tokens=100)
    prompt = [*range(100), *service.said["first"], 1, 2, 3]
    service.add(request("other", prompt, 50, cache_salt="its own"))
    service.steps(10)
    service.scheduler.preempt_all()
    assert service.step().slices[0].start == 192, "its own snapshot, not that of the answer"
    service.finish()
    service.assert_solo("other")


def test_an_aborted_request_that_waits_to_come_back_leaves_nothing():
    service = Service()
    service.add(request("a", 100, 100))
    service.steps(30)
    service.scheduler.preempt_all()
    assert service.abort("a").record.preemptions == 1
    service.assert_empty()


def test_penalties_are_rebuilt_from_what_was_said():
    service = Service()
    service.add(request("a", 100, 60, sampling=SamplingParams(seed=3, repetition_penalty=1.2)))
    service.steps(30)
    service.scheduler.preempt_all()
    said = tuple(service.said["a"])
    (piece,) = service.step().slices
    assert (piece.history.prompt, piece.history.answer) == (tuple(range(100)), said)
    service.finish()
    service.assert_solo("a")


def test_a_rolling_snapshot_that_a_reset_forgets_was_not_evicted():
    service = Service(max_num_seqs=1, num_slots=3)
    service.add(request("a", 10, 200))
    service.steps(140)
    service.scheduler.preempt_all()
    service.scheduler.reset_cache()
    service.finish()
    assert (service.status.rolling_lost, service.status.snapshots_evicted) == (0, 0)
    service.assert_solo("a")


@pytest.mark.parametrize("now", [10.0, 1000.0])
def test_the_wait_of_a_preempted_request_begins_when_it_is_preempted(now):
    """However long ago it came, others may overtake it for a while."""
    service = Service(num_blocks=16, max_num_batched_tokens=1000, prefill_cap=960, max_model_len=900, max_num_seqs=4, num_slots=12)
    service.add(request("first", text(1, 190), 130), now=0.0)
    service.step(now=0.0)
    service.add(request("big", text(2, 765), 60), now=0.0)
    service.step(now=0.0)
    while not service.status.preemptions:
        service.step(now=now)
    service.add(request("small", text(3, 20), 2), now=now)
    for _ in range(3):
        service.step(now=now)
    assert "small" in service.ended
    service.add(request("late", text(4, 20), 2), now=now + 61)
    for _ in range(3):
        service.step(now=now + 61)
    assert "late" not in service.ended, "nobody overtakes who has waited for a minute"
    service.finish()

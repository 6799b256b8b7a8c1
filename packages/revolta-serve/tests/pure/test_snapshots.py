"""Where states are stored: at what positions of a prompt, in whose slots, and while an answer is written."""

from support.steps import Service, request, text


def places(service, plan):
    """Positions of the snapshots that a plan orders, by request."""
    return {piece.request: [piece.start + rows for rows, _ in piece.snapshots] for piece in plan.slices}


def wide(**changes):
    return Service(**{"max_num_batched_tokens": 5000, "prefill_cap": 4096, "max_model_len": 4000, "num_blocks": 80, **changes})


def test_states_are_wanted_at_the_boundaries_and_at_the_end():
    service = wide()
    service.add(request("a", 500, 5, boundaries=(70, 300, 330, 500)))
    assert places(service, service.step()) == {0: [64, 256, 320, 448]}


def test_a_prompt_that_ends_on_the_grid_has_two_ends():
    service = wide()
    service.add(request("a", 256, 5))
    assert places(service, service.step()) == {0: [192, 256]}, "the same prompt resumes from the first, a longer one from the second"


def test_positions_within_the_first_block_or_behind_the_prompt_are_none():
    service = wide()
    service.add(request("a", 100, 5, boundaries=(1, 63, 100)))
    assert places(service, service.step()) == {0: [64]}


def test_what_is_reused_is_not_stored_again():
    service = wide()
    service.run("first", prompt=300, max_tokens=1)
    service.add(request("a", [*range(300), *text(1, 100)], 5, boundaries=(200, 256, 330)))
    assert places(service, service.step()) == {1: [320, 384]}


def test_what_is_there_already_takes_no_slot_again():
    service = wide()
    service.run("first", prompt=300, max_tokens=1, boundaries=(100,), opening=100)
    service.add(request("a", 300, 5, boundaries=(100,), prompt_logprobs=0))
    assert places(service, service.step()) == {1: []}


def test_where_an_earlier_prompt_parted_a_state_is_wanted():
    service = wide()
    service.run("first", prompt=500, max_tokens=1)
    service.add(request("a", [*range(200), *text(1, 100)], 5))
    assert places(service, service.step()) == {1: [192, 256]}


def test_snapshots_are_ordered_with_the_slice_that_passes_them():
    service = wide(max_num_batched_tokens=200)
    service.add(request("a", 500, 5, boundaries=(64, 130, 192, 300)))
    plans = service.steps(3)
    assert [places(service, plan)[0] for plan in plans] == [[64, 128, 192], [256], [448]]
    assert [len(plan.slices[0].tokens) for plan in plans] == [192, 192, 116], "and no slice is cut for one"


def test_a_slice_stores_sixteen_states_at_most_the_important_ones_first():
    service = wide(num_slots=60)
    service.add(request("a", 3000, 5, boundaries=tuple(range(100, 3000, 64)), opening=100))
    stored = places(service, service.step())[0]
    assert len(stored) == 16
    assert stored[0] == 64, "the opening"
    assert stored[-15:] == [2944 - 64 * back for back in range(14, -1, -1)]
    assert service.status.snapshots_skipped == 46 - 16


def test_without_a_slot_a_snapshot_is_skipped():
    service = wide(num_slots=1, max_num_seqs=1)
    service.run("a", prompt=300, max_tokens=100, boundaries=(100,), opening=100)
    assert service.status.snapshots_stored == 0
    assert service.status.snapshots_skipped == 2 + 2, "two of the prompt, and two grid positions of the answer"
    service.assert_solo("a")


def test_only_the_opening_and_the_ends_are_worth_the_tip_of_another_conversation():
    service = wide(num_slots=3, max_num_seqs=1)
    service.run("old", prompt=text(1, 200), max_tokens=1)
    service.run("older", prompt=text(2, 200), max_tokens=1)
    assert service.status.slots_cached == 2
    service.add(request("a", 500, 5, boundaries=(100, 300, 400), opening=100))
    assert places(service, service.step()) == {2: [64, 448]}
    assert (service.status.snapshots_evicted, service.status.snapshots_skipped) == (2, 2)


def test_a_boundary_in_the_middle_takes_what_is_superseded():
    service = wide(num_slots=5, max_num_seqs=1)
    for length in (300, 400, 500):
        service.run("old", prompt=text(1, length), max_tokens=1, boundaries=(100,), opening=100)
    assert service.status.slots_cached == 4, "of which three are superseded"
    service.add(request("a", 500, 5, boundaries=(100, 300), opening=100))
    assert places(service, service.step()) == {3: [64, 256, 448]}


def test_a_rolling_snapshot_is_rewritten_at_every_grid_position():
    service = wide(max_model_len=600)
    service.add(request("a", 100, 200))
    stored = [
        (place, piece.snapshots[0][1])
        for plan in service.steps(180)
        for piece in plan.slices
        for place in places(service, plan)[0]
        if piece.snapshots
    ]
    assert [place for place, _ in stored] == [64, 128, 192, 256]
    assert len({slot for _, slot in stored[1:]}) == 1
    assert service.scheduler.running[0].rolling_at == 256
    assert service.status.snapshots_stored == 1, "in the index it is only when the request ends"
    service.abort("a")
    assert service.status.snapshots_stored == 2


def test_a_rolling_snapshot_takes_no_slot_from_a_conversation():
    service = wide(num_slots=2, max_num_seqs=1, max_model_len=600)
    service.run("tip", prompt=text(1, 100), max_tokens=1)
    service.run("a", prompt=10, max_tokens=100)
    assert service.status.snapshots_evicted == 0
    assert service.status.snapshots_skipped == 1
    assert service.run("tip again", prompt=text(1, 100)).cached_tokens == 64


def test_a_rolling_snapshot_takes_the_slot_of_an_answer_nobody_came_back_to():
    service = wide(num_slots=2, max_num_seqs=1, max_model_len=600)
    service.run("answer", prompt=text(1, 10), max_tokens=100)
    assert service.status.slots_cached == 1
    service.run("a", prompt=10, max_tokens=100)
    assert service.status.snapshots_evicted == 1
    assert service.run("next", prompt=[*range(10), *service.said["a"]]).cached_tokens == 64


def test_the_state_that_others_will_start_from_is_not_given_up_for_the_rest_of_the_prompt_and_its_answer():
    service = wide(num_slots=3, max_num_seqs=1, max_num_batched_tokens=200, max_model_len=600)
    service.run("old", prompt=text(1, 200), max_tokens=1)
    service.run("older", prompt=text(2, 200), max_tokens=1)
    service.run("a", prompt=400, max_tokens=100, boundaries=(130,), opening=130)
    assert service.status.slots_cached == 2
    assert service.run("sibling", prompt=[*range(130), *text(3, 100)]).cached_tokens == 128


def test_where_there_is_one_slot_for_states_the_last_one_of_a_prompt_has_it():
    service = wide(num_slots=2, max_num_seqs=1, max_num_batched_tokens=200, max_model_len=600)
    service.run("a", prompt=400, max_tokens=100, boundaries=(130,), opening=130)
    assert service.run("a again", prompt=400).cached_tokens == 384


def test_a_rolling_snapshot_leaves_an_answer_that_somebody_came_back_to():
    service = wide(num_slots=2, max_num_seqs=1, max_model_len=600)
    service.run("answer", prompt=text(1, 10), max_tokens=100)
    next_prompt = [*text(1, 10), *service.said["answer"][:60]]
    assert service.run("next", prompt=next_prompt, max_tokens=1).cached_tokens == 64
    service.run("a", prompt=10, max_tokens=100)
    assert service.status.snapshots_evicted == 0
    assert service.run("next again", prompt=next_prompt).cached_tokens == 64


def test_a_state_that_another_one_has_stored_meanwhile_is_not_stored_twice():
    service = wide(num_slots=12)
    for id in "ab":
        service.add(request(id, 300, 3, prompt_logprobs=0))
    plan = service.step()
    assert places(service, plan) == {0: [256], 1: [256]}
    assert (service.status.snapshots_stored, service.status.slots_cached) == (1, 1)
    service.finish()
    service.assert_empty()


def test_a_new_snapshot_of_a_conversation_takes_the_slot_of_the_one_before():
    service = wide(num_slots=3, max_num_seqs=1)
    service.run("other", prompt=text(1, 200), max_tokens=1)
    service.run("a", prompt=200, max_tokens=1)
    service.run("b", prompt=300, max_tokens=1)
    assert service.ended["b"].record.cached_tokens == 192
    assert service.status.snapshots_evicted == 1
    assert service.run("other again", prompt=text(1, 200)).cached_tokens == 192


def test_the_opening_is_kept_wherever_it_lies_between_the_boundaries():
    service = wide(num_slots=3, max_num_seqs=1)
    service.run("old", prompt=text(1, 200), max_tokens=1)
    service.run("older", prompt=text(2, 200), max_tokens=1)
    service.add(request("a", 500, 5, boundaries=(100, 300, 400), opening=300))
    assert places(service, service.step()) == {2: [256, 448]}


def test_the_end_of_a_prompt_on_the_grid_is_kept_in_a_full_cache():
    """So is the grid position before it, from which the same prompt resumes: it needs a row to compute."""
    service = wide(num_slots=3, max_num_seqs=1)
    service.run("old", prompt=text(1, 200), max_tokens=1)
    service.run("older", prompt=text(2, 200), max_tokens=1)
    service.run("turn", prompt=256, max_tokens=1)
    assert service.run("again", prompt=256, max_tokens=1).cached_tokens == 192
    assert service.run("next", prompt=300, max_tokens=1).cached_tokens == 256

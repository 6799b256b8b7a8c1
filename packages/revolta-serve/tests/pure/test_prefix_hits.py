"""What a new request reuses, why it was not more, and whom it waits for."""

import pytest

from revolta_serve.cache.retention import UNPROVEN
from support.steps import Service, request, text


def hit(record):
    return record.cached_tokens, record.seamless, record.miss


def test_a_prompt_is_reused_up_to_the_last_grid_position_before_its_end():
    service = Service(max_num_batched_tokens=600)
    assert hit(service.run("cold", prompt=200)) == (0, True, "cold")
    assert hit(service.run("again", prompt=200)) == (192, True, "none")
    assert hit(service.run("longer", prompt=230)) == (192, True, "none")
    assert (service.status.prefix_queries, service.status.prefix_hits) == (630, 384)
    for id in ("cold", "again", "longer"):
        service.assert_solo(id)


@pytest.mark.parametrize("length", [65, 127, 128, 129])
def test_one_token_at_least_is_computed(length):
    service = Service()
    service.run("cold", prompt=length)
    assert service.run("again", prompt=length).cached_tokens == (length - 1) // 64 * 64
    service.assert_solo("again")


def test_an_answer_is_reused_by_the_prompt_that_contains_it():
    service = Service()
    service.run("first", prompt=100, max_tokens=100)
    prompt = [*range(100), *service.said["first"], 1, 2, 3]
    assert hit(service.run("next", prompt=prompt)) == (192, False, "none")
    assert service.status.generated_hits == 1
    assert service.run("once more", prompt=prompt).cached_tokens == 192


def test_where_answers_may_not_be_reused_only_prompts_are():
    service = Service(generated=False)
    service.run("first", prompt=100, max_tokens=100)
    assert service.status.slots_cached == 1, "of the prompt; an answer's end is not kept"
    prompt = [*range(100), *service.said["first"], 1, 2, 3]
    assert hit(service.run("next", prompt=prompt)) == (64, True, "no_snapshot")
    service.assert_solo("next")
    assert hit(service.run("after it", prompt=[*prompt, 5])) == (192, True, "none"), "computed as a prompt by now"
    service.assert_solo("after it")


def test_a_deeper_state_over_generated_text_is_left_aside_and_named():
    service = Service(generated=False, num_blocks=40)
    service.add(request("first", 100, 150))
    service.steps(100)
    service.scheduler.preempt_all()  # this leaves the state of the answer for itself
    prompt = [*range(100), *service.said["first"][:95], 1]
    service.add(request("next", prompt, 2))
    service.finish()
    assert hit(service.ended["next"].record) == (64, True, "generated_off")
    service.assert_solo("next")


def test_of_a_seamless_state_and_another_one_as_deep_the_seamless_one_is_taken():
    service = Service(num_blocks=40)
    service.run("first", prompt=100, max_tokens=100)
    prompt = [*range(100), *service.said["first"], 1, 2, 3]
    service.add(request("salted", prompt, 2, prompt_logprobs=0))  # reads nothing, so it computes all of it as a prompt
    service.finish()
    assert hit(service.run("next", prompt=prompt)) == (192, True, "none")
    service.assert_solo("next")


@pytest.mark.parametrize(("length", "miss"), [(1, "short"), (64, "short"), (65, "cold")])
def test_a_prompt_within_one_block_can_reuse_nothing(length, miss):
    assert Service().run("a", prompt=length).miss == miss


def test_with_the_cache_off_nothing_is_reused_and_nothing_stays():
    service = Service(prefix=False)
    assert hit(service.run("a", prompt=200, max_tokens=100)) == (0, True, "disabled")
    assert hit(service.run("b", prompt=200)) == (0, True, "disabled")
    assert (service.status.prefix_queries, service.status.prefix_hits) == (0, 0)
    assert (service.status.blocks_cached, service.status.slots_cached) == (0, 0)
    assert (service.status.blocks_evicted, service.status.snapshots_evicted) == (0, 0)
    service.add(request("c", 100, 70), request("d", 100, 70))
    service.finish()
    assert service.status.blocks_deduplicated == 0


def test_requests_that_ask_for_every_row_reuse_nothing():
    service = Service()
    service.run("a", prompt=200)
    assert hit(service.run("b", prompt=200, prompt_logprobs=0)) == (0, True, "disabled")
    assert service.status.prefix_queries == 200


def test_known_blocks_without_a_state_are_a_miss_of_their_own():
    service = Service(max_num_batched_tokens=600)
    service.run("first", prompt=300)
    record = service.run("fork", prompt=[*range(150), *text(1, 100)])
    assert hit(record) == (0, True, "no_snapshot")
    record = service.run("second fork", prompt=[*range(150), *text(2, 100)])
    assert hit(record) == (128, True, "none"), "where the first one parted there is a state now"
    service.assert_solo("second fork")


def test_what_was_evicted_is_told_from_what_is_new():
    service = Service(num_blocks=8)
    service.run("a", prompt=300)
    service.run("b", prompt=text(1, 450))
    assert service.run("a again", prompt=300).miss == "evicted"
    assert service.run("c", prompt=text(2, 100)).miss == "cold"


def test_a_reset_is_no_eviction():
    service = Service()
    service.run("a", prompt=300)
    result = service.scheduler.reset_cache()
    assert (result.blocks_freed, result.snapshots_freed, result.blocks_in_use) == (4, 1, 0)
    assert service.run("a again", prompt=300).miss == "cold"


def test_a_reset_leaves_running_requests_what_is_theirs():
    service = Service()
    service.run("before", prompt=text(1, 200))
    service.add(request("a", 200, 100))
    service.steps(20)
    result = service.scheduler.reset_cache()
    service.scheduler.audit()
    assert (result.blocks_freed, result.snapshots_freed, result.blocks_in_use) == (3, 2, 4)
    assert (service.status.blocks_cached, service.status.slots_cached) == (0, 0)
    service.finish()
    service.assert_solo("a")


def test_prompts_of_another_salt_share_nothing():
    service = Service()
    service.run("a", prompt=200, cache_salt="one")
    assert hit(service.run("b", prompt=200, cache_salt="two")) == (0, True, "cold")
    assert hit(service.run("c", prompt=200)) == (0, True, "cold")
    assert hit(service.run("d", prompt=200, cache_salt="one")) == (192, True, "none")


def test_misses_are_counted_by_their_reason():
    service = Service()
    service.run("a", prompt=200)
    service.run("b", prompt=200)
    service.run("c", prompt=10)
    service.run("d", prompt=text(1, 100))
    assert service.status.misses == {"cold": 2, "none": 1, "short": 1}


def test_an_aborted_prompt_leaves_what_it_has_computed():
    service = Service()
    service.add(request("a", 500, 9))
    service.steps(2)
    service.abort("a")
    service.assert_empty()
    assert hit(service.run("again", prompt=500)) == (384, True, "none")
    service.assert_solo("again")


def test_an_aborted_answer_leaves_its_last_state_on_the_grid():
    service = Service()
    service.add(request("a", 100, 300))
    service.steps(120)
    service.abort("a")
    assert service.run("next", prompt=[*range(100), *service.said["a"], 1]).cached_tokens == 192


@pytest.mark.parametrize("generated", [True, False])
def test_an_answer_that_ends_on_the_grid_leaves_its_running_state(generated):
    service = Service(generated=generated, num_slots=1)
    service.run("a", prompt=100, max_tokens=29)
    assert service.status.slots_cached == (1 if generated else 0)
    snapshots = service.scheduler.storage.cache.snapshots
    assert {snapshots.worth(node) for node in snapshots} == ({UNPROVEN} if generated else set())


def test_choices_of_one_prompt_wait_for_the_first_one():
    service = Service(max_num_batched_tokens=600, prefill_cap=512)
    service.add(*(request(f"n{choice}", 200, 5, seed=choice) for choice in range(3)))
    first = service.plan()
    assert [(piece.request, len(piece.tokens)) for piece in first.slices] == [(0, 200)]
    assert service.status.waiting_for_prefix == 2
    service.answer(first)
    assert service.status.waiting_for_prefix == 0
    second = service.step()
    assert [(piece.request, piece.kind, piece.start, len(piece.tokens)) for piece in second.slices] == [
        (0, "decode", 200, 1), (1, "prefill", 192, 8), (2, "prefill", 192, 8)
    ]  # fmt: skip
    service.finish()
    assert service.status.prompt_tokens == 216
    for choice in range(3):
        service.assert_solo(f"n{choice}")


def test_others_are_not_held_up_by_those_that_wait_for_a_prefix():
    service = Service(max_num_batched_tokens=600, prefill_cap=512, bypass_limit=0)
    service.add(request("a", 300, 5), request("same", 300, 5), request("other", text(1, 100), 5))
    assert [piece.request for piece in service.step().slices] == [0, 2]
    service.finish()


def test_when_the_one_it_waits_for_leaves_it_computes_for_itself():
    service = Service(max_num_batched_tokens=800, prefill_cap=64)
    service.add(request("answers", text(1, 5), 50))
    service.step()
    service.add(request("a", 500, 5), request("b", 500, 5))
    service.steps(2)
    assert [each.source.id for each in service.scheduler.waiting] == ["b"]
    service.abort("a")
    plan = service.step()
    assert [(piece.request, piece.start) for piece in plan.slices] == [(0, 7), (2, 128)], "from where the other one had come to"
    service.finish()
    service.assert_solo("b")


def test_nobody_waits_for_a_state_that_is_no_better_than_what_there_is():
    service = Service(max_num_batched_tokens=600, prefill_cap=512, num_blocks=60)
    service.run("before", prompt=130, max_tokens=1)
    service.add(request("a", [*range(130), *text(1, 200)], 5), request("b", [*range(130), *text(2, 200)], 5))
    assert [(piece.request, piece.start) for piece in service.step().slices] == [(1, 128), (2, 128)]


def test_a_stream_of_requests_that_read_nothing_does_not_starve_one_that_waits():
    service = Service(max_num_batched_tokens=300, prefill_cap=256, num_blocks=60, num_slots=20, long_prefill=64)
    service.add(request("rows 0", 500, 1, prompt_logprobs=0), request("waits", 501, 1))
    for number in range(1, 30):
        service.steps(4)
        service.add(request(f"rows {number}", 500, 1, prompt_logprobs=0))
        if "waits" in service.ended:
            break
    assert number <= 3
    service.finish()


def test_a_request_without_a_slot_for_its_snapshot_does_not_keep_others_waiting():
    service = Service(max_num_seqs=1, num_slots=1)
    service.add(request("a", 300, 5), request("b", 300, 5))
    service.finish()
    assert service.status.snapshots_skipped
    for id in "ab":
        service.assert_solo(id)


def test_another_one_that_leaves_does_not_end_the_wait_for_the_first_one():
    service = Service(max_num_seqs=4, max_num_batched_tokens=260, long_prefill=64, num_blocks=60)
    service.add(request("first", 500, 1, prompt_logprobs=0), request("second", 500, 1, prompt_logprobs=0), request("waits", 501, 1))
    service.steps(2)
    assert service.status.waiting_for_prefix == 1
    service.abort("second")
    service.step()
    assert service.status.waiting_for_prefix == 1
    service.finish()
    assert service.ended["waits"].record.cached_tokens == 448


def test_equal_blocks_are_kept_once():
    service = Service(max_num_seqs=2, num_blocks=40, max_num_batched_tokens=1200)
    for id in "ab":
        service.add(request(id, 300, 100, prompt_logprobs=0))  # neither waits nor reads
    plan = service.step()
    assert [piece.request for piece in plan.slices] == [0, 1]
    assert service.status.blocks_deduplicated == 4
    plan = service.step()
    assert [[place for place, _ in piece.swaps] for piece in plan.slices] == [[], [0, 1, 2, 3]]
    assert service.status.blocks_used == 4 + 2
    service.finish()
    assert service.status.blocks_deduplicated > 4, "equal answers too"
    for id in "ab":
        service.assert_solo(id)
    service.assert_empty()


def test_who_waits_for_blocks_looks_again_when_somebody_holds_its_prefix():
    """Then it needs only what comes after the prefix, which is there already."""
    service = Service(num_blocks=40, max_num_batched_tokens=4000, prefill_cap=4032, max_model_len=1280, max_num_seqs=6, num_slots=16)
    prefix = text(1, 256)
    service.run("before", prompt=prefix, max_tokens=1)
    for number, (length, answer) in enumerate([(1150, 120), (586, 180), (130, 3)]):
        service.add(request(f"other {number}", text(2 + number, length), answer))
        service.step()
    available = service.scheduler.storage.cache.num_available
    service.add(request("waits", [*prefix, *text(6, (available - 3) * 64 - 5)], 2))
    service.step()
    assert service.status.waiting == 1
    service.add(request("holds", [*prefix, 5, 6], 60))
    service.steps(5)
    assert service.status.waiting == 0
    assert "holds" not in service.ended

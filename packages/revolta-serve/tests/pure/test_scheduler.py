"""What the scheduler does in each situation, one by one."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from revolta_serve.errors import ContextLengthError, EngineError, QueueFullError, RequestError
from revolta_serve.model.model_config import GRID
from revolta_serve.scheduler.plan import before, prefill_rows
from revolta_serve.scheduler.scheduler import Scheduler
from revolta_serve.types import SliceResult, StepResult
from support.steps import MARK, answer, empty, limits, request, run


@given(remaining=st.integers(1, 10_000), room=st.integers(0, 10_000))
def test_a_chunk_ends_on_the_grid_or_with_the_prompt(remaining, room):
    rows = prefill_rows(remaining, room)
    assert 0 <= rows <= min(room, remaining)
    assert rows == remaining or rows % GRID == 0
    assert rows > min(room, remaining) - GRID


def test_the_ids_before_a_slice_are_newest_first():
    assert before([5, 6, 7], 0, 2, MARK) == (MARK, MARK)
    assert before([5, 6, 7], 1, 2, MARK) == (5, MARK)
    assert before([5, 6, 7], 3, 2, MARK) == (7, 6)
    assert before([5, 6, 7], 3, 4, MARK) == (7, 6, 5, MARK)


def test_a_request_from_first_to_last_step():
    scheduler = Scheduler(limits())
    scheduler.add([request(prompt=130, max_tokens=3)])
    first = scheduler.schedule()
    (piece,) = first.slices
    assert (piece.kind, piece.start, len(piece.tokens), piece.blocks) == ("prefill", 0, 130, (0, 1, 2))
    assert (piece.fresh, piece.sample) == (True, True)
    (output,) = scheduler.update(answer(first, 40))
    assert (output.tokens, output.finish) == ((40,), None)
    second = scheduler.schedule()
    (piece,) = second.slices
    assert (piece.kind, piece.start, piece.tokens, piece.before) == ("decode", 130, (40,), (129, 128))
    assert (piece.blocks, piece.sampling) == ((), None)
    scheduler.update(answer(second, 41))
    (output,) = scheduler.update(answer(scheduler.schedule(), 42))
    assert (output.tokens, output.finish) == ((42,), "length")
    assert empty(scheduler)
    assert scheduler.status.generated_tokens == 3
    assert scheduler.status.prompt_tokens == 130
    scheduler.add([request("b")])
    assert scheduler.schedule().forget == (0,)


def test_a_stop_id_is_the_last_token_and_is_named():
    scheduler = Scheduler(limits())
    scheduler.add([request(stop=(7,), max_tokens=1)])
    (output,) = run(scheduler)
    assert (output.tokens, output.finish, output.stop_token) == ((7,), "stop", 7)


def test_the_model_length_ends_an_answer():
    scheduler = Scheduler(limits())
    scheduler.add([request(prompt=598, max_tokens=10)])
    outputs = run(scheduler)
    assert sum(len(o.tokens) for o in outputs) == 2
    assert outputs[-1].finish == "length"


def test_decode_rows_come_first_and_cap_the_prompts():
    scheduler = Scheduler(limits(num_blocks=40))
    scheduler.add([request("short", 5, 20)])
    scheduler.update(answer(scheduler.schedule()))
    scheduler.add([request("long", 500, 1)])
    plan = scheduler.schedule()
    assert [(s.kind, len(s.tokens)) for s in plan.slices] == [("decode", 1), ("prefill", 64)]


def test_alone_a_prompt_takes_the_whole_budget_down_to_the_grid():
    scheduler = Scheduler(limits())
    scheduler.add([request("long", 500, 1)])
    assert [len(s.tokens) for s in scheduler.schedule().slices] == [192]


def test_a_short_prompt_fits_beside_a_long_one_that_must_wait_for_the_grid():
    scheduler = Scheduler(limits(num_blocks=40))
    for id, prompt in (("a", 500), ("b", 5)):
        scheduler.add([request(id, prompt, 1)])
    plan = scheduler.schedule()
    assert [(s.request, len(s.tokens)) for s in plan.slices] == [(0, 192), (1, 5)]


def test_nobody_overtakes_the_head_of_the_queue():
    scheduler = Scheduler(limits(num_blocks=10))
    scheduler.add([request("a", 400, 10)])
    scheduler.update(answer(scheduler.schedule()))
    scheduler.add([request("big", 400, 10)])
    scheduler.add([request("small", 5, 1)])
    while 0 in scheduler.running:
        assert scheduler.status.waiting == 2, "the small request could run now, but it came later"
        scheduler.update(answer(scheduler.schedule()))
    assert [s.request for s in scheduler.schedule().slices] == [1, 2]


def test_requests_without_a_limit_share_a_pool_that_holds_one_of_them():
    scheduler = Scheduler(limits(num_blocks=13, max_num_seqs=4))  # 600 tokens are 10 blocks
    scheduler.add([request(id, 5, 10_000) for id in "abcd"])
    scheduler.update(answer(scheduler.schedule()))
    for _ in range(59):
        plan = scheduler.schedule()
        assert [piece.request for piece in plan.slices] == [0, 1, 2, 3]
        scheduler.update(answer(plan))
    plan = scheduler.schedule()
    assert [piece.request for piece in plan.slices] == [0], "the second block of the others is one the oldest may need"
    assert scheduler.status.stalled == 3
    scheduler.update(answer(plan))
    scheduler.abort("a")
    assert scheduler.status.stalled == 3
    plan = scheduler.schedule()
    assert [(piece.request, piece.start) for piece in plan.slices] == [(1, 64), (2, 64)], "9 blocks for the oldest, one for the next"
    assert scheduler.status.stalled == 1
    scheduler.update(answer(plan))
    assert sum(o.finish == "length" for o in run(scheduler, steps=2000)) == 3
    assert empty(scheduler)
    assert scheduler.status.stalled == 0


def test_what_a_request_will_not_need_does_not_hold_others_up():
    scheduler = Scheduler(limits(num_blocks=4, max_num_seqs=3))
    scheduler.add([request(id, 60, 60) for id in "abc"])  # two blocks each at their longest
    scheduler.update(answer(scheduler.schedule()))
    assert (scheduler.status.running, scheduler.status.waiting) == (3, 0)
    assert sum(o.finish == "length" for o in run(scheduler)) == 3


def test_a_prompt_starts_only_when_it_may_have_all_its_blocks():
    scheduler = Scheduler(limits(num_blocks=12))
    scheduler.add([request("a", 5, 10_000)])
    scheduler.update(answer(scheduler.schedule()))
    scheduler.add([request("long", 190, 1), request("short", 5, 1)])
    while "a" in scheduler.live:
        plan = scheduler.schedule()
        assert [piece.request for piece in plan.slices] == [0], "two blocks are to spare, three are needed"
        scheduler.update(answer(plan))
    assert [(piece.request, len(piece.tokens)) for piece in scheduler.schedule().slices] == [(1, 190), (2, 5)]


def test_choices_are_queued_together_or_not_at_all():
    scheduler = Scheduler(limits(max_num_seqs=2, max_queue=2, num_slots=2))
    scheduler.add([request(id) for id in "abc"])
    with pytest.raises(QueueFullError, match="for 2 more: 3 requests are waiting, the limit is 2"):
        scheduler.add([request("d"), request("e")])
    with pytest.raises(RequestError, match="'f' is already in use"):
        scheduler.add([request("f"), request("f")])
    with pytest.raises(ContextLengthError):
        scheduler.add([request("g"), request("h", 600)])
    with pytest.raises(RequestError, match="5 answers are asked for at once, the server never takes more than 4"):
        scheduler.add([request(id) for id in "defgh"])
    assert scheduler.live == ["a", "b", "c"]
    scheduler.add([request("d")])
    assert [piece.request for piece in scheduler.schedule().slices] == [0, 1]
    assert list(scheduler.running) == [0, 1]
    assert [each.number for each in scheduler.waiting] == [2, 3], "refused ones used no number"


def test_the_queue_is_bounded():
    scheduler = Scheduler(limits(max_num_seqs=1, max_queue=2, num_slots=1))
    for id in "abc":
        scheduler.add([request(id)])
    with pytest.raises(QueueFullError, match="limit is 2"):
        scheduler.add([request("d")])


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"prompt": 0}, RequestError, "needs a prompt"),
        ({"max_tokens": 0}, RequestError, "max_tokens"),
        ({"prompt": 600}, ContextLengthError, "600 tokens, but the maximum context length is 600"),
        ({"prompt": 500, "max_tokens": 90}, ContextLengthError, "need 10 blocks of the 9"),
    ],
)
def test_what_can_never_run_is_refused(changes, error, message):
    scheduler = Scheduler(limits(num_blocks=9))
    with pytest.raises(error, match=message):
        scheduler.add([request(**changes)])
    assert empty(scheduler)


def test_an_id_may_be_used_again_only_after_its_end():
    scheduler = Scheduler(limits())
    scheduler.add([request()])
    with pytest.raises(RequestError, match="'a' is already in use"):
        scheduler.add([request()])
    scheduler.abort("a")
    scheduler.add([request()])


def test_nothing_is_aborted_while_a_step_is_open():
    scheduler = Scheduler(limits())
    scheduler.add([request()])
    plan = scheduler.schedule()
    with pytest.raises(EngineError, match="step 0 has not been answered"):
        scheduler.abort("a")
    scheduler.update(answer(plan))
    assert scheduler.abort("a").finish == "abort"
    assert empty(scheduler)


def test_results_must_answer_the_plan():
    scheduler = Scheduler(limits())
    scheduler.add([request()])
    plan = scheduler.schedule()
    with pytest.raises(EngineError, match="has not been answered"):
        scheduler.schedule()
    with pytest.raises(EngineError, match="does not answer"):
        scheduler.update(StepResult(step=plan.step + 1, slices=()))
    with pytest.raises(EngineError, match="0 tokens for a slice that asks for one"):
        scheduler.update(StepResult(step=plan.step, slices=(SliceResult(0, ()),)))
    scheduler.fail("as the engine does then")
    scheduler.add([request()])
    plan = scheduler.schedule()
    with pytest.raises(EngineError, match="2 tokens for a slice that asks for one"):
        scheduler.update(StepResult(step=plan.step, slices=(SliceResult(1, (5, 6)),)))


def test_the_work_of_a_step_does_not_grow_with_the_context(monkeypatch):
    class Watched(list):
        copied = 0

        def __getitem__(self, index):
            item = super().__getitem__(index)
            Watched.copied += len(item) if isinstance(index, slice) else 1
            return item

    scheduler = Scheduler(limits(max_model_len=100_000, num_blocks=2000, max_num_batched_tokens=100_000))
    scheduler.add([request("a", 50_000, 100)])
    scheduler.update(answer(scheduler.schedule()))
    live = scheduler.running[0]
    live.tokens = Watched(live.tokens)
    for _ in range(10):
        scheduler.update(answer(scheduler.schedule()))
    assert Watched.copied <= 10 * 3

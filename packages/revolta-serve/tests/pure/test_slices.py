"""Slices: how many prompt rows fit, which ids come before, what a worker is told when."""

from hypothesis import given
from hypothesis import strategies as st

from revolta_serve.cache.layout import blocks_for
from revolta_serve.model.model_config import GRID
from revolta_serve.scheduler.plan import before, make_slice, prefill_rows
from revolta_serve.scheduler.request import checked
from revolta_serve.types import History, SamplingParams
from support.steps import MARK, limits, request


@given(remaining=st.integers(1, 10_000), room=st.integers(0, 10_000))
def test_a_chunk_ends_on_the_grid_or_with_the_prompt(remaining, room):
    rows = prefill_rows(remaining, room)
    assert 0 <= rows <= min(room, remaining)
    assert rows == remaining or rows % GRID == 0
    assert rows > min(room, remaining) - GRID


def test_blocks_are_rounded_up():
    assert [blocks_for(tokens) for tokens in (0, 1, 64, 65, 128)] == [0, 1, 1, 2, 2]


def test_the_ids_before_a_slice_are_newest_first():
    assert before([5, 6, 7], 0, 2, MARK) == (MARK, MARK)
    assert before([5, 6, 7], 1, 2, MARK) == (5, MARK)
    assert before([5, 6, 7], 2, 2, MARK) == (6, 5)
    assert before([5, 6, 7, 8], 3, 2, MARK) == (7, 6)
    assert before([5, 6, 7], 3, 4, MARK) == (7, 6, 5, MARK)


def test_no_ids_are_asked_for_without_an_n_gram_hash():
    assert before([5, 6, 7], 3, 0, MARK) == ()
    assert before([5, 6, 7], 0, 0, MARK) == ()


def known(prompt=100, answer=0, *, computed=0, told=0, introduced=False, **fields):
    each = checked(3, request("a", prompt, 400, **fields), limits(), 0.0)
    each.tokens += range(1000, 1000 + answer)
    each.computed, each.told, each.introduced, each.slot = computed, told, introduced, 5
    return each


def cut(each, end, **fields):
    return make_slice(each, end, (), history=2, mark=MARK, **fields)


def test_the_first_slice_brings_what_the_worker_must_know():
    sampling = SamplingParams(seed=4)
    each = known(sampling=sampling)
    piece = cut(each, 64)
    assert (piece.request, piece.slot, piece.kind, piece.start, piece.tokens) == (3, 5, "prefill", 0, tuple(range(64)))
    assert (piece.fresh, piece.sample, piece.restore) == (True, False, -1)
    assert piece.sampling is sampling
    assert piece.history is None
    each.computed = 64
    piece = cut(each, 100)
    assert (piece.fresh, piece.sample, piece.sampling, piece.before) == (False, True, None, (63, 62))


def test_a_slice_after_the_prompt_is_an_answer_row():
    each = known(100, 1, computed=100, introduced=True)
    piece = cut(each, 101)
    assert (piece.kind, piece.tokens, piece.sample, piece.fresh) == ("decode", (1000,), True, False)


def test_only_the_last_known_row_samples():
    each = known(100, 10, computed=100, introduced=True)
    assert not cut(each, 108).sample
    assert cut(each, 110).sample
    each = known(100, 10, computed=64, introduced=True)
    assert not cut(each, 100).sample, "the end of the prompt is not the end of what is known"


def test_all_known_ids_come_with_parameters_that_depend_on_them():
    sampling = SamplingParams(frequency_penalty=0.5)
    piece = cut(known(70, 3, sampling=sampling), 70)
    assert piece.history == History(prompt=tuple(range(70)), answer=(1000, 1001, 1002))
    assert cut(known(70, 3, introduced=True, sampling=sampling), 70).history is None


def test_swaps_are_sent_once():
    each = known(computed=64, introduced=True)
    each.swaps = [(0, 9)]
    assert cut(each, 100).swaps == ((0, 9),)
    assert cut(each, 100).swaps == ()


def logprobs(*, start, end, told, length=100, answer=0):
    each = known(length, answer, computed=start, told=told, introduced=True, prompt_logprobs=1)
    piece = cut(each, end)
    return piece.logprobs_from, piece.next_token


def test_prompt_logprobs_are_asked_for_from_the_first_position_that_is_not_delivered():
    assert logprobs(start=0, end=64, told=0) == (0, 64)
    assert logprobs(start=64, end=100, told=64) == (0, -1)
    assert logprobs(start=64, end=100, told=80) == (16, -1)
    assert logprobs(start=0, end=64, told=64) == (-1, -1), "computed again, not delivered again"
    assert logprobs(start=64, end=100, told=99) == (-1, -1)
    assert logprobs(start=0, end=1, told=0, length=1) == (-1, -1), "the first token has no logprob"


def test_nobody_else_gets_prompt_logprobs():
    piece = cut(known(100), 100)
    assert (piece.logprobs_from, piece.next_token) == (-1, -1)

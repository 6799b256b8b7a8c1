"""What a request knows of itself: whether it can run, when its answer ends, the form of its blocks, what it has cost."""

import pytest

from revolta_serve.errors import ContextLengthError, RequestError
from revolta_serve.scheduler.request import checked
from revolta_serve.types import Repetition
from support.steps import limits, request


def admitted(prompt=100, max_tokens=50, number=3, now=0.0, changes=None, **fields):
    return checked(number, request("a", prompt, max_tokens, **fields), limits(**(changes or {})), now)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"prompt": 0}, RequestError, "needs a prompt and max_tokens of at least 1, got 0 and 50"),
        ({"max_tokens": 0}, RequestError, "got 100 and 0"),
        ({"prompt": 600}, ContextLengthError, "600 tokens, but the maximum context length is 600 with one token of answer"),
        ({"prompt": 500, "max_tokens": 78, "changes": {"num_blocks": 9}}, ContextLengthError, "578 tokens need 10 blocks of the 9"),
    ],
)
def test_what_can_never_run_is_refused(changes, error, message):
    with pytest.raises(error, match=message):
        admitted(**changes)


def test_the_last_token_needs_no_room():
    assert admitted(500, 77, changes={"num_blocks": 9}).stored_at_most == 576


def test_an_answer_ends_at_its_limit_or_the_models():
    assert admitted(100, 50).limit == 150
    assert admitted(599, 50).limit == 600


def test_priority_counts_only_where_the_policy_says_so():
    assert admitted(priority=7).order == (0, 3)
    assert admitted(priority=7, changes={"policy": "priority"}).order == (7, 3)


def test_a_stop_id_ends_an_answer_before_a_length_before_a_repetition():
    rule = Repetition(shortest=1, longest=1, count=2)
    each = admitted(5, 3, stop=(9,), repetition=rule)
    assert [each.append(token) for token in (1, 2, 9)] == [None, None, "stop"]
    each = admitted(5, 3, stop=(9,), repetition=rule)
    assert [each.append(token) for token in (1, 2, 2)] == [None, None, "length"]
    each = admitted(5, 4, stop=(9,), repetition=rule)
    assert [each.append(token) for token in (1, 2, 2)] == [None, None, "repetition"]


def test_a_prompt_that_repeats_itself_is_no_repetition():
    each = admitted([2, 2, 2], 9, repetition=Repetition(shortest=1, longest=1, count=2))
    assert [each.append(token) for token in (2, 3, 3)] == [None, None, "repetition"]


def test_the_form_of_a_block_is_its_share_of_the_prompt():
    each = admitted(100, 200)
    assert [each.form(block) for block in range(4)] == [64, 36, 0, 0]
    each.base_forms = (64, 10, 0)
    assert [each.form(block) for block in range(4)] == [64, 10, 0, 0]
    each = admitted(300)
    each.base_forms = (64, 10)
    assert [each.form(block) for block in range(6)] == [64, 10, 64, 64, 44, 0]


def test_a_record_says_what_a_request_has_cost():
    each = admitted(100, 50, now=10.0)
    record = each.record(12.0)
    assert (record.queue_seconds, record.prefill_seconds, record.decode_seconds) == (2.0, 0.0, 0.0)
    each.started = 13.0
    record = each.record(14.0)
    assert (record.queue_seconds, record.prefill_seconds, record.decode_seconds) == (3.0, 1.0, 0.0)
    each.answered = 15.5
    each.append(1)
    each.cached, each.seamless, each.miss, each.preemptions, each.slices = 64, False, "evicted", 2, 5
    record = each.record(20.0)
    assert (record.queue_seconds, record.prefill_seconds, record.decode_seconds) == (3.0, 2.5, 4.5)
    assert (record.prompt_tokens, record.generated_tokens, record.cached_tokens) == (100, 1, 64)
    assert (record.seamless, record.miss, record.preemptions, record.slices) == (False, "evicted", 2, 5)

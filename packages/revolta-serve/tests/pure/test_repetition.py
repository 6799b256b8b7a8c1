"""An answer caught in a loop: held against the definition."""

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from revolta_serve.scheduler.repetition import repeats
from revolta_serve.types import Repetition


def by_definition(tokens, begin, rule):
    """Whether the answer ends with some pattern of an allowed length, written down rule.count times."""
    answer = list(tokens[begin:])
    return any(
        answer[-size * rule.count :] == answer[-size:] * rule.count
        for size in range(rule.shortest, rule.longest + 1)
        if size * rule.count <= len(answer)
    )


def rule(shortest, longest, count):
    return Repetition(shortest=shortest, longest=longest, count=count)


rules = st.builds(
    lambda shortest, more, count: rule(shortest, shortest + more, count), st.integers(1, 4), st.integers(0, 4), st.integers(2, 4)
)
looping = st.builds(
    lambda before, pattern, times, after: before + pattern * times + after,
    st.lists(st.integers(0, 2), max_size=6),
    st.lists(st.integers(0, 2), min_size=1, max_size=6),
    st.integers(1, 5),
    st.lists(st.integers(0, 2), max_size=1),
)


@settings(max_examples=500, deadline=None, derandomize=True)
@given(tokens=looping, begin=st.integers(0, 12), rule=rules)
def test_it_is_what_the_definition_says(tokens, begin, rule):
    begin = min(begin, len(tokens))
    assert repeats(tokens, begin, rule) == by_definition(tokens, begin, rule)


def test_the_definition_is_seen_to_hold_and_to_fail():
    seen = {by_definition(pattern * times, 0, rule(2, 3, 3)) for pattern in ([1, 2], [1, 2, 3, 4]) for times in (2, 3)}
    assert seen == {True, False}


@pytest.mark.parametrize(("size", "found"), [(1, False), (2, True), (3, True), (4, True), (5, False)])
def test_both_bounds_of_the_length_are_allowed(size, found):
    assert repeats(list(range(size)) * 3, 0, rule(2, 4, 3)) == found


def test_one_time_fewer_is_no_loop():
    assert not repeats([1, 2, 3] * 3, 0, rule(3, 3, 4))
    assert repeats([1, 2, 3] * 4, 0, rule(3, 3, 4))


def test_a_loop_that_is_over_does_not_count():
    assert not repeats([*[1, 2] * 5, 3], 0, rule(1, 2, 3))


def test_the_prompt_does_not_count():
    tokens = [1, 2] * 3
    assert repeats(tokens, 0, rule(2, 2, 3))
    assert not repeats(tokens, 1, rule(2, 2, 3))


def test_an_answer_without_tokens_is_no_loop():
    assert not repeats([], 0, rule(1, 4, 2))
    assert not repeats([1, 1, 1], 3, rule(1, 4, 2))


def test_of_a_pattern_the_inside_is_compared_too():
    assert not repeats([1, 9, 3, 1, 2, 3], 0, rule(3, 3, 2))
    assert not repeats([9, 2, 3, 1, 2, 3], 0, rule(3, 3, 2))


def test_a_shorter_pattern_repeated_is_a_longer_one_too():
    assert repeats([5] * 8, 0, rule(4, 4, 2))
    assert not repeats([5] * 7, 0, rule(4, 4, 2))


class Watched(Sequence):
    """Tokens that know which of them were looked at."""

    def __init__(self, tokens):
        self.tokens, self.seen = tokens, set()

    def __len__(self):
        return len(self.tokens)

    def __getitem__(self, which):
        places = range(len(self.tokens))[which]
        self.seen |= set(places) if isinstance(which, slice) else {places}
        return self.tokens[which]


@pytest.mark.parametrize("tokens", [list(range(200)), [*range(188), *[7] * 12], [1, 2, 3, 4, 5] * 40])
def test_only_the_end_is_looked_at(tokens):
    watched = Watched(tokens)
    repeats(watched, 0, rule(1, 4, 3))
    assert min(watched.seen) >= 200 - 12

"""A pool of ids: no id is lost, handed out twice or taken back from nobody."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from revolta_serve.cache.pool import Pool

SIZE = 6


class Machine(RuleBasedStateMachine):
    """The model is the set of ids that are taken."""

    exhausted = 0
    steps = 0

    def __init__(self):
        super().__init__()
        self.pool = Pool("thing", SIZE)
        self.taken: set[int] = set()

    @rule()
    def take(self):
        if len(self.taken) == SIZE:
            Machine.exhausted += 1
            with pytest.raises(ValueError, match="no thing left of 6"):
                self.pool.take()
            return
        id = self.pool.take()
        assert id in set(range(SIZE)) - self.taken
        self.taken.add(id)

    @precondition(lambda self: self.taken)
    @rule(which=st.integers(0, SIZE))
    def give(self, which):
        id = sorted(self.taken)[which % len(self.taken)]
        self.pool.give(id)
        self.taken.remove(id)

    @rule(id=st.integers(-2, SIZE + 1))
    def give_what_is_not_taken(self, id):
        if id not in self.taken:
            with pytest.raises(ValueError, match=f"thing {id} of 6 is not taken"):
                self.pool.give(id)

    @invariant()
    def what_is_not_taken_is_free(self):
        Machine.steps += 1
        assert self.pool.num_free == SIZE - len(self.taken)


def check(most, least):
    Machine.exhausted = Machine.steps = 0
    run_state_machine_as_test(Machine, settings=settings(max_examples=most, stateful_step_count=50, deadline=None, derandomize=True))
    assert Machine.exhausted
    assert Machine.steps > least


def test_a_pool_is_a_set():
    check(20, 300)


@pytest.mark.full
def test_a_pool_is_a_set_for_ten_thousand_steps():
    check(500, 10_000)


def test_low_ids_come_first_and_what_came_back_last_goes_first():
    pool = Pool("thing", 4)
    assert [pool.take() for _ in range(3)] == [0, 1, 2]
    pool.give(0)
    pool.give(1)
    assert [pool.take() for _ in range(3)] == [1, 0, 3]

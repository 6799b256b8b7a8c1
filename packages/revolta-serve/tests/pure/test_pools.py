"""The two pools: no id is ever lost or owned twice, and no claim is granted after which somebody could not finish."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from revolta_serve.cache.block_pool import BlockPool
from revolta_serve.cache.state_pool import StatePool

SIZE = 12


def safe(free, holdings):
    """Whether the owners, (most, claimed) oldest first, can finish one after the other: a simulation of it."""
    for most, claimed in holdings:
        if free < most - claimed:
            return False
        free += claimed
    return True


class Pools(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.blocks, self.slots = BlockPool(SIZE), StatePool(3)
        self.held: dict[int, tuple[int, int]] = {}
        self.number = 0

    def allowed(self, owner, most, count):
        """The definition: after the claim everybody must still be able to finish."""
        after = self.held | {owner: (most, self.held.get(owner, (0, 0))[1] + count)}
        free = SIZE - sum(claimed for _, claimed in after.values())
        return free >= 0 and safe(free, after.values())

    @rule(most=st.integers(0, SIZE + 1), count=st.integers(0, SIZE + 1))
    def enter(self, most, count):
        self.number += 1
        if not count <= most <= SIZE:
            with pytest.raises(ValueError, match="there are 12"):
                self.blocks.enter(self.number, most, count)
        elif self.allowed(self.number, most, count):
            assert self.blocks.enter(self.number, most, count)
            self.held[self.number] = most, count
        else:
            assert not self.blocks.enter(self.number, most, count)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def claim(self, data):
        owner = data.draw(st.sampled_from(sorted(self.held)))
        most, claimed = self.held[owner]
        count = data.draw(st.integers(0, most - claimed + 1))
        if count > most - claimed:
            with pytest.raises(ValueError, match="at most"):
                self.blocks.claim(owner, count)
            return
        granted = self.blocks.claim(owner, count)
        assert granted == self.allowed(owner, most, count)
        if granted:
            self.held[owner] = most, claimed + count

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def take(self, data):
        owner = data.draw(st.sampled_from(sorted(self.held)))
        left = self.held[owner][1] - len(dict(self.blocks.owners())[owner])
        count = data.draw(st.integers(0, left + 1))
        if count > left:
            with pytest.raises(ValueError, match="claimed"):
                self.blocks.take(owner, count)
        else:
            assert len(self.blocks.take(owner, count)) == count

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data):
        owner = data.draw(st.sampled_from(sorted(self.held)))
        self.blocks.release(owner)
        del self.held[owner]

    @rule()
    def slot(self):
        self.number += 1
        if self.slots.num_free:
            self.slots.allocate(self.number)
        else:
            with pytest.raises(ValueError, match="no slot left"):
                self.slots.allocate(self.number)

    @precondition(lambda self: self.slots.num_owned)
    @rule(data=st.data())
    def free_slot(self, data):
        self.slots.release(data.draw(st.sampled_from([owner for owner, _ in self.slots.owners()])))

    @invariant()
    def every_id_has_one_place(self):
        owned = [block for _, blocks in self.blocks.owners() for block in blocks]
        assert len(set(owned)) == len(owned)
        assert set(owned) <= set(range(SIZE))
        claimed = sum(claimed for _, claimed in self.held.values())
        assert len(owned) <= claimed == self.blocks.num_owned == SIZE - self.blocks.num_free
        taken = [slot for _, slot in self.slots.owners()]
        assert len(set(taken)) == len(taken) == 3 - self.slots.num_free

    @invariant()
    def everybody_can_finish(self):
        assert safe(self.blocks.num_free, self.held.values())
        for owner, (most, claimed) in list(self.held.items())[:1]:
            assert self.blocks.room(owner) >= most - claimed, "the oldest has all it may ever need"


TestPools = Pools.TestCase
TestPools.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def test_strangers_and_repeats_are_errors():
    blocks, slots = BlockPool(2), StatePool(2)
    assert blocks.enter(1, 1, 1)
    slots.allocate(1)
    with pytest.raises(ValueError, match="already in"):
        blocks.enter(1, 1, 1)
    with pytest.raises(ValueError, match="already has slot"):
        slots.allocate(1)
    for stranger in (blocks.release, slots.release, lambda owner: blocks.claim(owner, 1), lambda owner: blocks.take(owner, 1)):
        with pytest.raises(KeyError):
            stranger(2)


def test_low_ids_come_first():
    blocks = BlockPool(5)
    blocks.enter(7, 3, 2)
    assert blocks.take(7, 2) == (0, 1)
    blocks.release(7)
    blocks.enter(8, 1, 1)
    assert blocks.take(8, 1) == (0,)


def test_the_young_share_what_the_oldest_can_never_need():
    blocks = BlockPool(10)
    for owner in (1, 2, 3):
        assert blocks.enter(owner, 8, 1)
    assert [blocks.room(owner) for owner in (1, 2, 3, 4)] == [7, 0, 0, 0]
    assert not blocks.claim(2, 1), "with a third block of others the oldest might not finish"
    assert blocks.claim(1, 7), "the oldest is never refused"
    blocks.release(1)
    assert blocks.claim(2, 7)


def test_a_refusal_costs_no_second_walk_until_something_is_released():
    blocks = BlockPool(10)
    for owner in (1, 2, 3):
        blocks.enter(owner, 8, 1)
    walks = []
    walk = blocks.room
    blocks.room = lambda owner: walks.append(owner) or walk(owner)
    assert [blocks.claim(2, 1) for _ in range(50)] == [False] * 50
    assert walks == [2]
    blocks.release(3)
    assert blocks.claim(2, 1)

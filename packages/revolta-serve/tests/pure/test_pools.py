"""The two pools: no id is ever lost, owned twice or promised twice."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from revolta_serve.cache.block_pool import BlockPool
from revolta_serve.cache.state_pool import StatePool


class Pools(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.blocks, self.slots = BlockPool(12), StatePool(3)
        self.promised: dict[int, int] = {}
        self.number = 0

    @rule(count=st.integers(0, 14))
    def reserve(self, count):
        self.number += 1
        if count <= 12 - self.blocks.num_owned - sum(self.promised.values()):
            assert self.blocks.can_reserve(count)
            self.blocks.reserve(self.number, count)
            self.promised[self.number] = count
        else:
            with pytest.raises(ValueError, match="are available"):
                self.blocks.reserve(self.number, count)

    @precondition(lambda self: self.promised)
    @rule(data=st.data())
    def take(self, data):
        owner = data.draw(st.sampled_from(sorted(self.promised)))
        count = data.draw(st.integers(0, self.promised[owner] + 1))
        if count > self.promised[owner]:
            with pytest.raises(ValueError, match="promised"):
                self.blocks.take(owner, count)
        else:
            assert len(self.blocks.take(owner, count)) == count
            self.promised[owner] -= count

    @precondition(lambda self: self.promised)
    @rule(data=st.data())
    def release(self, data):
        owner = data.draw(st.sampled_from(sorted(self.promised)))
        self.blocks.release(owner)
        del self.promised[owner]

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
        assert len(set(owned)) == len(owned) == self.blocks.num_owned == 12 - self.blocks.num_free
        assert set(owned) <= set(range(12))
        assert self.blocks.num_available == 12 - len(owned) - sum(self.promised.values()) >= 0
        taken = [slot for _, slot in self.slots.owners()]
        assert len(set(taken)) == len(taken) == 3 - self.slots.num_free


TestPools = Pools.TestCase
TestPools.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def test_strangers_and_repeats_are_errors():
    blocks, slots = BlockPool(2), StatePool(2)
    blocks.reserve(1, 1)
    slots.allocate(1)
    with pytest.raises(ValueError, match="already holds"):
        blocks.reserve(1, 1)
    with pytest.raises(ValueError, match="already has slot"):
        slots.allocate(1)
    with pytest.raises(KeyError):
        blocks.release(2)
    with pytest.raises(KeyError):
        slots.release(2)


def test_low_ids_come_first():
    blocks = BlockPool(5)
    blocks.reserve(7, 3)
    assert blocks.take(7, 2) == (0, 1)
    blocks.release(7)
    blocks.reserve(8, 1)
    assert blocks.take(8, 1) == (0,)

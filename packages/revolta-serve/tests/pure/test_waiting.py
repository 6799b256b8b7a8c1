"""The queue: priorities, preempted requests, turns of tenants."""

import pytest

from revolta_serve.scheduler.request import checked
from revolta_serve.scheduler.waiting import Waiting
from support.steps import limits, request


class Queue:
    """A queue of requests with the names t0, t1, ...: a tenant and the order of arrival."""

    def __init__(self, *tenants, priorities=None):
        self.waiting = Waiting()
        self.requests = {}
        for tenant in tenants:
            self.add(tenant, priorities.pop(0) if priorities else 0)

    def add(self, tenant, priority=0):
        """A new request."""
        name = f"{tenant}{len(self.requests)}"
        source = request(name, tenant=tenant, priority=priority)
        self.requests[name] = checked(len(self.requests), source, limits(policy="priority"), 0.0)
        self.waiting.push(self.requests[name])

    def start(self, name):
        self.waiting.remove(self.requests[name], started=True)

    def abort(self, name):
        self.waiting.remove(self.requests[name], started=False)

    def preempt(self, name):
        """A request that has started comes back."""
        self.waiting.put_back(self.requests[name])

    @property
    def order(self):
        return " ".join(each.source.id for each in self.waiting)


def test_nobody_waits_in_a_new_queue():
    queue = Queue()
    assert (len(queue.waiting), queue.order) == (0, "")


def test_first_come_first_served():
    assert Queue("a", "a", "a").order == "a0 a1 a2"


def test_a_lower_priority_goes_first():
    assert Queue("a", "a", "a", "a", priorities=[1, 0, -3, 1]).order == "a2 a1 a0 a3"


def test_the_queue_knows_its_length():
    queue = Queue("a", "a", "b", "c", priorities=[0, 1, 0, 0])
    queue.start("a0")
    queue.abort("b2")
    assert len(queue.waiting) == 2
    queue.preempt("a0")
    assert len(queue.waiting) == 3
    queue.start("a0")
    assert len(queue.waiting) == 2


def test_tenants_take_turns():
    assert Queue("a", "a", "a", "b", "c", "b").order == "a0 b3 c4 a1 b5 a2"


def test_a_tenant_that_was_served_goes_last():
    queue = Queue("a", "a", "a", "b", "b", "c")
    queue.start("a0")
    assert queue.order == "b3 c5 a1 b4 a2"
    queue.start("b3")
    assert queue.order == "c5 a1 b4 a2"
    queue.start("c5")
    assert queue.order == "a1 b4 a2"


def test_a_tenant_whose_request_was_aborted_keeps_its_turn():
    queue = Queue("a", "a", "b", "b")
    queue.abort("a0")
    assert queue.order == "a1 b2 b3"


def test_a_tenant_that_had_nothing_left_comes_back_last():
    queue = Queue("a", "b", "c")
    queue.start("a0")
    queue.add("a")
    assert queue.order == "b1 c2 a3"


def test_a_new_tenant_comes_after_those_that_wait():
    queue = Queue("a", "a", "a", "b")
    queue.add("c")
    assert queue.order == "a0 b3 c4 a1 a2"


def test_tenants_have_turns_inside_a_priority_only():
    queue = Queue("a", "a", "b", "a", "b", priorities=[0, 0, 0, 1, 1])
    queue.start("a0")
    assert queue.order == "b2 a1 a3 b4"


def test_preempted_requests_come_before_all_new_ones():
    queue = Queue("a", "b", "a")
    queue.start("b1")
    queue.preempt("b1")
    assert queue.order == "b1 a0 a2"


def test_preempted_requests_come_by_arrival_whatever_their_tenants():
    queue = Queue("a", "a", "b", "a")
    for name in ("a0", "a1", "b2"):
        queue.start(name)
    for name in ("b2", "a0", "a1"):
        queue.preempt(name)
    assert queue.order == "a0 a1 b2 a3"


def test_a_preempted_request_does_not_come_before_those_of_a_lower_priority():
    queue = Queue("a", "a", "a", "a", priorities=[2, 1, 2, 0])
    queue.start("a0")
    queue.preempt("a0")
    assert queue.order == "a3 a1 a0 a2"


def test_a_priority_of_preempted_requests_only_is_served_in_its_place():
    queue = Queue("a", "a", "a", priorities=[2, 1, 0])
    queue.start("a1")
    queue.preempt("a1")
    assert queue.order == "a2 a1 a0"


def test_a_preempted_request_that_starts_again_costs_its_tenant_no_turn():
    queue = Queue("a", "a", "b")
    queue.start("a0")
    queue.start("b2")
    queue.add("b")
    queue.preempt("a0")
    assert queue.order == "a0 a1 b3"
    queue.start("a0")
    assert queue.order == "a1 b3"


@pytest.mark.parametrize("tenant", ["a", "b"])
@pytest.mark.parametrize("priority", [0, 1])
def test_who_is_not_in_the_queue_is_not_taken_out(tenant, priority):
    queue = Queue("a", "a")
    other = checked(9, request("x", tenant=tenant, priority=priority), limits(policy="priority"), 0.0)
    with pytest.raises(ValueError, match="not in"):
        queue.waiting.remove(other, started=True)
    assert (len(queue.waiting), queue.order) == (2, "a0 a1")


def test_nobody_is_taken_out_twice():
    queue = Queue("a", "a")
    queue.start("a0")
    with pytest.raises(ValueError, match="not in"):
        queue.start("a0")
    assert (len(queue.waiting), queue.order) == (1, "a1")


def test_requests_may_be_taken_out_while_the_queue_is_read():
    queue = Queue("a", "a", "b", "b", "a", "b", priorities=[0, 0, 0, 0, 1, 1])
    for name in ("a0", "b2"):
        queue.start(name)
        queue.preempt(name)
    whole, read = queue.order, []
    for each in queue.waiting:
        read.append(each.source.id)
        queue.start(each.source.id)
    assert " ".join(read) == whole == "a0 b2 a1 b3 a4 b5"
    assert len(queue.waiting) == 0
    assert queue.order == ""


def test_what_has_been_served_leaves_nothing_behind():
    queue = Queue("a", "b", "c", priorities=[0, 0, 1])
    for name in ("a0", "b1", "c2"):
        queue.start(name)
    assert not queue.waiting._tiers

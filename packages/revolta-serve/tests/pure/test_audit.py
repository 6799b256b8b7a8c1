"""The audit: every account of a scheduler at work is falsified in turn, and the audit names it."""

from collections import Counter

import pytest

from revolta_serve.errors import EngineError
from support.steps import Service, request, text

PROMPT = text(1, 200)


@pytest.fixture
def service():
    """Two requests that part after two blocks, one in its answer with a rolling snapshot, one in its prompt; and what a third one left."""
    service = Service(worker=False, num_blocks=60, prefill_cap=192)
    service.run(request("gone", text(2, 200), 3))
    service.add(request("a", PROMPT, 150))
    service.steps(70)
    service.add(request("b", [*PROMPT[:128], *text(3, 300)], 9))
    service.step()
    return service


@pytest.fixture
def scheduler(service):
    return service.scheduler


@pytest.fixture
def cache(scheduler):
    return scheduler.storage.cache


@pytest.fixture
def answering(scheduler):
    return next(each for each in scheduler.running.values() if each.source.id == "a")


@pytest.fixture
def reading(scheduler):
    return next(each for each in scheduler.running.values() if each.source.id == "b")


def test_the_books_of_a_scheduler_at_work_balance(scheduler, cache, answering, reading):
    scheduler.audit()
    # What the other tests rely on:
    assert answering.decoding
    assert answering.rolling >= 0
    assert answering.private
    assert not reading.decoding
    assert reading.private or reading.owed
    shared = [node for node in cache.index if node.holds > 1]
    assert [node.depth for node in shared] == [2]
    assert cache.index.num_loose
    assert len(cache.snapshots) > 1


def test_the_books_balance_while_a_step_is_open(scheduler):
    scheduler.schedule()
    scheduler.audit()


def test_the_books_balance_when_all_has_ended(service):
    service.finish()
    service.scheduler.audit()


def test_a_block_of_two_nodes(scheduler, cache):
    one, two = list(cache.index)[:2]
    two.block = one.block
    with pytest.raises(EngineError, match=rf"^token blocks \[{one.block}\] have more than one owner$"):
        scheduler.audit()


def test_a_block_of_a_node_and_a_request(scheduler, cache, answering):
    block = answering.private[0] = answering.tip.block
    with pytest.raises(EngineError, match=rf"^token blocks \[{block}\] have more than one owner$"):
        scheduler.audit()


def test_a_block_of_two_requests(scheduler, answering, reading):
    reading.private = [answering.private[0]]
    with pytest.raises(EngineError, match=rf"^token blocks \[{answering.private[0]}\] have more than one owner$"):
        scheduler.audit()


def test_a_block_that_nobody_owns(scheduler, cache):
    lost = cache.blocks.take()
    with pytest.raises(EngineError, match=rf"^token blocks: \[{lost}\] are taken and nobody owns them, \[\] are owned and free$"):
        scheduler.audit()


def test_a_block_that_is_owned_and_free(scheduler, cache, answering):
    given = answering.private[0]
    cache.blocks.give(given)
    with pytest.raises(EngineError, match=rf"^token blocks: \[\] are taken and nobody owns them, \[{given}\] are owned and free$"):
        scheduler.audit()


def test_a_lost_block_does_not_make_up_for_one_that_is_owned_and_free(scheduler, cache, answering):
    lost, given = cache.blocks.take(), answering.private[0]
    cache.blocks.give(given)
    with pytest.raises(EngineError, match=rf"^token blocks: \[{lost}\] are taken and nobody owns them, \[{given}\] are owned and free$"):
        scheduler.audit()


def test_a_request_that_holds_what_was_removed(scheduler, answering):
    answering.tip.alive = False
    with pytest.raises(EngineError, match=r"^request \d+ holds a block at depth \d+ that was removed from the index$"):
        scheduler.audit()


def test_a_slot_of_two_requests(scheduler, answering, reading):
    reading.slot = answering.slot
    with pytest.raises(EngineError, match=rf"^state slots \[{reading.slot}\] have more than one owner$"):
        scheduler.audit()


def test_a_running_slot_that_is_a_snapshot(scheduler, cache, answering):
    answering.slot = next(iter(cache.snapshots)).slot
    with pytest.raises(EngineError, match=rf"^state slots \[{answering.slot}\] have more than one owner$"):
        scheduler.audit()


def test_a_rolling_slot_that_is_a_snapshot(scheduler, cache, answering):
    answering.rolling = next(iter(cache.snapshots)).slot
    with pytest.raises(EngineError, match=rf"^state slots \[{answering.rolling}\] have more than one owner$"):
        scheduler.audit()


def test_a_promised_slot_that_is_a_snapshot(scheduler, cache, reading):
    slot = next(iter(cache.snapshots)).slot
    reading.promised = ((64, slot),)
    with pytest.raises(EngineError, match=rf"^state slots \[{slot}\] have more than one owner$"):
        scheduler.audit()


@pytest.mark.parametrize("account", ["slot", "rolling"])
def test_a_slot_that_nobody_owns(scheduler, answering, account):
    setattr(answering, account, -1)
    with pytest.raises(EngineError, match=r"^state slots: \[\d+\] are taken and nobody owns them, \[\] are owned and free$"):
        scheduler.audit()


def test_a_promised_slot_that_nobody_owns(scheduler):
    scheduler.schedule()
    promised = [each for each in scheduler.running.values() if each.promised]
    scheduler.audit()
    promised[0].promised = ()
    with pytest.raises(EngineError, match=r"^state slots: \[\d+\] are taken and nobody owns them, \[\] are owned and free$"):
        scheduler.audit()


def test_a_snapshot_that_retention_does_not_know(scheduler, cache):
    node = next(node for node in cache.index if node.slot < 0)
    node.slot = 99
    found = sorted(each.serial for each in cache.snapshots)
    with pytest.raises(EngineError, match=r"^snapshots of the index: ") as error:
        scheduler.audit()
    assert str(sorted([*found, node.serial])[0]) in str(error.value)


def test_a_snapshot_of_a_node_that_is_gone(scheduler, cache):
    leaf = next(node for node in cache.snapshots if not node.children and not node.holds)
    slot, leaf.slot = leaf.slot, -1
    cache.index.remove(leaf)
    cache.blocks.give(leaf.block)
    leaf.slot = slot
    with pytest.raises(EngineError, match=r"^snapshots of the index: "):
        scheduler.audit()


@pytest.mark.parametrize("change", [-1, 1])
def test_holds_of_a_tip(scheduler, answering, change):
    holds, depth = answering.tip.holds, answering.tip.depth
    answering.tip.holds += change
    with pytest.raises(EngineError, match=rf"^holds of the block at depth {depth}: {holds + change} by the books, {holds} counted$"):
        scheduler.audit()


def test_holds_where_two_requests_part(scheduler, cache):
    shared = next(node for node in cache.index if node.holds > 1)
    shared.holds = 1
    with pytest.raises(EngineError, match=r"^holds of the block at depth 2: 1 by the books, 2 counted$"):
        scheduler.audit()


def test_holds_of_what_nobody_holds(scheduler, cache):
    leaf = next(node for node in cache.index if not node.holds and not node.children)
    leaf.holds = 1
    with pytest.raises(EngineError, match=rf"^holds of the block at depth {leaf.depth}: 1 by the books, 0 counted$"):
        scheduler.audit()


def test_children(scheduler, cache):
    counted = Counter(node.parent for node in cache.index)
    node = next(node for node in cache.index if node.children)
    node.children += 1
    with pytest.raises(
        EngineError, match=rf"^children of the block at depth {node.depth}: {counted[node] + 1} by the books, {counted[node]} counted$"
    ):
        scheduler.audit()


@pytest.mark.parametrize("change", [-1, 1])
def test_blocks_that_nobody_holds(scheduler, cache, change):
    loose = cache.index.num_loose
    cache.index._loose += change
    with pytest.raises(EngineError, match=rf"^blocks that nobody holds: {loose + change} by the books, {loose} counted$"):
        scheduler.audit()


@pytest.mark.parametrize("change", [-1, 1])
def test_promised_blocks(scheduler, reading, change):
    owed = scheduler.storage.owed
    assert owed == reading.owed > 0
    scheduler.storage.owed += change
    with pytest.raises(EngineError, match=rf"^promised blocks: {owed + change} by the books, {owed} counted$"):
        scheduler.audit()


@pytest.mark.parametrize("change", [-64, -1, 1, 64])
def test_the_capacity_of_a_request(scheduler, answering, change):
    capacity = answering.capacity
    answering.capacity += change
    match = rf"^capacity of request {answering.number}: {capacity + change} by the books, {capacity} counted$"
    with pytest.raises(EngineError, match=match):
        scheduler.audit()


def test_the_capacity_of_a_request_without_whole_blocks(service, scheduler):
    service.add(request("c", 5, 9))
    service.steps(2)
    short = next(each for each in scheduler.running.values() if each.source.id == "c")
    assert (short.tip, short.capacity) == (None, 64)
    short.capacity = 0
    with pytest.raises(EngineError, match=rf"^capacity of request {short.number}: 0 by the books, 64 counted$"):
        scheduler.audit()


def test_more_tokens_than_the_blocks_hold(service, scheduler):
    service.add(request("c", 64, 9))
    service.step()
    short = next(each for each in scheduler.running.values() if each.source.id == "c")
    assert (short.computed, short.capacity, short.private) == (64, 64, [])
    short.computed = 65
    with pytest.raises(EngineError, match=rf"^request {short.number}: 65 tokens computed, 1 blocks whole, room for 64 tokens$"):
        scheduler.audit()


@pytest.mark.parametrize("change", [-64, 64])
def test_whole_blocks_that_are_not_those_computed(scheduler, answering, change):
    computed, depth = answering.computed, answering.tip.depth
    answering.computed += change
    match = (
        rf"^request {answering.number}: {computed + change} tokens computed, {depth} blocks whole, room for {answering.capacity} tokens$"
    )
    with pytest.raises(EngineError, match=match):
        scheduler.audit()

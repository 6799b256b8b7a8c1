"""Blocks and slots with what is kept in them for later: who gives way, what is counted, what a reset leaves."""

import pytest

from revolta_serve.cache.prefix_cache import PrefixCache
from revolta_serve.cache.retention import SUPERSEDED, UNPROVEN


def key(word):
    return word.encode()


def grow(cache, word, *, snapshots=(), answer=False, form=64):
    """Compute a path of one block a letter and return its end, held. snapshots: depths."""
    tip = None
    for depth in range(1, len(word) + 1):
        (block,) = cache.take_blocks(1)
        tip = cache.extend(tip, key(word[:depth]), form, block)
        if depth in snapshots:
            assert cache.store(tip, cache.take_slot(), answer=answer)
    return tip


def leave(cache, word, **options):
    tip = grow(cache, word, **options)
    cache.index.release(tip)
    return tip


def words(cache):
    return {node.key.decode() for node in cache.index}


def test_blocks_are_free_loose_or_held():
    cache = PrefixCache(10, 2)
    tip = grow(cache, "abc")
    leave(cache, "xy")
    private = cache.take_blocks(1)
    assert (cache.blocks.num_free, cache.num_available, cache.num_held) == (4, 6, 4)
    cache.index.release(tip)
    cache.blocks.give(private[0])
    assert (cache.blocks.num_free, cache.num_available, cache.num_held) == (5, 10, 0)


def test_too_many_blocks_are_refused_and_nothing_is_evicted():
    cache = PrefixCache(6, 2)
    grow(cache, "ab")
    leave(cache, "xy")
    assert cache.take_blocks(5) is None
    assert words(cache) == {"a", "ab", "x", "xy"}
    assert len(cache.take_blocks(3)) == 3
    assert words(cache) == {"a", "ab", "x"}
    assert cache.blocks_evicted == 1


def test_blocks_behind_the_last_snapshot_go_before_any_snapshot():
    cache = PrefixCache(6, 2)
    leave(cache, "abc", snapshots=[2])
    leave(cache, "x", snapshots=[1])
    leave(cache, "ay")
    cache.take_blocks(2)
    assert words(cache) == {"a", "ab", "x", "ay"}, "one was free, and abc was unwanted longer than ay"
    cache.take_blocks(1)
    assert words(cache) == {"a", "ab", "x"}
    assert cache.snapshots_evicted == 0


def test_then_the_snapshot_of_least_worth_goes_with_its_path():
    cache = PrefixCache(4, 3)
    leave(cache, "ab", snapshots=[2])
    leave(cache, "xy", snapshots=[2], answer=True)
    cache.take_blocks(1)
    assert words(cache) == {"a", "ab", "x"}
    assert (cache.snapshots_evicted, cache.slots.num_free, len(cache.snapshots)) == (1, 2, 1)
    cache.take_blocks(3)
    assert words(cache) == set()
    assert (cache.blocks_evicted, cache.snapshots_evicted, cache.slots.num_free) == (4, 2, 3)


def test_a_slot_is_taken_from_a_snapshot_worth_no_more_than_it_is_for():
    cache = PrefixCache(9, 2)
    tip = leave(cache, "ab", snapshots=[2])
    leave(cache, "xy", snapshots=[2], answer=True)
    assert cache.take_slot(SUPERSEDED) == -1
    assert cache.take_slot(UNPROVEN) >= 0
    assert cache.take_slot(UNPROVEN) == -1
    assert tip.slot >= 0
    slot = tip.slot
    assert cache.take_slot() == slot
    assert tip.slot == -1
    assert cache.take_slot() == -1
    assert cache.snapshots_evicted == 2


def test_a_slot_for_the_next_snapshot_of_a_path_comes_from_the_last_one():
    cache = PrefixCache(9, 2)
    older = leave(cache, "xy", snapshots=[2])
    tip = grow(cache, "abc", snapshots=[2])
    own = tip.parent
    cache.index.touch(own)
    slot = own.slot
    assert cache.take_slot(below=tip) == slot
    assert (own.slot, older.slot >= 0) == (-1, True)


def test_a_block_that_is_there_already_is_kept_once_and_the_hold_moves():
    cache = PrefixCache(4, 1)
    first = leave(cache, "ab")
    (one,) = cache.take_blocks(1)
    tip = cache.extend(None, key("a"), 64, one)
    assert tip is first.parent
    assert (cache.blocks.num_free, cache.blocks_deduplicated) == (2, 1)
    assert (first.parent.holds, first.holds) == (1, 0)
    (two,) = cache.take_blocks(1)
    assert cache.extend(tip, key("ab"), 64, two) is first
    assert (first.parent.holds, first.holds) == (1, 1)
    (other,) = cache.take_blocks(1)
    cache.index.hold(first.parent)
    assert cache.extend(first.parent, key("ab"), 12, other).block == other, "of another form, it is another block"
    assert cache.blocks_deduplicated == 2


def test_what_is_computed_again_counts_as_wanted():
    cache = PrefixCache(3, 1)
    leave(cache, "a")
    leave(cache, "b")
    leave(cache, "a")
    cache.take_blocks(2)
    assert words(cache) == {"a"}


def test_a_second_snapshot_of_a_node_is_not_kept():
    cache = PrefixCache(4, 3)
    tip = leave(cache, "a", snapshots=[1])
    slot, version = cache.take_slot(), cache.version
    assert not cache.store(tip, slot)
    assert (cache.slots.num_free, cache.version) == (2, version)


def test_the_version_changes_with_every_snapshot_that_is_found_from_now_on():
    cache = PrefixCache(4, 3)
    tip, version = leave(cache, "ab"), cache.version
    cache.store(tip, cache.take_slot())
    assert cache.version != version


def test_resuming_gives_all_blocks_in_order_and_holds_them():
    cache = PrefixCache(6, 2)
    tip = leave(cache, "abc", snapshots=[3])
    blocks = [tip.parent.parent.block, tip.parent.block, tip.block]
    assert cache.resume(tip) == tuple(blocks)
    assert cache.num_available == 3
    assert cache.take_slot() >= 0, "there is one more"
    assert cache.take_slot() == -1, "what is being read keeps its slot"
    cache.being_read.clear()
    assert cache.take_slot() >= 0


def test_who_backs_out_does_not_take_the_slot_from_those_who_stay():
    cache = PrefixCache(6, 1)
    tip = leave(cache, "ab", snapshots=[2])
    cache.resume(tip)
    cache.resume(tip)
    cache.back_out(tip)
    assert cache.take_slot() == -1
    assert not cache.give_up(tip)
    assert cache.num_held == 2
    cache.back_out(tip)
    assert (cache.num_held, not cache.being_read) == (0, True)
    assert cache.give_up(tip)
    assert cache.take_slot() == 0


def test_resuming_counts_as_wanting():
    cache = PrefixCache(2, 2)
    one, two = leave(cache, "a", snapshots=[1]), leave(cache, "b", snapshots=[1])
    cache.resume(one)
    cache.index.release(one)
    cache.being_read.clear()
    cache.take_blocks(1)
    assert (one.alive, two.alive) == (True, False)


def test_what_cannot_be_trusted_is_removed_as_far_as_nobody_else_uses_it():
    cache = PrefixCache(9, 4)
    base = leave(cache, "ab", snapshots=[1, 2])
    other = grow(cache, "ax")
    tip = grow(cache, "abcd", snapshots=[4])
    cache.discard(tip)
    assert words(cache) == {"a", "ax"}
    assert (cache.blocks.num_free, cache.slots.num_free) == (7, 3)
    assert base.parent.slot >= 0
    assert (cache.blocks_evicted, cache.snapshots_evicted) == (0, 0), "it did not have to make room"
    cache.discard(other)
    assert words(cache) == set()
    assert (cache.blocks.num_free, cache.slots.num_free) == (9, 4)
    cache.discard(None)


def test_a_reset_forgets_all_that_nobody_holds_and_every_snapshot():
    cache = PrefixCache(12, 4)
    held = grow(cache, "ab", snapshots=[1])
    leave(cache, "abc", snapshots=[3])
    leave(cache, "xyz", snapshots=[2])
    private = cache.take_blocks(1)
    result = cache.clear()
    assert (result.blocks_freed, result.snapshots_freed, result.blocks_in_use) == (4, 3, 3)
    assert words(cache) == {"a", "ab"}
    assert (cache.blocks.num_free, cache.slots.num_free, len(cache.snapshots)) == (9, 4, 0)
    assert (cache.blocks_evicted, cache.snapshots_evicted) == (0, 0)
    assert not cache.match([key("x")], seamless_only=False).evicted, "who asks for a reset knows of it"
    cache.index.release(held)
    cache.blocks.give(private[0])
    assert cache.clear().blocks_in_use == 0
    assert words(cache) == set()


def test_a_match_looks_at_the_index():
    cache = PrefixCache(4, 2)
    tip = leave(cache, "ab", snapshots=[2], form=0)
    assert cache.match([key("a"), key("ab")], seamless_only=False).node is tip
    assert cache.match([key("a"), key("ab")], seamless_only=True).node is None


@pytest.mark.parametrize("size", [1, 5])
def test_all_of_a_pool_can_be_handed_out(size):
    cache = PrefixCache(size, size)
    leave(cache, "a" * size, snapshots=range(1, size + 1))
    assert sorted(cache.take_blocks(size)) == list(range(size))
    assert sorted(cache.take_slot() for _ in range(size)) == list(range(size))
    assert cache.take_blocks(1) is None
    assert cache.take_blocks(0) == ()


def test_storing_counts_as_wanting():
    cache = PrefixCache(2, 2)
    first, second = (cache.extend(None, key, 64, cache.take_blocks(1)[0]) for key in (b"a", b"b"))
    assert cache.store(second, cache.take_slot())
    assert cache.store(first, cache.take_slot())
    assert cache.take_slot() >= 0
    assert (first.slot >= 0, second.slot) == (True, -1)


def test_what_was_discarded_is_not_remembered():
    """Requests that fail one after the other in a cache with room for all: no eviction ever looks at what they left."""
    cache = PrefixCache(100, 2)
    leave(cache, "stays")
    for number in range(50):
        cache.discard(grow(cache, f"{chr(200 + number)}bcd"))
    assert len(cache.index._removable) <= 2 * len(cache.index)


def test_what_somebody_else_holds_is_not_discarded():
    cache = PrefixCache(2, 1)
    tip = cache.extend(None, b"a", 64, cache.take_blocks(1)[0])
    cache.index.hold(tip)
    cache.discard(tip)
    assert (tip.alive, tip.holds, cache.num_held) == (True, 1, 1)


def test_what_somebody_else_extended_is_not_discarded():
    cache = PrefixCache(2, 1)
    tip = cache.extend(None, b"a", 64, cache.take_blocks(1)[0])
    cache.index.hold(tip)
    child = cache.extend(tip, b"ab", 64, cache.take_blocks(1)[0])
    cache.index.release(child)
    cache.discard(tip)
    assert (tip.alive, child.alive, cache.num_available) == (True, True, 2)

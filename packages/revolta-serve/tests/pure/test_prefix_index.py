"""The tree of blocks, one behaviour at a time; test_cache_machine.py holds it against a model."""

import pytest

from revolta_serve.cache import prefix_index
from revolta_serve.cache.prefix_index import PrefixIndex


def keys(word):
    """A key for every beginning of a word."""
    return [word[: depth + 1].encode() for depth in range(len(word))]


def grow(index, word, forms=None, *, block=100):
    """A path of which nobody else has a part, held at its end."""
    node = None
    for depth, key in enumerate(keys(word)):
        node = index.add(node, key, forms[depth] if forms else 64, block + depth)
    return node


def path(node):
    return [] if node is None else [*path(node.parent), node]


def test_a_node_knows_its_place():
    index = PrefixIndex()
    tip = grow(index, "abc")
    assert [node.depth for node in path(tip)] == [1, 2, 3]
    assert [node.block for node in path(tip)] == [100, 101, 102]
    assert [node.children for node in path(tip)] == [1, 1, 0]
    assert len(index) == 3
    assert set(index) == set(path(tip))


def test_a_path_is_seamless_as_far_as_all_of_it_is_of_prompt_form():
    index = PrefixIndex()
    tip = grow(index, "abcd", forms=[64, 64, 20, 64])
    assert [node.seamless for node in path(tip)] == [True, True, False, False]


def test_children_are_told_apart_by_key_and_form():
    index = PrefixIndex()
    parent = grow(index, "a")
    index.hold(parent)
    index.hold(parent)
    index.hold(parent)
    nodes = [index.add(parent, b"ab", 64, 1), index.add(parent, b"ab", 0, 2), index.add(parent, b"ac", 64, 3)]
    assert index.child(parent, b"ab", 64) is nodes[0]
    assert index.child(parent, b"ab", 0) is nodes[1]
    assert index.child(parent, b"ac", 64) is nodes[2]
    assert index.child(parent, b"ac", 0) is None
    assert index.child(None, b"ab", 64) is None
    assert index.child(None, b"a", 64) is parent


def test_a_node_is_not_added_twice():
    index = PrefixIndex()
    tip = grow(index, "ab")
    with pytest.raises(ValueError, match="after 1 blocks with form 64 is in the index already"):
        index.add(tip.parent, b"ab", 64, 7)


def test_a_hold_moves_to_the_new_node_and_protects_all_before_it():
    index = PrefixIndex()
    tip = grow(index, "abc")
    assert [node.holds for node in path(tip)] == [1, 1, 1]
    assert index.num_loose == 0
    index.release(tip)
    assert [node.holds for node in path(tip)] == [0, 0, 0]
    assert index.num_loose == 3
    index.hold(tip.parent)
    assert [node.holds for node in path(tip)] == [1, 1, 0]
    assert index.num_loose == 1


def test_every_hold_ends_once():
    index = PrefixIndex()
    tip = grow(index, "ab")
    index.hold(tip)
    index.release(tip)
    assert index.num_loose == 0
    index.release(tip)
    with pytest.raises(ValueError, match="a block at depth 2 is released, but nobody holds it"):
        index.release(tip)


@pytest.mark.parametrize("what", ["held", "with a child", "with a snapshot"])
def test_only_loose_leaves_without_a_snapshot_are_removed(what):
    index = PrefixIndex()
    tip = grow(index, "ab")
    if what != "held":
        index.release(tip)
    if what == "with a snapshot":
        tip.slot = 0
    victim = tip.parent if what == "with a child" else tip
    with pytest.raises(ValueError, match=f"at depth {victim.depth} is held, has {victim.children} children or a snapshot"):
        index.remove(victim)
    assert len(index) == 2


def test_what_has_been_unwanted_the_longest_goes_first():
    index = PrefixIndex()
    tips = {word: grow(index, word) for word in ("a", "b", "c")}
    for tip in tips.values():
        index.release(tip)
    index.touch(tips["a"])
    assert [index.pop_loose_leaf() for _ in range(4)] == [tips["b"], tips["c"], tips["a"], None]


def test_a_path_goes_from_its_end_and_is_as_recent_as_its_most_recent_part():
    index = PrefixIndex()
    tip = grow(index, "abc")
    index.release(tip)
    other = grow(index, "x")
    index.release(other)
    index.touch(tip)
    whole = path(tip)
    assert [index.pop_loose_leaf() for _ in range(4)] == [other, *reversed(whole)]


def test_held_nodes_and_snapshots_are_passed_over_until_they_may_go():
    index = PrefixIndex()
    held, kept = grow(index, "a"), grow(index, "b")
    index.release(kept)
    kept.slot = 3
    assert index.pop_loose_leaf() is None
    kept.slot = -1
    index.offer(kept)
    assert index.pop_loose_leaf() is kept
    index.release(held)
    assert index.pop_loose_leaf() is held


def test_holding_and_releasing_again_and_again_leaves_one_entry():
    index = PrefixIndex()
    tip = grow(index, "ab")
    for _ in range(100):
        index.release(tip)
        index.hold(tip)
    assert len(index._removable) <= 1
    index.release(tip)
    assert index.pop_loose_leaf() is tip


def test_a_match_is_the_deepest_snapshot():
    index = PrefixIndex()
    tip = grow(index, "abcd")
    first, second, third, _ = path(tip)
    assert index.match(keys("abcd"), seamless_only=False) == prefix_index.Match(None, 4, False, False)
    first.slot, third.slot = 1, 2
    found = index.match(keys("abcd"), seamless_only=False)
    assert (found.node, found.depth, found.known) == (third, 3, 4)
    found = index.match(keys("ab"), seamless_only=False)
    assert (found.node, found.depth, found.known) == (first, 1, 2)
    found = index.match(keys("abx"), seamless_only=False)
    assert (found.node, found.depth, found.known) == (first, 1, 2)
    second.slot = 3
    assert index.match(keys("abx"), seamless_only=False).node is second
    assert index.match(keys("x"), seamless_only=False).depth == 0


def test_of_two_snapshots_as_deep_the_seamless_one_is_taken():
    index = PrefixIndex()
    other = grow(index, "ab", forms=[64, 10])
    seam = index.child(None, b"a", 64)
    index.hold(seam)
    seamless = index.add(seam, b"ab", 64, 9)
    other.slot, seamless.slot = 1, 2
    assert index.match(keys("ab"), seamless_only=False).node is seamless
    seamless.slot = -1
    assert index.match(keys("ab"), seamless_only=False).node is other


def test_a_snapshot_that_may_not_be_used_is_reported():
    index = PrefixIndex()
    tip = grow(index, "abc", forms=[64, 64, 0])
    tip.slot = 1
    tip.parent.parent.slot = 2
    found = index.match(keys("abc"), seamless_only=True)
    assert (found.depth, found.known, found.barred) == (1, 3, True)
    found = index.match(keys("ab"), seamless_only=True)
    assert (found.depth, found.barred) == (1, False)
    assert not index.match(keys("abc"), seamless_only=False).barred


def test_what_was_known_once_is_told_from_what_is_new():
    index = PrefixIndex()
    index.release(grow(index, "ab"))
    assert not index.match(keys("abc"), seamless_only=False).evicted
    index.pop_loose_leaf()
    assert index.match(keys("ab"), seamless_only=False).evicted
    assert not index.match(keys("ax"), seamless_only=False).evicted
    assert not index.match(keys("a"), seamless_only=False).evicted, "nothing of it is missing"
    index.hold(index.child(None, b"a", 64))
    index.add(index.child(None, b"a", 64), b"ab", 64, 5)
    assert not index.match(keys("ab"), seamless_only=False).evicted
    index.release(index.child(index.child(None, b"a", 64), b"ab", 64))
    index.pop_loose_leaf()
    index.forget_evictions()
    assert not index.match(keys("ab"), seamless_only=False).evicted


def test_a_key_counts_as_gone_only_when_its_last_node_is():
    index = PrefixIndex()
    one, two = index.add(None, b"a", 64, 1), index.add(None, b"a", 0, 2)
    index.release(one)
    index.remove(one)
    assert index.match(keys("a"), seamless_only=False).known == 1
    index.release(two)
    index.remove(two)
    found = index.match(keys("a"), seamless_only=False)
    assert (found.known, found.evicted) == (0, True)


def test_only_so_many_evictions_are_remembered(monkeypatch):
    monkeypatch.setattr(prefix_index, "REMEMBERED", 2)
    index = PrefixIndex()
    for word in "abc":
        index.release(grow(index, word))
        index.pop_loose_leaf()
    assert [index.match(keys(word), seamless_only=False).evicted for word in "abc"] == [False, True, True]


def test_stored_looks_for_a_state_of_the_wanted_kind():
    index = PrefixIndex()
    tip = grow(index, "ab", forms=[64, 10])
    assert not index.stored(b"ab", seamless=False)
    tip.slot = 1
    assert index.stored(b"ab", seamless=False)
    assert not index.stored(b"ab", seamless=True)
    tip.parent.slot = 2
    assert index.stored(b"a", seamless=True)
    assert not index.stored(b"x", seamless=False)


def test_a_key_that_came_back_and_went_again_is_remembered_the_longest(monkeypatch):
    monkeypatch.setattr(prefix_index, "REMEMBERED", 2)
    index = PrefixIndex()
    for key in (b"a", b"b", b"a", b"c"):
        index.release(index.add(None, key, 64, 0))
        index.pop_loose_leaf()
    assert [index.match([key], seamless_only=False).evicted for key in (b"a", b"b", b"c")] == [True, False, True]


def test_a_parent_is_as_recent_as_the_child_that_was_removed():
    index = PrefixIndex()
    parent = index.add(None, b"a", 64, 0)
    child = index.add(parent, b"ab", 64, 1)
    index.release(child)
    other = index.add(None, b"x", 64, 2)
    index.release(other)
    index.touch(child)
    index.remove(child)
    assert [index.pop_loose_leaf() for _ in range(3)] == [other, parent, None]

"""Which snapshot goes first: each class of worth, the order inside a class, and the exceptions."""

import pytest

from revolta_serve.cache.prefix_index import PrefixIndex
from revolta_serve.cache.retention import SHARED, SUPERSEDED, TIP, UNPROVEN, Retention, nearest


class Tree:
    """A tree whose nodes are named by words; all are loose unless held."""

    def __init__(self):
        self.index, self.snapshots, self.nodes, self.slot = PrefixIndex(), Retention(), {}, 0

    def node(self, word):
        if word not in self.nodes:
            parent = self.node(word[:-1]) if word[:-1] else None
            self.index.hold(parent)
            self.nodes[word] = self.index.add(parent, word.encode(), 64, len(self.nodes))
            self.index.release(self.nodes[word])
        return self.nodes[word]

    def snapshot(self, word, *, answer=False, proven=False):
        node = self.node(word)
        self.snapshots.attach(node, self.slot, answer=answer)
        node.proven = proven
        self.index.touch(node)
        self.slot += 1
        return node

    def worth(self, word):
        return self.snapshots.worth(self.nodes[word])

    def order(self, **options):
        """The words in the order in which they would go."""
        words = {node: word for word, node in self.nodes.items()}
        gone = []
        while (node := self.snapshots.least(SHARED, **options)) is not None:
            gone.append(words[node])
            self.snapshots.detach(node)
        return gone


def test_a_snapshot_is_attached_once():
    tree = Tree()
    node = tree.snapshot("a")
    with pytest.raises(ValueError, match="at depth 1 has a snapshot in slot 0 already; slot 5 is one too many"):
        tree.snapshots.attach(node, 5, answer=False)
    assert (len(tree.snapshots), list(tree.snapshots)) == (1, [node])
    assert tree.snapshots.detach(node) == 0
    assert (len(tree.snapshots), node.slot) == (0, -1)


def test_the_nearest_snapshot():
    tree = Tree()
    first = tree.snapshot("a")
    assert nearest(tree.node("abc")) is first
    assert nearest(first) is first
    assert nearest(tree.node("x")) is None
    assert nearest(None) is None


def test_a_tip_is_what_nothing_follows():
    tree = Tree()
    tree.snapshot("ab")
    tree.node("abcd")
    assert tree.worth("ab") == TIP


def test_one_lineage_supersedes_and_two_share():
    tree = Tree()
    tree.snapshot("a")
    tree.snapshot("abc")
    assert tree.worth("a") == SUPERSEDED
    tree.snapshot("ax")
    assert tree.worth("a") == SHARED
    tree.snapshots.detach(tree.nodes["ax"])
    assert tree.worth("a") == SUPERSEDED


def test_an_answers_end_is_unproven_and_no_lineage_until_somebody_resumed_from_it():
    tree = Tree()
    tree.snapshot("a")
    end = tree.snapshot("ab", answer=True)
    assert (tree.worth("ab"), tree.worth("a")) == (UNPROVEN, TIP)
    end.proven = True
    assert (tree.worth("ab"), tree.worth("a")) == (TIP, SUPERSEDED)


def test_a_snapshot_that_is_attached_again_is_unproven_again():
    tree = Tree()
    end = tree.snapshot("a", answer=True, proven=True)
    tree.snapshots.detach(end)
    tree.snapshots.attach(end, 4, answer=True)
    assert tree.worth("a") == UNPROVEN


def test_where_running_requests_part_is_shared_before_any_of_them_has_stored_anything():
    tree = Tree()
    node = tree.snapshot("a")
    tree.index.hold(node)
    assert tree.worth("a") == TIP
    tree.index.hold(tree.node("ab"))
    assert tree.worth("a") == SHARED
    tree.index.release(node)
    assert tree.worth("a") == TIP, "one request holds it, through its child"


def test_a_snapshot_between_two_takes_what_lies_below_it():
    tree = Tree()
    tree.snapshot("a")
    tree.snapshot("abcd")
    tree.snapshot("abcx")
    tree.snapshot("ay")
    assert tree.worth("a") == SHARED
    tree.snapshot("abc")
    assert (tree.worth("abc"), tree.worth("a")) == (SHARED, SHARED)
    tree.snapshots.detach(tree.nodes["ay"])
    assert tree.worth("a") == SUPERSEDED, "the fork is at abc"
    tree.snapshots.detach(tree.nodes["abc"])
    assert tree.worth("a") == SHARED
    assert tree.nodes["abcd"].above is tree.nodes["a"]


def test_the_topmost_snapshot_can_come_last():
    tree = Tree()
    tree.snapshot("abc")
    tree.snapshot("x")
    tree.snapshot("a")
    assert tree.nodes["abc"].above is tree.nodes["a"]
    assert tree.nodes["x"].above is None
    assert tree.worth("a") == SUPERSEDED


def test_classes_go_in_order_and_the_oldest_of_each_first():
    tree = Tree()
    for word in ("s", "sa", "sb"):  # a fork and its tips
        tree.snapshot(word)
    for word in ("t", "tt"):  # superseded, and a tip
        tree.snapshot(word)
    for word in ("u", "v"):
        tree.snapshot(word, answer=True)
    tree.index.touch(tree.nodes["u"])
    tree.snapshot("w")
    tree.index.touch(tree.nodes["sa"])
    # As soon as one of its two tips has gone, the fork is superseded.
    assert tree.order() == ["t", "v", "u", "sb", "s", "tt", "w", "sa"]


def test_nothing_worth_more_than_asked_for_goes():
    tree = Tree()
    for word in ("s", "sa", "sb", "t"):
        tree.snapshot(word)
    assert tree.snapshots.least(UNPROVEN) is None
    assert tree.snapshots.least(TIP) is tree.nodes["sa"]
    tree.snapshot("u", answer=True)
    assert tree.snapshots.least(SUPERSEDED) is None
    assert tree.snapshots.least(UNPROVEN) is tree.nodes["u"]


def test_a_new_snapshot_supersedes_the_one_before_it_rather_than_anybody_elses():
    tree = Tree()
    tree.snapshot("a")
    own = tree.snapshot("bc")
    tree.snapshot("u", answer=True)
    assert tree.snapshots.least(SHARED) is tree.nodes["u"]
    assert tree.snapshots.least(SHARED, parent=own) is own
    tree.snapshot("b")
    assert tree.snapshots.least(SHARED, parent=own) is tree.nodes["b"], "what is superseded already goes before it"


def test_a_new_snapshot_does_not_supersede_one_that_another_lineage_follows():
    tree = Tree()
    system = tree.snapshot("s")
    tree.snapshot("sa")
    tree.snapshot("x")
    assert tree.snapshots.least(SHARED) is system
    assert tree.snapshots.least(SHARED, parent=system) is tree.nodes["sa"]
    assert tree.snapshots.least(UNPROVEN, parent=system) is None


def test_a_new_snapshot_does_not_supersede_one_that_another_request_runs_from():
    tree = Tree()
    system = tree.snapshot("s")
    tree.snapshot("x")
    tree.index.hold(system)
    assert tree.snapshots.least(SHARED, parent=system) is system
    tree.index.hold(system)
    assert tree.snapshots.least(SHARED, parent=system) is tree.nodes["x"]


def test_what_is_being_read_is_spared_except_by_the_reader():
    tree = Tree()
    read = tree.snapshot("a")
    assert tree.snapshots.least(SHARED, spared={read}) is None
    assert tree.snapshots.least(SHARED, spared={read}, parent=read) is read
    other = tree.snapshot("b")
    assert tree.snapshots.least(SHARED, spared={read}) is other


def test_what_is_kept_goes_last_of_all():
    tree = Tree()
    for word in ("s", "sa", "sb", "t", "tt"):
        tree.snapshot(word)
    kept = [tree.nodes["t"]]
    assert tree.worth("t") == SUPERSEDED
    assert tree.snapshots.least(TIP, kept=kept) is tree.nodes["sa"]
    assert tree.snapshots.least(UNPROVEN, kept=kept) is None
    assert tree.snapshots.least(SHARED, kept=kept, parent=kept[0]) is tree.nodes["sa"]
    assert tree.order(kept=kept) == ["sa", "s", "sb", "tt", "t"]


def test_for_a_block_only_loose_leaves_count():
    tree = Tree()
    tree.snapshot("a")
    tree.snapshot("ab")
    held = tree.snapshot("x", answer=True)
    tree.index.hold(held)
    assert tree.worth("a") == SUPERSEDED
    assert tree.snapshots.least_leaf() is tree.nodes["ab"]
    tree.index.release(held)
    assert tree.snapshots.least_leaf() is held
    tree.snapshots.detach(held)
    tree.snapshot("b")
    tree.index.touch(tree.nodes["ab"])
    assert tree.snapshots.least_leaf() is tree.nodes["b"]


def test_without_leaves_nothing_goes_for_a_block():
    assert Retention().least_leaf() is None

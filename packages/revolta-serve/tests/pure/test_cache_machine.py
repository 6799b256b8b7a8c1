"""The prefix cache against a model of it: a dictionary of paths and a list of holders, every question answered by looking at all of them.

The model says which block and which snapshot must go next by the definitions; index and retention must come to the same with their
queues and counts.
"""

from collections import Counter
from dataclasses import dataclass

import pytest
from hypothesis import seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule, run_state_machine_as_test

from revolta_serve.cache.block_times import BlockTimes
from revolta_serve.cache.prefix_cache import PrefixCache
from revolta_serve.cache.retention import SHARED, SUPERSEDED, TIP, UNPROVEN, nearest

DEEPEST = 5
FORMS = (64, 64, 30, 0)
symbols = st.integers(0, 1)
computed = st.tuples(symbols, st.sampled_from(FORMS), st.sampled_from(["", "prompt", "prompt", "answer"]))


@dataclass
class Entry:
    """One block of the model; its path is its key in the dictionary."""

    block: int
    used: int
    slot: int = -1
    answer: bool = False
    proven: bool = False


class Model:
    """Paths are tuples of (symbol, form)."""

    def __init__(self):
        self.entries: dict[tuple, Entry] = {}
        self.holders: list[tuple] = []
        self.read: list[tuple] = []
        self.gone: set[tuple] = set()
        self.clock = 0

    def touch(self, path):
        self.clock += 1
        self.entries[path].used = self.clock

    def held(self, path):
        return any(holder[: len(path)] == path for holder in self.holders)

    def children(self, path):
        return [other for other in self.entries if len(other) == len(path) + 1 and other[:-1] == path]

    def above(self, path):
        """The nearest snapshot strictly before a path."""
        return next((path[:depth] for depth in range(len(path) - 1, 0, -1) if self.entries[path[:depth]].slot >= 0), None)

    def below(self, path):
        return [other for other, entry in self.entries.items() if entry.slot >= 0 and self.above(other) == path]

    def worth(self, path):
        following = [self.entries[other] for other in self.below(path)]
        lineages = sum(not entry.answer or entry.proven for entry in following)
        users = sum(holder == path for holder in self.holders) + sum(self.held(child) for child in self.children(path))
        if lineages > 1 or users > 1:
            return SHARED
        if lineages == 1:
            return SUPERSEDED
        entry = self.entries[path]
        return UNPROVEN if entry.answer and not entry.proven else TIP

    def next_block(self):
        """What goes when a block is needed: ("block", path) or, where only snapshots are in the way, ("snapshot", path)."""
        leaves = [path for path in self.entries if not self.held(path) and not self.children(path)]
        bare = [path for path in leaves if self.entries[path].slot < 0]
        if bare:
            return "block", min(bare, key=lambda path: self.entries[path].used)
        return "snapshot", min(leaves, key=lambda path: (self.worth(path), self.entries[path].used))

    def next_snapshot(self, most, tip, kept):
        """What goes when a slot is needed, or None. `tip`: the end of the path that a new snapshot extends."""
        parent = tip if tip and self.entries[tip].slot >= 0 else self.above(tip) if tip else None
        ranks = {}
        for path, entry in self.entries.items():
            if entry.slot < 0:
                continue
            rank = self.worth(path)
            if path in kept:
                rank = SHARED + 0.5
            elif path == parent:
                rank = 0.5 if rank in (UNPROVEN, TIP) else SHARED
            elif path in self.read:
                continue
            if rank <= most or (path in kept and most == SHARED):
                ranks[path] = rank, entry.used
        return min(ranks, key=ranks.__getitem__, default=None)

    def remove(self, path):
        used = self.entries.pop(path).used
        word = word_of(path)
        if not any(word_of(other) == word for other in self.entries):
            self.gone.add(word)
        if len(path) > 1:
            parent = self.entries[path[:-1]]
            parent.used = max(parent.used, used)


def word_of(path):
    return tuple(symbol for symbol, _ in path)


def keys_of(word):
    return [bytes(word[:depth]) for depth in range(1, len(word) + 1)]


def seamless(path):
    return all(form == 64 for _, form in path)


class Machine(RuleBasedStateMachine):
    events: Counter = Counter()

    @initialize(blocks=st.integers(4, 14), slots=st.integers(1, 5))
    def build(self, blocks, slots):
        self.cache, self.model = PrefixCache(blocks, slots, BlockTimes()), Model()
        self.blocks: list[int] = []
        self.slots: list[int] = []

    def node(self, path):
        node = None
        for depth, (_, form) in enumerate(path):
            node = self.cache.index.child(node, keys_of(word_of(path))[depth], form)
            assert node is not None
        return node

    def drop(self, path):
        self.model.entries[path].slot = -1

    def take_block(self):
        """A block, or None; whatever goes for it is what the model says."""
        model, free = self.model, self.cache.blocks.num_free
        loose = sum(not model.held(path) for path in model.entries)
        while not free and loose:
            what, path = model.next_block()
            self.events[f"{what} goes for a block"] += 1
            if what == "block":
                model.remove(path)
                break
            self.events[f"worth {model.worth(path)} goes for a block"] += 1
            self.drop(path)
        got = self.cache.take_blocks(1)
        assert (got is not None) == bool(free or loose)
        if got is None:
            self.events["no block"] += 1
        return None if got is None else got[0]

    def take_slot(self, most, tip=(), kept=()):
        free = self.cache.slots.num_free
        goes = None if free else self.model.next_snapshot(most, tip, kept)
        if goes:
            self.events["kept goes"] += goes in kept
            self.events["kept stays"] += bool(kept) and goes not in kept
            own = tip[: len(goes)] == goes and nearest(self.node(tip)) is self.node(goes) if tip else False
            self.events["own parent goes" if own else f"worth {self.model.worth(goes)} goes for a slot"] += 1
            self.events["spared"] += bool(self.model.read)
            self.drop(goes)
        slot = self.cache.take_slot(most, below=self.node(tip), kept=[self.node(path) for path in kept])
        assert (slot >= 0) == bool(free or goes)
        self.events["no slot"] += slot < 0
        return slot

    @precondition(lambda self: self.model.entries)
    @rule(
        which=st.integers(0, 999),
        more=st.lists(symbols, max_size=2),
        seamless_only=st.booleans(),
        stays=st.sampled_from([True, True, False]),
    )
    def look_up_and_resume(self, which, more, seamless_only, stays):
        model = self.model
        word = (*word_of(list(model.entries)[which % len(model.entries)]), *more)
        found = self.cache.match(keys_of(word), seamless_only=seamless_only)
        known = max((len(path) for path in model.entries if word_of(path) == word[: len(path)]), default=0)
        snapshots = [path for path, entry in model.entries.items() if entry.slot >= 0 and word_of(path) == word[: len(path)]]
        usable = [path for path in snapshots if seamless(path) or not seamless_only]
        depth = max(map(len, usable), default=0)
        assert (found.known, found.depth) == (known, depth)
        assert found.barred == any(len(path) > depth for path in snapshots)
        assert found.evicted == (known < len(word) and word[: known + 1] in model.gone)
        self.events.update(["barred"] * found.barred + ["evicted"] * found.evicted)
        if not found.node:
            return
        best = [path for path in usable if len(path) == depth]
        assert found.node.seamless == any(map(seamless, best))
        path = next(path for path in best if self.node(path) is found.node)
        ids = self.cache.resume(found.node)
        assert ids == tuple(model.entries[path[:depth]].block for depth in range(1, len(path) + 1)), "every block is there"
        model.touch(path)
        if stays:
            found.node.proven = model.entries[path].proven = True
            model.holders.append(path)
            model.read.append(path)
            self.events["resumed"] += 1
        else:
            self.cache.back_out(found.node)

    @rule(blocks=st.lists(computed, min_size=1, max_size=3))
    def compute_from_nothing(self, blocks):
        self.model.holders.append(())
        for each in blocks:
            self.compute(len(self.model.holders) - 1, *each)

    @precondition(lambda self: self.model.holders)
    @rule(which=st.integers(0, 999), blocks=st.lists(computed, min_size=1, max_size=3))
    def compute_on(self, which, blocks):
        for each in blocks:
            self.compute(which % len(self.model.holders), *each)

    def compute(self, which, symbol, form, wanted):
        model = self.model
        tip = model.holders[which]
        if len(tip) == DEEPEST:
            return
        kept = [tip[:depth] for depth in range(1, len(tip) + 1) if symbol and model.entries[tip[:depth]].slot >= 0]
        slot = self.take_slot(SHARED if wanted == "prompt" else UNPROVEN, tip if wanted == "prompt" else (), kept) if wanted else -1
        block = self.take_block()
        if block is None:
            if slot >= 0:
                self.cache.slots.give(slot)
            return
        path = (*tip, (symbol, form))
        node = self.cache.extend(self.node(tip), keys_of(word_of(path))[-1], form, block)
        if path in model.entries:
            assert node.block == model.entries[path].block
            self.events["kept once"] += 1
        else:
            assert node.block == block
            model.entries[path] = Entry(block, 0)
            model.gone.discard(word_of(path))
        model.holders[which] = path
        model.touch(path)
        if slot >= 0:
            version = self.cache.version
            stored = self.cache.store(node, slot, answer=wanted == "answer")
            assert stored == (model.entries[path].slot < 0)
            assert (self.cache.version != version) == stored
            if stored:
                entry = model.entries[path]
                entry.slot, entry.answer, entry.proven = slot, wanted == "answer", False
                model.touch(path)

    @precondition(lambda self: self.model.holders)
    @rule(which=st.integers(0, 999), count=st.integers(1, 3))
    def end(self, which, count):
        self.the_step_is_done()
        for _ in range(min(count, len(self.model.holders))):
            tip = self.model.holders.pop(which % len(self.model.holders))
            self.cache.index.release(self.node(tip))

    @precondition(lambda self: len(self.model.holders) > 1)
    @rule(which=st.integers(0, 999))
    def end_in_distrust(self, which):
        self.the_step_is_done()
        model = self.model
        path = model.holders.pop(which % len(model.holders))
        self.cache.discard(self.node(path))
        while path and not model.held(path) and not model.children(path):
            model.remove(path)
            path = path[:-1]
            self.events["distrusted"] += 1

    @precondition(lambda self: len(self.slots) < 2)
    @rule(most=st.sampled_from([SUPERSEDED, UNPROVEN, SHARED]))
    def borrow_a_slot(self, most):
        slot = self.take_slot(most)
        if slot >= 0:
            self.slots.append(slot)

    @precondition(lambda self: len(self.blocks) < 2)
    @rule()
    def borrow_a_block(self):
        block = self.take_block()
        if block is not None:
            self.blocks.append(block)

    @precondition(lambda self: self.slots or self.blocks)
    @rule()
    def give_back(self):
        for slot in self.slots:
            self.cache.slots.give(slot)
        for block in self.blocks:
            self.cache.blocks.give(block)
        self.slots, self.blocks = [], []

    @precondition(lambda self: any(entry.slot >= 0 for entry in self.model.entries.values()))
    @rule(which=st.integers(0, 999))
    def give_up_a_snapshot(self, which):
        paths = [path for path, entry in self.model.entries.items() if entry.slot >= 0]
        path = paths[which % len(paths)]
        assert self.cache.give_up(self.node(path)) == (path not in self.model.read)
        if path not in self.model.read:
            self.drop(path)

    @rule()
    def the_step_is_done(self):
        self.cache.being_read.clear()
        self.model.read = []

    @precondition(lambda self: len(self.model.entries) > 6)
    @rule()
    def clear(self):
        model, cache = self.model, self.cache
        self.the_step_is_done()
        snapshots = [path for path, entry in model.entries.items() if entry.slot >= 0]
        loose = [path for path in model.entries if not model.held(path)]
        result = cache.clear()
        assert (result.blocks_freed, result.snapshots_freed) == (len(loose), len(snapshots))
        for path in snapshots:
            self.drop(path)
        for path in sorted(loose, key=len, reverse=True):
            model.remove(path)
        assert result.blocks_in_use == len(model.entries) + len(self.blocks)
        model.gone = set()

    @invariant()
    def the_books_agree(self):
        if not hasattr(self, "cache"):
            return
        self.events["steps"] += 1
        model, cache, index = self.model, self.cache, self.cache.index
        assert len(index) == len(model.entries)
        assert set(cache.times._times) == set(index)
        nodes = {path: self.node(path) for path in model.entries}
        for path, node in nodes.items():
            entry = model.entries[path]
            assert (node.block, node.slot, node.used, node.depth) == (entry.block, entry.slot, entry.used, len(path))
            assert node.seamless == seamless(path)
            assert (node.holds > 0) == model.held(path)
            assert node.children == len(model.children(path))
            if entry.slot >= 0:
                assert node.above is (nodes[model.above(path)] if model.above(path) else None)
                assert node.below == {nodes[other] for other in model.below(path)}
                assert cache.snapshots.worth(node) == model.worth(path)
        assert index.num_loose == sum(not model.held(path) for path in model.entries)
        taken = [entry.slot for entry in model.entries.values() if entry.slot >= 0] + self.slots
        assert len(set(taken)) == len(taken) == cache.slots.size - cache.slots.num_free, "a slot of two"
        blocks = [entry.block for entry in model.entries.values()] + self.blocks
        assert len(set(blocks)) == len(blocks) == cache.blocks.size - cache.blocks.num_free, "a block of two"
        assert cache.num_available == cache.blocks.num_free + index.num_loose == cache.blocks.size - cache.num_held
        assert len(cache.snapshots) == sum(entry.slot >= 0 for entry in model.entries.values())


EVENTS = {
    "block goes for a block", "snapshot goes for a block", "no block", "no slot", "own parent goes", "spared", "resumed", "kept once",
    "barred", "evicted", "distrusted", "worth 0 goes for a slot", "worth 1 goes for a slot", "worth 2 goes for a slot",
    "worth 3 goes for a slot", "kept goes", "kept stays", "worth 1 goes for a block", "worth 2 goes for a block",
}  # fmt: skip


def check(rounds, **options):
    """Rounds of lives, each with its own seed, until every event has happened; it must have by the last."""
    Machine.events = Counter()
    for number in range(rounds):
        rules = settings(stateful_step_count=50, deadline=None, database=None, **options)
        run_state_machine_as_test(seed(number)(Machine), settings=rules)
        missing = EVENTS - {event for event, count in Machine.events.items() if count}
        if not missing:
            return
    pytest.fail(f"never happened: {missing}, of {Machine.events}")


def test_the_cache_is_its_model():
    check(8, max_examples=100)


@pytest.mark.full
def test_the_cache_is_its_model_for_ten_thousand_steps():
    check(3, max_examples=500)
    assert Machine.events["steps"] > 10_000

"""The two pools and what is kept in them for later: one place that hands out blocks and slots, evicting by worth when none is free.

Blocks are free, in the index, or private to a request (handed out and not yet whole). Slots are free, snapshots of the index, or a
request's: its running state, its rolling snapshot, or promised to a snapshot of the step under way.
"""

from collections import Counter
from collections.abc import Collection, Sequence

from revolta_serve.cache.block_times import BlockTimes
from revolta_serve.cache.keys import Key
from revolta_serve.cache.pool import Pool
from revolta_serve.cache.prefix_index import Match, Node, PrefixIndex, path_to
from revolta_serve.cache.retention import SHARED, Retention, nearest
from revolta_serve.types import CacheReset


class PrefixCache:
    """Blocks, slots, and the index over them. Counts what it evicts."""

    def __init__(self, num_blocks: int, num_slots: int, times: BlockTimes | None = None) -> None:
        """times: is told what becomes of blocks."""
        self.times = times
        self.blocks, self.slots = Pool("token block", num_blocks), Pool("state slot", num_slots)
        self.index, self.snapshots = PrefixIndex(), Retention()
        self.being_read: Counter[Node] = Counter()
        """Nodes whose snapshots the step under way copies from, and how often: they keep their slots until it is done."""
        self.blocks_evicted = self.snapshots_evicted = self.blocks_deduplicated = 0
        self.version = 0
        """Changes whenever a lookup may find a snapshot that it did not find before, or one whose blocks are held now."""

    @property
    def num_available(self) -> int:
        """Blocks that can be handed out without taking any from a request."""
        return self.blocks.num_free + self.index.num_loose

    @property
    def num_held(self) -> int:
        """Blocks of requests, those of the index that they hold included."""
        return self.blocks.size - self.num_available

    def match(self, keys: Sequence[Key], *, seamless_only: bool) -> Match:
        """What is known of a prompt whose whole blocks have these keys."""
        return self.index.match(keys, seamless_only=seamless_only)

    def resume(self, node: Node) -> tuple[int, ...]:
        """Hold a node whose snapshot will be copied in the coming step: the ids of all blocks up to it, in order."""
        self.index.hold(node)
        self.being_read[node] += 1
        self.index.touch(node)
        return tuple(at.block for at in reversed(path_to(node)))

    def back_out(self, node: Node) -> None:
        """Undo `resume`."""
        self.being_read[node] -= 1
        if not self.being_read[node]:
            del self.being_read[node]
        self.index.release(node)

    def take_blocks(self, count: int) -> tuple[int, ...] | None:
        """Hand out blocks, evicting what is worth least; None, and nothing evicted, if there are not enough that nobody holds."""
        if self.num_available < count:
            return None
        while self.blocks.num_free < count:
            self._evict_block()
        return tuple(self.blocks.take() for _ in range(count))

    def take_slot(self, most: int = SHARED, *, below: Node | None = None, kept: Collection[Node] = ()) -> int:
        """Hand out a slot, evicting a snapshot worth at most `most` if none is free; -1 if there is none.

        `below` is the end of the path that the slot's new snapshot will extend: the snapshot that it supersedes is the first choice
        after those that are superseded already. `kept` are the last.
        """
        if not self.slots.num_free:
            node = self.snapshots.least(most, parent=nearest(below), spared=self.being_read, kept=kept)
            if node is None:
                return -1
            self._drop(node)
        return self.slots.take()

    def give_up(self, node: Node) -> bool:
        """Free the slot of a snapshot for a request that has no other; False if the step under way copies from it."""
        if node in self.being_read:
            return False
        self._drop(node)
        return True

    def extend(self, tip: Node | None, key: Key, form: int, block: int) -> Node:
        """Move the caller's hold from `tip` to its child for a block that is whole now; `block` holds its content.

        If the child is there already, the block given is free afterwards and the child's takes its place.
        """
        node = self.index.child(tip, key, form)
        if node is None:
            node = self.index.add(tip, key, form, block)
            if self.times:
                self.times.computed(node)
            return node
        self.blocks.give(block)
        self.blocks_deduplicated += 1
        self.version += 1
        self.index.hold(node)
        self.index.release(tip)
        self.index.touch(node)
        return node

    def store(self, node: Node, slot: int, *, answer: bool = False) -> bool:
        """Keep a slot as the snapshot of a node; False, and the slot is free, if the node has one."""
        if node.slot >= 0:
            self.slots.give(slot)
            return False
        self.snapshots.attach(node, slot, answer=answer)
        self.index.touch(node)
        self.version += 1
        return True

    def discard(self, tip: Node | None) -> None:
        """End the caller's hold of a path whose content cannot be trusted and remove as much of it as nobody else holds or extends."""
        self.index.release(tip)
        while tip is not None and not tip.holds and not tip.children:
            parent = tip.parent
            if tip.slot >= 0:
                self.slots.give(self.snapshots.detach(tip))
            self.index.remove(tip)
            self._forget(tip)
            tip = parent

    def clear(self) -> CacheReset:
        """Forget everything that nobody holds, and all snapshots."""
        snapshots, blocks = len(self.snapshots), self.blocks.num_free
        for node in list(self.snapshots):
            self.slots.give(self.snapshots.detach(node))
            self.index.offer(node)
        while (leaf := self.index.pop_loose_leaf()) is not None:
            self._forget(leaf)
        self.index.forget_evictions()
        return CacheReset(
            blocks_freed=self.blocks.num_free - blocks, snapshots_freed=snapshots, blocks_in_use=self.blocks.size - self.blocks.num_free
        )

    def _evict_block(self) -> None:
        node = self.index.pop_loose_leaf()
        while node is None:
            last = self.snapshots.least_leaf()
            assert last is not None, "a loose node without loose leaves"
            self._drop(last)
            node = self.index.pop_loose_leaf()
        self.blocks.give(node.block)
        self.blocks_evicted += 1
        if self.times:
            self.times.evicted(node)

    def _forget(self, node: Node) -> None:
        self.blocks.give(node.block)
        if self.times:
            self.times.forgotten(node)

    def _drop(self, node: Node) -> None:
        self.slots.give(self.snapshots.detach(node))
        self.snapshots_evicted += 1
        self.index.offer(node)

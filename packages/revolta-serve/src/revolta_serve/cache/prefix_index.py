"""The prefix index: a tree of computed token blocks, found by what they contain.

A node is one block whose K, V and index keys are stored. Two requests may compute the same tokens in different ways, as a prompt or
one by one as an answer, and then the last bits differ: so the children of a node are told apart by key and by *form*, the number of the
block's first tokens that were computed as a prompt. Equal path, equal bits. A node whose whole path has form 64 is seamless: it is what
a cold start would compute.

A node may carry a snapshot, the recurrent state after its last token. Whoever resumes needs both, blocks and state: as a node is never
removed before its children, a snapshot is proof that everything before it is there too.

Requests hold the last node of their path, and a held node protects its ancestors. The others are loose: leaves among them can go.
"""

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from revolta_serve.cache.keys import Key
from revolta_serve.cache.layout import BLOCK

REMEMBERED = 16_384
"""Keys of removed nodes that are remembered, to tell a prompt that was forgotten from one that is new."""


class Node:
    """One computed block. Fields are for reading; the index changes them."""

    __slots__ = ("above", "alive", "answer", "below", "block", "children", "depth", "form", "holds", "key", "parent", "proven", "queued",
                 "seamless", "serial", "slot", "used")  # fmt: skip

    def __init__(self, serial: int, parent: "Node | None", key: Key, form: int, block: int) -> None:
        self.serial, self.parent, self.key, self.form, self.block = serial, parent, key, form, block
        self.depth: int = parent.depth + 1 if parent else 1
        """Blocks up to and with this one."""
        self.seamless: bool = form == BLOCK and (parent is None or parent.seamless)
        self.children = 0
        self.holds = 0
        """Holders of this node plus children that are held."""
        self.used = 0
        """When its content was last wanted, in the index's count of such moments."""
        self.alive = True
        self.queued = False
        """In the queue of removable nodes, where each is at most once."""
        self.slot = -1
        """State slot of its snapshot, -1 for none. This and the rest belong to cache.retention."""
        self.answer = self.proven = False
        self.above: Node | None = None
        self.below: set[Node] = set()


def path_to(node: Node | None) -> list[Node]:
    """The node and all before it, deepest first."""
    path = []
    while node is not None:
        path.append(node)
        node = node.parent
    return path


@dataclass(frozen=True, slots=True)
class Match:
    """What is known of a prompt."""

    node: Node | None
    """The deepest one with a snapshot that may be used."""
    known: int
    """Blocks of the prompt that are stored, with or without a state at their end."""
    barred: bool
    """A deeper snapshot exists that may not be used, as it is not seamless."""
    evicted: bool
    """Its first unknown block was known once."""

    @property
    def depth(self) -> int:
        """Blocks up to the snapshot."""
        return self.node.depth if self.node else 0


class PrefixIndex:
    """Nodes by path and by key. Knows nothing of who owns free blocks or slots: its caller gives blocks in and takes them back."""

    def __init__(self) -> None:
        self._children: dict[tuple[int, Key, int], Node] = {}
        self._by_key: dict[Key, list[Node]] = {}
        self._loose = self._dead = 0
        self._clock = self._serial = 0
        # Loose leaves without a snapshot, oldest first. An entry may be out of date; it is checked when it comes up.
        self._removable: list[tuple[int, int, Node]] = []  # ties are told apart by the serial, which is in there once
        self._gone: dict[Key, None] = {}

    def __len__(self) -> int:
        return len(self._children)

    def __iter__(self) -> Iterator[Node]:
        return iter(self._children.values())

    @property
    def num_loose(self) -> int:
        """Nodes that no holder protects."""
        return self._loose

    def touch(self, node: Node) -> None:
        """The content of a node was wanted now."""
        self._clock += 1
        node.used = self._clock

    def child(self, parent: Node | None, key: Key, form: int) -> Node | None:
        """The child of a node (None: of the root) with this key and form."""
        return self._children.get((parent.serial if parent else 0, key, form))

    def match(self, keys: Sequence[Key], *, seamless_only: bool) -> Match:
        """What is known of a prompt whose whole blocks have these keys: the deepest snapshot, the seamless one of two as deep."""
        by_key, known, barred = self._by_key, 0, False
        for depth in range(len(keys), 0, -1):
            nodes = by_key.get(keys[depth - 1])
            if nodes is None:
                continue
            known = known or depth
            usable = [node for node in nodes if node.slot >= 0 and (node.seamless or not seamless_only)]
            if usable:
                return Match(max(usable, key=lambda node: node.seamless), known, barred, self._was_evicted(keys, known))
            barred = barred or any(node.slot >= 0 for node in nodes)
        return Match(None, known, barred, self._was_evicted(keys, known))

    def stored(self, key: Key, *, seamless: bool) -> bool:
        """Whether a block with this key has a snapshot, a seamless one if asked for."""
        return any(node.slot >= 0 and (node.seamless or not seamless) for node in self._by_key.get(key, ()))

    def add(self, parent: Node | None, key: Key, form: int, block: int) -> Node:
        """Add a node below one that is held (or the root), itself held in its parent's place: the caller's hold moves to it.

        Raises ValueError if it is there already.
        """
        place = (parent.serial if parent else 0, key, form)
        if place in self._children:
            raise ValueError(f"the block after {parent.depth if parent else 0} blocks with form {form} is in the index already")
        self._serial += 1
        node = self._children[place] = Node(self._serial, parent, key, form, block)
        self._by_key.setdefault(key, []).append(node)
        self._gone.pop(key, None)
        node.holds = 1
        if parent is not None:
            # One hold fewer as the caller's, one more for a child that is held: the count stays.
            parent.children += 1
        self.touch(node)
        return node

    def hold(self, node: Node | None) -> None:
        """Protect a node and its ancestors."""
        while node is not None:
            node.holds += 1
            if node.holds > 1:
                return
            self._loose -= 1
            node = node.parent

    def release(self, node: Node | None) -> None:
        """End one hold of a node. Raises ValueError if there is none."""
        while node is not None:
            if node.holds < 1:
                raise ValueError(f"a block at depth {node.depth} is released, but nobody holds it")
            node.holds -= 1
            if node.holds:
                return
            self._loose += 1
            self.offer(node)
            node = node.parent

    def pop_loose_leaf(self) -> Node | None:
        """Remove the loose leaf without a snapshot that has been unwanted the longest; None if there is none. Its block is free then."""
        while self._removable:
            used, _, node = heapq.heappop(self._removable)
            node.queued = False
            self._dead -= not node.alive
            if not self._may_go(node):
                continue
            if node.used > used:
                self.offer(node)
                continue
            self.remove(node)
            return node
        return None

    def remove(self, node: Node) -> None:
        """Remove a loose leaf without a snapshot. Raises ValueError for any other node."""
        if not self._may_go(node):
            raise ValueError(f"the block at depth {node.depth} is held, has {node.children} children or a snapshot; it cannot be removed")
        parent = node.parent
        node.alive = False
        del self._children[parent.serial if parent else 0, node.key, node.form]
        same = self._by_key[node.key]
        same.remove(node)
        if not same:
            del self._by_key[node.key]
            self._gone[node.key] = None
            if len(self._gone) > REMEMBERED:
                del self._gone[next(iter(self._gone))]
        self._loose -= 1
        if node.queued:
            self._forget_queued()
        if parent is not None:
            parent.children -= 1
            # A path is as recent as its most recent part: it goes as a whole, and before paths that were wanted later.
            parent.used = max(parent.used, node.used)
            self.offer(parent)

    def _forget_queued(self) -> None:
        """A removed node is still in the queue: rebuild it when those are half of it, so that it holds no more than the index does."""
        self._dead += 1
        if 2 * self._dead > len(self._removable):
            self._removable = [entry for entry in self._removable if entry[2].alive]
            heapq.heapify(self._removable)
            self._dead = 0

    def forget_evictions(self) -> None:
        """Forget which keys were there once."""
        self._gone.clear()

    def offer(self, node: Node) -> None:
        """Look whether a node may go now: to be called when it has lost its snapshot."""
        if not node.queued and self._may_go(node):
            node.queued = True
            heapq.heappush(self._removable, (node.used, node.serial, node))

    @staticmethod
    def _may_go(node: Node) -> bool:
        return node.alive and not node.holds and not node.children and node.slot < 0

    def _was_evicted(self, keys: Sequence[Key], known: int) -> bool:
        return known < len(keys) and keys[known] in self._gone

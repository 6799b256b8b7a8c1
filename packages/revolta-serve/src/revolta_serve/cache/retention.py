"""Which snapshot goes first when a slot or a block is needed: the one whose loss costs the least.

Snapshots form a tree of their own, each below the nearest one before it. Worth, from low to high:

    0  superseded: the work of exactly one lineage, which has a later snapshot
    1  an answer's end that nobody has resumed from yet: the next prompt may spell the answer differently, and it costs an answer only
    2  the tip of a conversation
    3  where several lineages part, or several running requests are about to

and among equals the one that has been unwanted the longest. An answer's end counts as a lineage once it has been resumed from.
"""

from collections.abc import Container, Iterator

from revolta_serve.cache.prefix_index import Node

SUPERSEDED, UNPROVEN, TIP, SHARED = range(4)


class Retention:
    """The snapshots of an index and their worth."""

    def __init__(self) -> None:
        self._nodes: dict[Node, None] = {}
        self._tops: set[Node] = set()
        """Snapshots with none above."""

    def __len__(self) -> int:
        return len(self._nodes)

    def __iter__(self) -> Iterator[Node]:
        return iter(self._nodes)

    def attach(self, node: Node, slot: int, *, answer: bool) -> None:
        """Make `slot` the snapshot of a node that has none. `answer`: of an answer's end. Raises ValueError if it has one."""
        if node.slot >= 0:
            raise ValueError(f"the block at depth {node.depth} has a snapshot in slot {node.slot} already; slot {slot} is one too many")
        node.slot, node.answer, node.proven = slot, answer, False
        self._nodes[node] = None
        node.above = nearest(node.parent)
        siblings = self._under(node.above)
        if node.children:  # it comes between snapshots: those that lie below it move there
            node.below = {other for other in siblings if _is_below(other, node)}
            for other in node.below:
                other.above = node
            siblings -= node.below
        siblings.add(node)

    def detach(self, node: Node) -> int:
        """Take the snapshot from a node: its slot, which is free then."""
        slot, node.slot = node.slot, -1
        del self._nodes[node]
        siblings = self._under(node.above)
        siblings.discard(node)
        siblings |= node.below
        for other in node.below:
            other.above = node.above
        node.above, node.below = None, set()
        return slot

    def worth(self, node: Node) -> int:
        """How much the loss of a snapshot costs: SUPERSEDED .. SHARED."""
        lineages = sum(not other.answer or other.proven for other in node.below)
        if lineages > 1 or node.holds > 1:
            return SHARED
        if lineages:
            return SUPERSEDED
        return UNPROVEN if node.answer and not node.proven else TIP

    def least(self, most: int, *, parent: Node | None = None, spared: Container[Node] = (), kept: Container[Node] = ()) -> Node | None:
        """The snapshot of the least worth up to `most`; None if all are worth more.

        `parent` is the nearest one before a new one. If that alone follows it, it will be superseded, so it goes after those that are
        and before anybody else's; if there is a lineage already, they part there. `spared` are being read: they go for a new snapshot
        after them only, which is stored when they have been read. `kept` go last of all.
        """
        best, found = (most + 1.0, 0), None
        for node in self._nodes:
            worth: float = self.worth(node)
            if node in kept:
                worth = SHARED + 0.5
            elif node is parent:
                worth = 0.5 if worth in (UNPROVEN, TIP) else SHARED
            elif node in spared:
                continue
            if (worth, node.used) < best:
                best, found = (worth, node.used), node
        return found

    def least_leaf(self) -> Node | None:
        """The snapshot of the least worth whose loss frees blocks: nobody holds its node and nothing follows it."""
        leaves = [node for node in self._nodes if not node.children and not node.holds]
        return min(leaves, key=lambda node: (self.worth(node), node.used), default=None)

    def _under(self, node: Node | None) -> set[Node]:
        return self._tops if node is None else node.below


def nearest(node: Node | None) -> Node | None:
    """The node itself or the nearest before it that has a snapshot."""
    while node is not None and node.slot < 0:
        node = node.parent
    return node


def _is_below(node: Node, ancestor: Node) -> bool:
    at: Node | None = node
    while at is not None and at.depth > ancestor.depth:
        at = at.parent
    return at is ancestor

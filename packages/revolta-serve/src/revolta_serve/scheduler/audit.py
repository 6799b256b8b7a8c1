"""The books: every block and slot is free, cached or held by exactly one, and every sum that is kept equals what it sums up."""

from collections import Counter
from collections.abc import Iterable

from revolta_serve.cache.layout import BLOCK
from revolta_serve.cache.pool import Pool
from revolta_serve.cache.prefix_index import Node
from revolta_serve.errors import EngineError
from revolta_serve.scheduler.request import Request
from revolta_serve.scheduler.storage import Storage


def audit(storage: Storage, running: Iterable[Request]) -> None:
    """Raise EngineError naming the first account that does not balance. Takes time in proportion to the pools."""
    requests, cache, index = list(running), storage.cache, storage.cache.index
    blocks = [node.block for node in index] + [block for request in requests for block in request.private]
    _all_once(cache.blocks, blocks)
    slots = [node.slot for node in cache.snapshots]
    for request in requests:
        slots += [slot for slot in (request.slot, request.rolling, *(slot for _, slot in request.promised)) if slot >= 0]
    _all_once(cache.slots, slots)
    _equal("snapshots of the index", {node.serial for node in index if node.slot >= 0}, {node.serial for node in cache.snapshots})

    holds: Counter[Node] = Counter(request.tip for request in requests if request.tip)
    children: Counter[Node] = Counter(node.parent for node in index if node.parent)
    for node in sorted(index, key=lambda node: -node.depth):
        _equal(f"holds of the block at depth {node.depth}", node.holds, holds[node])
        _equal(f"children of the block at depth {node.depth}", node.children, children[node])
        if node.holds and node.parent:
            holds[node.parent] += 1
    _equal("blocks that nobody holds", index.num_loose, sum(not node.holds for node in index))
    _equal("promised blocks", storage.owed, sum(request.owed for request in requests))
    for request in requests:
        depth = request.tip.depth if request.tip else 0
        if request.tip and not request.tip.alive:
            raise EngineError(f"request {request.number} holds a block at depth {depth} that was removed from the index")
        _equal(f"capacity of request {request.number}", request.capacity, (depth + len(request.private)) * BLOCK)
        if request.computed > request.capacity or request.computed // BLOCK != depth:
            raise EngineError(
                f"request {request.number}: {request.computed} tokens computed, {depth} blocks whole, room for {request.capacity} tokens"
            )


def _all_once(pool: Pool, owned: list[int]) -> None:
    twice = [id for id, count in Counter(owned).items() if count > 1]
    if twice:
        raise EngineError(f"{pool.what}s {sorted(twice)[:5]} have more than one owner")
    lost, given = sorted(pool.taken - set(owned)), sorted(set(owned) - pool.taken)
    if lost or given:
        raise EngineError(f"{pool.what}s: {lost[:5]} are taken and nobody owns them, {given[:5]} are owned and free")


def _equal(what: str, kept: object, found: object) -> None:
    if kept != found:
        raise EngineError(f"{what}: {kept} by the books, {found} counted")

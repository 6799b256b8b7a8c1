"""What a request holds, from its start to its end: the path in the index, blocks, slots, snapshots.

A request starts from the deepest state that may serve it. A new one takes any snapshot of its prompt. One that was preempted takes only
what it would compute itself, bit for bit: its path in the index, forms included; then nothing tells that it was ever away.
"""

from collections.abc import Callable

from revolta_serve.cache import keys as chain
from revolta_serve.cache.block_times import BlockTimes
from revolta_serve.cache.keys import Key
from revolta_serve.cache.layout import BLOCK, blocks_for
from revolta_serve.cache.prefix_cache import PrefixCache
from revolta_serve.cache.prefix_index import Match, Node, path_to
from revolta_serve.cache.retention import SHARED, SUPERSEDED, UNPROVEN
from revolta_serve.scheduler.limits import Limits
from revolta_serve.scheduler.request import Request
from revolta_serve.types import MissReason, Slice

MOST_SNAPSHOTS = 16
"""Snapshots of one slice: the ops that store them take no more for a sequence."""


class Storage:
    """Blocks and slots of all requests. Counts what became of them."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.cache = PrefixCache(limits.num_blocks, limits.num_slots, BlockTimes() if limits.block_times else None)
        self.owed = 0
        """Blocks promised to requests that run and not handed out yet."""
        self.snapshots_stored = self.snapshots_skipped = self.rolling_lost = 0
        self.prefix_queries = self.prefix_hits = self.generated_hits = 0
        self.misses: dict[MissReason, int] = {}
        # Keys at which running requests will store a snapshot, each announced by one of them; and how often any were added.
        self._coming: set[Key] = set()
        self._announced = 0

    def must_wait(self, request: Request) -> bool:
        """Whether a running request is about to store a state that serves this one better than any there is.

        A request that was preempted does not wait: it has its own.
        """
        if request.preemptions or not self._reuses(request):
            return False
        if self.is_coming(request.waits_for):
            return True
        if request.waits_for is not None or request.looked != self._announced:
            request.looked = self._announced
            mine = self._keys(request)[: self._most(request)]
            here = self.cache.match(mine, seamless_only=not self.limits.generated).depth
            request.waits_for = next((key for key in reversed(mine[here:]) if key in self._coming), None)
        return request.waits_for is not None

    def is_coming(self, key: Key | None) -> bool:
        """Whether a running request is about to store a state at this key."""
        return key in self._coming

    def start(self, request: Request, spare: Callable[[], bool]) -> tuple[int, ...] | None:
        """Give a waiting request what it resumes from and a slot: the ids of its first blocks, maybe none; None if there is no room.

        There is room when all of its known tokens fit beside what was promised to others: a prompt that stopped half-way would hold
        blocks for nothing. `spare` frees a slot of a running request that can do without, or says False: if there is none either, the
        snapshot that the request would resume from makes room for the request itself.
        """
        version, needed = request.wanted
        if version == self.cache.version and self.cache.num_available - self.owed < needed:
            return None
        while True:
            node, match = self._find(request)
            ids = self.cache.resume(node) if node else ()
            needed = blocks_for(len(request.tokens)) - len(ids)
            room = self.cache.num_available - self.owed >= needed
            slot = self.cache.take_slot() if room else -1
            if room and slot < 0 and spare():
                slot = self.cache.take_slot()
            if slot >= 0:
                break
            if node:
                self.cache.back_out(node)
            if not (room and node and self.cache.give_up(node)):
                # Held, the blocks it resumes from are not available to anybody; loose, they count as room for themselves.
                request.wanted = (self.cache.version, needed + sum(not at.holds for at in path_to(node)))
                return None
        if node:
            self.cache.version += 1  # blocks that are held now are none that others with the same prefix would need
        request.slot, request.tip, request.settled = slot, node, False
        request.computed = request.capacity = len(ids) * BLOCK
        request.owed, request.wanted = needed, (-1, 0)
        self.owed += needed
        request.base_forms = _forms(node)
        self._account(request, node, match)
        self._mark(request, match)
        return ids

    def grow(self, request: Request, end: int) -> tuple[int, ...] | None:
        """Blocks for the tokens up to `end` beyond those it has; None if nobody can give them up."""
        count = blocks_for(end) - request.capacity // BLOCK
        if count <= 0:
            return ()
        blocks = self.cache.take_blocks(count)
        if blocks is not None:
            request.private += blocks
            request.capacity += count * BLOCK
            kept = min(count, request.owed)
            request.owed -= kept
            self.owed -= kept
        return blocks

    def promise(self, request: Request, end: int) -> tuple[tuple[int, int], ...]:
        """(rows, slot) of the snapshots that the coming slice, up to `end`, shall store; remembered until the step is done."""
        if request.decoding:
            at = end // BLOCK * BLOCK
            if at <= request.computed:
                return ()
            if request.rolling < 0:
                # Only the end of the opening, where prompts part most often: a junction in its own history is worth less than its tip.
                opening = request.source.opening // BLOCK
                kept = [node for node in request.opened if node.depth <= opening]
                request.rolling, request.rolling_at = self.cache.take_slot(UNPROVEN, kept=kept), 0
            if request.rolling < 0:
                self.snapshots_skipped += 1
                return ()
            return ((at - request.computed, request.rolling),)
        inside = [mark for mark in request.marks if mark <= end and not self._is_stored(request, mark)]
        first = [mark for mark in inside if mark in request.required]
        granted: list[tuple[int, int]] = []
        for mark in [*first, *(mark for mark in inside if mark not in request.required)]:
            slot = -1
            if len(granted) < MOST_SNAPSHOTS:
                most, below = (SHARED, request.tip) if mark in request.required else (SUPERSEDED, None)
                slot = self.cache.take_slot(most, below=below, kept=request.opened)
            if slot < 0:
                self.snapshots_skipped += 1
            else:
                granted.append((mark - request.computed, slot))
        request.promised = tuple(sorted(granted))
        return request.promised

    def advance(self, request: Request, piece: Slice) -> None:
        """Take note that a slice is computed: whole blocks join the index, and the snapshots it stored with them."""
        request.computed += len(piece.tokens)
        request.settled = True
        request.promised = ()
        whole, tip = request.computed // BLOCK, request.tip
        done = tip.depth if tip else 0
        if whole == done:
            return
        stored = {piece.start + rows: slot for rows, slot in piece.snapshots}
        keys = self._keys(request)
        for place in range(done, whole):
            block = request.private[place - done]
            tip = self.cache.extend(tip, keys[place], request.form(place), block)
            if tip.block != block:
                request.swaps.append((place, tip.block))
            at = (place + 1) * BLOCK
            if at in stored and piece.kind == "decode":
                request.rolling_at = at
            elif at in stored:
                self.snapshots_stored += self.cache.store(tip, stored[at])
                if at in request.required and at < (request.prompt_length - 1) // BLOCK * BLOCK:
                    request.opened.append(tip)
        request.tip = tip
        del request.private[: whole - done]
        while request.marks and request.marks[-1] <= request.computed:
            key = request.coming.pop(request.marks.pop(), None)
            self._coming.discard(key)

    def stop(self, request: Request, *, preempted: bool) -> None:
        """Take back what a request holds and keep what may serve again: its path, and the state at its end if that is on the grid."""
        tip = request.tip
        on_grid = tip is not None and request.settled and request.computed == tip.depth * BLOCK
        if tip and request.rolling >= 0 and request.rolling_at == tip.depth * BLOCK and (preempted or self.limits.generated):
            self.snapshots_stored += self.cache.store(tip, request.rolling, answer=True)
            request.rolling = -1
        elif tip and on_grid and (preempted or self.limits.generated or not request.decoding):
            self.snapshots_stored += self.cache.store(tip, request.slot, answer=request.decoding)
            request.slot = -1
        request.expected = request.rolling_at
        self._give_slots(request)
        for block in request.private:
            self.cache.blocks.give(block)
        self.cache.index.release(tip)
        self._leave(request)

    def discard(self, request: Request) -> None:
        """Take back what a request holds and keep nothing of it: what it computed is not to be trusted."""
        self._give_slots(request)
        for block in request.private:
            self.cache.blocks.give(block)
        self.cache.discard(request.tip)
        self._leave(request)

    def take_rolling(self, request: Request) -> bool:
        """Free the slot of a request's rolling snapshot for somebody who needs it more; False if it has none."""
        if request.rolling < 0:
            return False
        self.cache.slots.give(request.rolling)
        request.rolling, request.rolling_at = -1, 0
        return True

    def _find(self, request: Request) -> tuple[Node | None, Match | None]:
        """The node to resume from, and for a new request what else is known of its prompt."""
        if not request.preemptions:
            if not self._reuses(request):
                return None, None
            mine = self._keys(request)
            match = self.cache.match(mine[: self._most(request)], seamless_only=not self.limits.generated)
            return match.node, match
        node: Node | None = None
        best: Node | None = None
        for place in range(min(request.reached, len(request.tokens) - 1) // BLOCK):
            node = self.cache.index.child(node, request.keys[place], request.form(place))
            if node is None:
                break
            if node.slot >= 0:
                best = node
        return best, None

    def _account(self, request: Request, node: Node | None, match: Match | None) -> None:
        """Count a start: what was reused, and why it was not more."""
        if request.preemptions:
            self.rolling_lost += request.expected > request.computed
            return
        request.cached = request.computed
        if node:
            node.proven = True
            if self.cache.times:
                self.cache.times.reused(path_to(node))
            request.seamless = node.seamless
            self.generated_hits += not node.seamless
        if self._reuses(request):
            self.prefix_queries += request.prompt_length
            self.prefix_hits += request.cached
        request.miss = self._why(request, match)
        self.misses[request.miss] = self.misses.get(request.miss, 0) + 1

    def _why(self, request: Request, match: Match | None) -> MissReason:
        most = self._most(request)
        if not most:
            return "short"
        if match is None:
            return "disabled"
        if match.depth == most:
            return "none"
        if match.barred:
            return "generated_off"
        if match.known > match.depth:
            return "no_snapshot"
        if match.evicted:
            return "evicted"
        return "none" if match.depth else "cold"

    def _mark(self, request: Request, match: Match | None) -> None:
        """Where snapshots of the prompt are wanted: at its boundaries, at its end, and where an earlier prompt parted from it.

        A prompt that ends on the grid has two ends: the next turn of its conversation resumes from the last one, the same prompt sent
        again from the one before, as it needs a row to compute.
        """
        length, done = request.prompt_length, request.computed
        boundaries = [at // BLOCK * BLOCK for at in request.source.boundaries]
        ends = {at // BLOCK * BLOCK for at in (length - 1, length, request.source.opening)}
        if match:
            ends.add(match.known * BLOCK)
        marks = {mark for mark in (*boundaries, *ends) if done < mark <= length}
        request.marks, request.required = sorted(marks, reverse=True), frozenset(ends)
        # Announced once: who waits for the first that passes must not wait for the next ones too.
        keys = self._keys(request) if marks else []
        new = {mark: keys[mark // BLOCK - 1] for mark in marks if not self._is_stored(request, mark)}
        request.coming = {mark: key for mark, key in new.items() if key not in self._coming}
        self._coming.update(request.coming.values())
        self._announced += bool(request.coming)

    def _is_stored(self, request: Request, mark: int) -> bool:
        seamless = request.tip is None or request.tip.seamless
        return self.cache.index.stored(request.keys[mark // BLOCK - 1], seamless=seamless)

    def _keys(self, request: Request) -> list[Key]:
        """Keys of all whole blocks of its tokens."""
        known = len(request.keys)
        if len(request.tokens) // BLOCK > known:
            before = request.keys[-1] if known else self._root(request)
            request.keys += chain.chain(before, request.tokens, known * BLOCK)
        return request.keys

    def _root(self, request: Request) -> Key:
        """The first link: nobody else's where nothing is to be shared."""
        domain, salt = self.limits.domain, request.source.cache_salt
        return chain.root(f"shared:{domain}", salt) if self.limits.prefix else chain.root(f"alone:{domain}", str(request.number))

    def _reuses(self, request: Request) -> bool:
        return self.limits.prefix and request.source.sampling.prompt_logprobs < 0

    @staticmethod
    def _most(request: Request) -> int:
        """Blocks of a prompt that can be reused: one token at least is left to compute."""
        return (request.prompt_length - 1) // BLOCK

    def _give_slots(self, request: Request) -> None:
        for slot in (request.slot, request.rolling, *(slot for _, slot in request.promised)):
            if slot >= 0:
                self.cache.slots.give(slot)

    def _leave(self, request: Request) -> None:
        """Reset everything about holding; what it is and what it has said stay."""
        self.owed -= request.owed
        self._coming.difference_update(request.coming.values())
        request.reached = max(request.reached, request.computed if request.settled else 0)
        request.slot, request.rolling, request.rolling_at, request.promised = -1, -1, 0, ()
        request.tip, request.computed, request.capacity, request.owed, request.settled = None, 0, 0, 0, False
        request.private, request.swaps, request.marks, request.coming, request.opened = [], [], [], {}, []
        request.introduced = False


def _forms(node: Node | None) -> tuple[int, ...]:
    """Forms of a path that is not seamless; () for one that is."""
    return () if node is None or node.seamless else tuple(at.form for at in reversed(path_to(node)))

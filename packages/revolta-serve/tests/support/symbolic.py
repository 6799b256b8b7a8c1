"""A worker made of hashes: executes plans like a real one, but its states and caches are hashes of how they came about.

A prompt row and an answer row leave different hashes, as they leave different bits in a real model. The token that is drawn is a hash of
the running state and of all cells of the request, so any state that is not restored, any block that is not the right one, any row
computed in another form shows as another token. Beside that it checks whatever a real worker relies on, first of all that nobody else
has written into the blocks of a request.
"""

from dataclasses import dataclass, field
from hashlib import blake2b

from revolta_serve.model.model_config import GRID
from revolta_serve.types import SamplingParams, SliceResult, StepPlan, StepResult, TokenLogprobs

NOTHING = b"nothing"
VOCABULARY = 50


def digest(*parts):
    return blake2b(repr(parts).encode(), digest_size=12).digest()


@dataclass
class Known:
    """One request in the worker."""

    sampling: SamplingParams
    slot: int
    table: list[int] = field(default_factory=list)
    cells: list[bytes] = field(default_factory=list)
    """What the cells of its table must hold, position by position."""
    sum: bytes = b""
    """A hash of all of them."""
    ids: list[int] | None = None
    """Prompt and answer, where sampling depends on them."""
    answering: bool = False
    """Its prompt is computed: the rest are answer rows."""


class SymbolicWorker:
    """Blocks of 64 cells and state slots, both holding hashes."""

    def __init__(self, limits, *, watch=None):
        self.limits = limits
        self.cells = [[NOTHING] * GRID for _ in range(limits.num_blocks)]
        self.states = [NOTHING] * limits.num_slots
        self.known: dict[int, Known] = {}
        self.rows = {"prefill": 0, "decode": 0}
        self.watch = watch
        """Called with (request, position, hash) wherever a token is drawn."""

    def step(self, plan: StepPlan, corrupt=frozenset()) -> StepResult:
        """Execute a plan; the requests in `corrupt` get logits that are not finite, and leave cells that nobody may read."""
        for number in plan.forget:
            self.known.pop(number, None)  # one whose first step failed was never heard of
        self._check(plan)
        for piece in plan.slices:
            self._enter(piece)
        for piece in plan.slices:
            if piece.restore >= 0:
                assert self.states[piece.restore] != NOTHING, "restored from a slot that nothing was stored in"
                self.states[piece.slot] = self.states[piece.restore]
        stores = []
        results = [self._run(piece, stores, piece.request in corrupt) for piece in plan.slices]
        for slot, state in stores:
            self.states[slot] = state
        return StepResult(step=plan.step, slices=tuple(results), decode_rows=self.rows["decode"], prefill_rows=self.rows["prefill"])

    def _enter(self, piece):
        """Block table and parameters, as they are when the rows run."""
        if piece.sampling is not None:
            assert piece.request not in self.known, "introduced twice"
            self.known[piece.request] = Known(piece.sampling, piece.slot)
        known = self.known[piece.request]
        known.table += piece.blocks
        for place, block in piece.swaps:
            known.table[place] = block
        if piece.sampling is not None:
            known.cells = [cell for block in known.table for cell in self.cells[block]][: piece.start]
            assert NOTHING not in known.cells, "resumed from cells that nothing was stored in"
            for cell in known.cells:
                known.sum = digest(known.sum, cell)
            assert (piece.history is not None) == piece.sampling.needs_history
            if piece.history:
                known.ids = [*piece.history.prompt, *piece.history.answer]
        assert piece.slot == known.slot, "a running request changed its slot"
        assert piece.start == len(known.cells), "rows were left out or are computed twice"
        assert len(known.table) == -(-(piece.start + len(piece.tokens)) // GRID), "exactly the blocks that the rows need"
        assert piece.kind == "decode" or not known.answering, "a prompt chunk after one that ended off the grid, or after an answer row"
        known.answering = piece.kind == "decode" or (piece.start + len(piece.tokens)) % GRID != 0
        if known.ids is not None:
            assert tuple(known.ids[piece.start : piece.start + len(piece.tokens)]) == piece.tokens
        held = [cell for block in known.table for cell in self.cells[block]][: piece.start]
        assert held == known.cells, "somebody else wrote into a block of the request, or a swap brought another content"

    def _run(self, piece, stores, corrupt):
        known, stored = self.known[piece.request], dict(piece.snapshots)
        state = digest("zero") if piece.fresh else self.states[piece.slot]
        along = []
        for row, token in enumerate(piece.tokens):
            position = piece.start + row
            before = (piece.tokens[:row][::-1] + piece.before)[: len(piece.before)]
            state = digest("corrupt") if corrupt else digest(state, position, token, before, piece.kind)
            known.cells.append(state)
            known.sum = digest(known.sum, state)
            along.append(state)
            self.cells[known.table[position // GRID]][position % GRID] = state
            if row + 1 in stored:
                assert (position + 1) % GRID == 0, "a snapshot off the grid"
                stores.append((stored[row + 1], state))
        assert sum(rows <= len(piece.tokens) for rows in stored) == len(stored), "a snapshot after the last row"
        self.states[piece.slot] = state
        self.rows[piece.kind] += len(piece.tokens)
        if corrupt:
            return SliceResult(piece.request, corrupt=True)
        logprobs = self._prompt_logprobs(piece, along)
        if not piece.sample:
            return SliceResult(piece.request, prompt_logprobs=logprobs)
        end = piece.start + len(piece.tokens)
        seen = digest(state, known.sampling.seed, known.ids, known.sum)
        if self.watch:
            self.watch(piece.request, end, seen)
        token = int.from_bytes(seen[:4], "little") % VOCABULARY
        if known.ids is not None:
            assert len(known.ids) == end, "a token is drawn before the end of what is known"
            known.ids.append(token)
        return SliceResult(piece.request, (token,), prompt_logprobs=logprobs)

    def _prompt_logprobs(self, piece, along):
        if piece.logprobs_from < 0:
            return ()
        assert piece.kind == "prefill"
        assert piece.logprobs_from < len(piece.tokens)
        following = [*piece.tokens[1:], *([piece.next_token] if piece.next_token >= 0 else [])]
        rows = range(piece.logprobs_from, len(following))
        return tuple(TokenLogprobs(following[row], -float(int.from_bytes(along[row][:4], "little")), 1) for row in rows)

    def _check(self, plan):
        """Everything a real worker relies on that the plan alone shows."""
        limits = self.limits
        kinds = [piece.kind for piece in plan.slices]
        assert kinds == sorted(kinds), "decode slices come first"
        rows = sum(len(piece.tokens) for piece in plan.slices)
        assert 0 < rows <= limits.max_num_batched_tokens
        assert len({piece.request for piece in plan.slices}) == len(plan.slices) <= limits.max_num_seqs
        # One that comes back in this very step finds the prompts already planned.
        if any(piece.kind == "decode" and piece.sampling is None for piece in plan.slices):
            assert sum(len(piece.tokens) for piece in plan.slices if piece.kind == "prefill") <= limits.prefill_cap
        running = [piece.slot for piece in plan.slices]
        targets = [slot for piece in plan.slices for _, slot in piece.snapshots]
        assert len({*running, *targets}) == len(running) + len(targets), "a slot is written twice in one step"
        assert not {piece.restore for piece in plan.slices} & set(running), "a slot is read and run in at once"
        idle = [known.slot for number, known in self.known.items() if number not in {piece.request for piece in plan.slices}]
        assert not {*running, *targets} & set(idle), "a slot of a request that pauses is written"
        blocks = [block for piece in plan.slices for block in piece.blocks[piece.start // GRID if piece.sampling else 0 :]]
        assert len(set(blocks)) == len(blocks), "a block is handed out twice"
        for piece in plan.slices:
            assert piece.fresh == (piece.start == 0)
            assert (piece.restore >= 0) == (piece.sampling is not None and piece.start > 0)
            assert list(piece.snapshots) == sorted(piece.snapshots)
            assert len(piece.snapshots) <= 16
            if piece.kind == "prefill":
                assert piece.start % GRID == 0
            else:
                assert 1 <= len(piece.tokens) <= limits.width
                assert len(piece.snapshots) <= 1

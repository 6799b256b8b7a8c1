"""Which rows each step computes: continuous batching over a token budget, decode rows first, prompts in chunks on the grid.

A request starts when there is a state slot and room for its known tokens. Blocks for what it generates it takes as it goes; when none
is left, what nobody holds is evicted, and then the request that goes last, by priority and arrival, is preempted: it gives up what it
holds, keeps its tokens, and comes back from a state of its own (scheduler.storage). So whoever goes first always goes on, and whatever
runs finishes. The work of a call is proportional to the requests that run and the rows it plans, never to the length of a context.
"""

import logging
from bisect import insort
from collections.abc import Sequence
from operator import attrgetter

from msgspec.structs import replace

from revolta_serve.cache.layout import blocks_for
from revolta_serve.errors import EngineError, QueueFullError, RequestError
from revolta_serve.model.model_config import GRID
from revolta_serve.scheduler.audit import audit
from revolta_serve.scheduler.limits import Limits
from revolta_serve.scheduler.plan import make_slice, next_row, prefill_rows
from revolta_serve.scheduler.request import Request, checked
from revolta_serve.scheduler.status import Counts, status
from revolta_serve.scheduler.storage import Storage
from revolta_serve.scheduler.waiting import Waiting
from revolta_serve.types import CacheReset, EngineStatus, GenerateRequest, Output, Slice, SliceResult, StepPlan, StepResult

log = logging.getLogger(__name__)


class Scheduler:
    """Requests in, step plans out; step results in, outputs out. One plan at a time: schedule, then update or fail.

    `now` is a time in seconds of any clock that does not run backwards.
    """

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.storage = Storage(limits)
        self.waiting = Waiting()
        self.running: dict[int, Request] = {}
        self.admitting = True
        """Whether new requests may start; preempted ones always may."""
        self._order: list[Request] = []
        """Those that run, by priority and arrival: the last is the first to be preempted."""
        self._live: dict[str, Request] = {}
        self._forget: list[int] = []
        self._plan: dict[int, Slice] = {}
        """The slices of the step that is being planned."""
        self._planned: StepPlan | None = None
        self._outputs: list[Output] = []
        """Those not handed over yet: whatever happens to the step, their requests have heard nothing else."""
        self._bypasses: list[Request] = []
        """Those that run and have overtaken somebody."""
        self._numbers = 0
        self._now = 0.0
        """Of the last plan."""
        self._counts = Counts()

    @property
    def has_work(self) -> bool:
        """Whether any request waits or runs, or an output is left to collect."""
        return bool(self._live or self._outputs)

    @property
    def live(self) -> list[str]:
        """Ids of all requests that have not ended, in order of arrival."""
        return list(self._live)

    @property
    def status(self) -> EngineStatus:
        """Counts as of now."""
        return status(self.storage, self.waiting, self.running.values(), self._counts)

    def add(self, sources: Sequence[GenerateRequest], now: float = 0.0) -> None:
        """Queue requests, all of them or, on an error, none.

        Raises ContextLengthError if one can never fit, RequestError if one is malformed or they are more than can ever be queued,
        QueueFullError if they are more than can be queued now.
        """
        ids = [source.id for source in sources]
        for number, id in enumerate(ids):
            if id in self._live or id in ids[:number]:
                raise RequestError(f"request id {id!r} is already in use; choose another")
        requests = [checked(self._numbers + number, source, self.limits, now) for number, source in enumerate(sources)]
        limits, waiting = self.limits, len(self.waiting)
        seats = max(0, limits.max_num_seqs - len(self.running))
        # Drained between steps only, so the queue may hold what the next step will admit: those do not count as waiting.
        if len(requests) > limits.max_queue + seats - waiting:
            most = limits.max_queue + limits.max_num_seqs
            if len(requests) > most:
                raise RequestError(f"{len(requests)} answers are asked for at once, the server never takes more than {most}; ask for fewer")
            raise QueueFullError(
                f"no room in the queue for {len(requests)} more: {waiting} requests are waiting, the limit is {limits.max_queue}"
                + (f" beside the {seats} that the next step may start" if seats else "")
                + "; try again later"
            )
        self._numbers += len(requests)
        for request in requests:
            self.waiting.push(request)
            self._live[request.source.id] = request

    def abort(self, id: str, now: float = 0.0) -> Output | None:
        """End a request wherever it is. None for one that is unknown or has already ended.

        What it computed stays where the next request can find it. Raises EngineError while a step is open: its rows are being
        written into what would be freed.
        """
        self._between_steps()
        request = self._live.get(id)
        return None if request is None else self._end(request, Output(id=id, finish="abort"), now)

    def preempt_all(self) -> None:
        """Send every running request back to the queue. Raises EngineError while a step is open."""
        self._between_steps()
        for request in reversed(list(self._order)):
            self._preempt(request)

    def reset_cache(self) -> CacheReset:
        """Forget everything that can be reused; what running requests hold stays theirs. Raises EngineError while a step is open."""
        self._between_steps()
        for request in self.waiting:
            request.expected = 0  # its rolling snapshot is not evicted, it is forgotten
        return self.storage.cache.clear()

    def audit(self) -> None:
        """Check that every block and slot is accounted for. Raises EngineError naming the account that is not."""
        audit(self.storage, self.running.values())

    def fail(self, message: str, now: float = 0.0) -> list[Output]:
        """End every request with an error, after a step that did not come back. The scheduler is then empty and usable.

        Nothing is kept of what the step may have written to; and as it cannot be told what that was, nothing is kept at all.
        """
        self._planned = None
        self._plan = {}
        self.storage.cache.being_read.clear()
        outputs = [
            self._end(request, Output(id=request.source.id, finish="error", error=message), now, keep=False)
            for request in list(self._live.values())
        ]
        self.storage.cache.clear()
        return self.collect() + outputs

    def schedule(self, now: float = 0.0) -> StepPlan | None:
        """Plan the next step, or None if there is nothing to compute. Raises EngineError if the previous plan is still open."""
        self._between_steps()
        self._plan, self._now = {}, now
        before, budget, prefills = self._counts.preemptions, self.limits.max_num_batched_tokens, []
        plan, history, mark = self._plan, self.limits.history, self.limits.mark
        for request in list(self._order):
            end = request.computed + 1
            if end <= request.prompt_length:
                prefills.append(request)
            elif end == len(request.tokens) and end <= request.capacity and end & GRID - 1 and not request.swaps and request.introduced:
                plan[request.number] = next_row(request, history, mark)
                budget -= 1
            elif request.slot >= 0:
                budget -= self._plan_rows(request, budget)
        room = min(budget, self.limits.prefill_cap) if self._plan else budget
        behind = len(prefills) + (self.admitting and len(self.waiting) > 0 and len(self.running) < self.limits.max_num_seqs)
        for request in prefills:
            behind -= 1
            if request.slot >= 0:
                room -= self._plan_prompt(request, self._share(room, behind))
        if before == self._counts.preemptions and len(self.waiting):
            self._start_waiting(room, now)
        self._watch(now)
        if not self._plan:
            self.storage.cache.being_read.clear()
            return None
        slices = sorted(self._plan.values(), key=attrgetter("kind"))  # "decode" before "prefill"
        self._planned = StepPlan(step=self._counts.steps, slices=tuple(slices), forget=tuple(self._forget))
        self._forget.clear()
        self._counts.steps += 1
        return self._planned

    def update(self, result: StepResult, now: float = 0.0) -> list[Output]:
        """Take the tokens of the planned step. Raises EngineError if the result does not answer the plan."""
        plan = self._planned
        if plan is None or result.step != plan.step or [s.request for s in plan.slices] != [s.request for s in result.slices]:
            raise EngineError(f"the result of step {result.step} does not answer the plan {plan.step if plan else None}")
        self._planned = None
        self._plan = {}
        self.storage.cache.being_read.clear()
        running, advance = self.running, self._advance
        for piece, answer in zip(plan.slices, result.slices, strict=True):
            output = advance(running[piece.request], piece, answer, now)
            if output is not None:
                self._outputs.append(output)
        return self.collect()

    def collect(self) -> list[Output]:
        """Outputs that were not handed over yet: of requests that were ended while a step was planned that has nothing to compute."""
        outputs, self._outputs = self._outputs, []
        return outputs

    def _between_steps(self) -> None:
        if self._planned is not None:
            raise EngineError(f"step {self._planned.step} has not been answered")

    def _plan_rows(self, request: Request, budget: int) -> int:
        """Plan the next answer row of a request, or several that are known already; returns how many of the budget's rows they are."""
        start = request.computed
        rows = len(request.tokens) - start
        if rows > 1:  # one row is left for everybody else, and a chunk for a prompt
            left = len(self._order) + (0 if all(other.decoding for other in self._order) else GRID)
            rows = min(rows, self.limits.width, max(1, budget - left))
        end = start + rows
        blocks = self._blocks(request, end) if end > request.capacity else ()
        if blocks is None:
            return 0
        snapshots = self.storage.promise(request, end) if end & GRID - 1 < rows else ()
        self._put(request, end, blocks, snapshots=snapshots)
        return rows

    def _plan_prompt(self, request: Request, room: int) -> int:
        """Plan the next slice of a prompt; returns its rows, 0 if there is no room or the request had to be preempted for its blocks."""
        rows = prefill_rows(request.prompt_length - request.computed, room)
        end = request.computed + rows
        blocks = self._blocks(request, end) if rows else None
        if blocks is None:
            return 0
        self._put(request, end, blocks, snapshots=self.storage.promise(request, end))
        return rows

    def _put(
        self, request: Request, end: int, blocks: tuple[int, ...], *, snapshots: tuple[tuple[int, int], ...] = (), restore: int = -1
    ) -> None:
        history, mark = self.limits.history, self.limits.mark
        self._plan[request.number] = make_slice(request, end, blocks, restore=restore, snapshots=snapshots, history=history, mark=mark)

    def _blocks(self, request: Request, end: int) -> tuple[int, ...] | None:
        """Blocks for a request's tokens up to `end`, whoever has to give way; None if it is the request itself."""
        while (blocks := self.storage.grow(request, end)) is None:
            last = self._order[-1]
            self._preempt(last)
            if last is request:
                return None
        return blocks

    def _share(self, room: int, behind: int = 0) -> int:
        """Rows of `room` that one prompt may take. Each of the `behind` prompts after it keeps a chunk, if there is more than one."""
        longest = self.limits.long_prefill
        room = max(room - GRID * behind, min(room, GRID))
        return min(room, longest) if longest and len(self.running) + len(self.waiting) > 1 else room

    def _start_waiting(self, room: int, now: float) -> None:
        """Start requests from the queue while there is room; when one has to wait for blocks, a few smaller ones may overtake it."""
        head: Request | None = None
        for request in self.waiting:
            if len(self.running) >= self.limits.max_num_seqs or room < GRID:
                return
            if not self.admitting and request.started < 0:
                continue
            if self.storage.must_wait(request) or (head is not None and not self._may_overtake(request, head, now)):
                continue
            ids = self.storage.start(request, self._spare_slot)
            if ids is None:
                head = head or request
                continue
            if head is not None:
                head.bypassed += 1
                self._bypasses.append(request)
            room -= self._begin(request, ids, room, now)

    def _begin(self, request: Request, ids: tuple[int, ...], room: int, now: float) -> int:
        """Make a request one of the running ones, with its first slice; returns the slice's rows. `ids`: blocks it resumes from."""
        self.waiting.remove(request, started=True)
        self.running[request.number] = request
        insort(self._order, request, key=lambda other: other.order)
        if request.started < 0:
            request.started = now
        restore = request.tip.slot if request.tip else -1
        if request.decoding:
            rows = min(len(request.tokens) - request.computed, self.limits.width, room)
        else:
            rows = prefill_rows(request.prompt_length - request.computed, self._share(room))
        end = request.computed + rows
        blocks = self.storage.grow(request, end)
        assert blocks is not None, "its blocks were promised to it when it started"
        self._put(request, end, ids + blocks, snapshots=self.storage.promise(request, end), restore=restore)
        return rows

    def _may_overtake(self, request: Request, head: Request, now: float) -> bool:
        """Whether a request may start before `head`, which waits for blocks.

        A few may, for a while, and only if all who overtook leave room for the head even at their longest.
        """
        limits = self.limits
        if head.bypassed >= limits.bypass_limit or now - head.queued >= limits.bypass_seconds:
            return False
        longest = sum(blocks_for(other.stored_at_most) for other in (request, *self._bypasses))
        return longest + blocks_for(len(head.tokens)) <= limits.num_blocks

    def _spare_slot(self) -> bool:
        """Free a slot for a request that starts: the rolling snapshot of whoever goes last is worth less than a request."""
        for request in reversed(self._order):
            piece = self._plan.get(request.number)
            if (piece is None or not piece.snapshots) and self.storage.take_rolling(request):
                return True
        return False

    def _watch(self, now: float) -> None:
        """Count the steps that running requests are left out of; one that others pass by for too long is preempted, then ended."""
        if not self._plan or len(self._plan) == len(self.running):
            return
        for request in [request for request in self._order if request.number not in self._plan]:
            request.skipped += 1
            if request.skipped < self.limits.stall_steps:
                continue
            request.stalls += 1
            log.error("request %s: no row in %d steps, other prompts took the budget of all of them", request.source.id, request.skipped)
            if request.stalls == 1:
                self._preempt(request)
            else:
                error = f"the request made no progress in {request.skipped} steps, twice; it was given up"
                self._outputs.append(self._end(request, Output(id=request.source.id, finish="error", error=error), now))

    def _advance(self, request: Request, piece: Slice, answer: SliceResult, now: float) -> Output | None:
        id, rows = request.source.id, len(piece.tokens)
        if answer.corrupt:
            self._counts.corrupted += 1
            error = "no token can be drawn: the model's logits are not finite, or the rules of the request leave nothing"
            return self._end(request, Output(id=id, finish="error", error=error), now, keep=False)
        if len(answer.tokens) != piece.sample:
            raise EngineError(f"request {id}: {len(answer.tokens)} tokens for a slice that asks for {'one' if piece.sample else 'none'}")
        request.skipped = 0
        if piece.kind == "prefill":
            self._counts.prompt_tokens += rows
            request.slices += 1
            self.storage.advance(request, piece)
        else:
            self._counts.replayed_tokens += rows - piece.sample
            if rows == 1 and piece.start + 1 & GRID - 1:  # the usual step: no block is whole
                request.computed += 1
                request.settled = True
            else:
                self.storage.advance(request, piece)
        if answer.prompt_logprobs:
            request.told += len(answer.prompt_logprobs)
        if not answer.tokens:
            return Output(id=id, prompt_logprobs=answer.prompt_logprobs) if answer.prompt_logprobs else None
        (token,) = answer.tokens
        finish = request.append(token)
        self._counts.generated_tokens += 1
        if request.answered < 0:
            request.answered = now
        output = Output(
            id=id,
            tokens=answer.tokens,
            finish=finish,
            stop_token=token if finish == "stop" else None,
            cached_tokens=request.cached,
            logprobs=answer.logprobs,
            prompt_logprobs=answer.prompt_logprobs,
        )
        return output if finish is None else self._end(request, output, now)

    def _preempt(self, request: Request) -> None:
        """Take a running request out of the step that is being planned and put it back into the queue."""
        self._plan.pop(request.number, None)
        self._counts.preemptions += 1
        self._counts.preemptions_in_prefill += not request.decoding
        request.preemptions += 1
        request.skipped = request.bypassed = 0
        request.queued = self._now
        self._leave(request)
        self.storage.stop(request, preempted=True)
        self.waiting.put_back(request)

    def _end(self, request: Request, output: Output, now: float, *, keep: bool = True) -> Output:
        """Free what a request holds and forget it; the workers hear of it with the next plan."""
        del self._live[request.source.id]
        if request.slot < 0:
            self.waiting.remove(request, started=False)
        else:
            self._leave(request)
            if keep and self.limits.prefix:  # else nobody will find it
                self.storage.stop(request, preempted=False)
            else:
                self.storage.discard(request)
        return replace(output, record=request.record(now)) if request.started >= 0 else output

    def _leave(self, request: Request) -> None:
        del self.running[request.number]
        self._order.remove(request)
        self._forget.append(request.number)
        if request in self._bypasses:
            self._bypasses.remove(request)

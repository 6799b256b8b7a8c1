"""Which rows each step computes: continuous batching over a token budget, decode rows first, prompts in chunks on the grid.

A request enters when a state slot and all the blocks it may ever need are free, in order of arrival; so whatever runs can finish.
The work of a call is proportional to the rows it plans, never to the length of a context.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from revolta_serve.cache.block_pool import BlockPool
from revolta_serve.cache.state_pool import StatePool
from revolta_serve.errors import ContextLengthError, EngineError, QueueFullError, RequestError
from revolta_serve.scheduler.plan import blocks_for, make_slice, prefill_rows
from revolta_serve.scheduler.request import Request
from revolta_serve.types import EngineStatus, FinishReason, GenerateRequest, Output, Slice, SliceResult, StepPlan, StepResult


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """What the scheduler must respect. Tokens, requests, blocks and slots."""

    max_num_seqs: int
    max_num_batched_tokens: int
    prefill_cap: int
    """Prompt tokens of a step in which a request decodes; a multiple of 64."""
    max_model_len: int
    max_queue: int
    num_blocks: int
    num_slots: int
    history: int
    """Ids before a slice that the n-gram hash needs: ngram_size - 1."""
    mark: int
    """The id that stands for tokens before the request."""


class Scheduler:
    """Requests in, step plans out; step results in, outputs out. One plan at a time: schedule, then update or fail."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.blocks = BlockPool(limits.num_blocks)
        self.slots = StatePool(limits.num_slots)
        self.waiting: deque[Request] = deque()
        self.running: dict[int, Request] = {}
        self._live: dict[str, Request] = {}
        self._forget: list[int] = []
        self._planned: StepPlan | None = None
        self._numbers = self._steps = self._prompt_tokens = self._generated_tokens = 0

    @property
    def has_work(self) -> bool:
        """Whether any request waits or runs."""
        return bool(self._live)

    @property
    def live(self) -> list[str]:
        """Ids of all requests that have not ended, in order of arrival."""
        return list(self._live)

    @property
    def status(self) -> EngineStatus:
        """Counts as of now."""
        return EngineStatus(
            running=len(self.running),
            waiting=len(self.waiting),
            blocks_used=self.blocks.num_owned,
            blocks_total=self.blocks.num_blocks,
            slots_used=self.slots.num_owned,
            slots_total=self.slots.num_slots,
            steps=self._steps,
            prompt_tokens=self._prompt_tokens,
            generated_tokens=self._generated_tokens,
        )

    def add(self, source: GenerateRequest) -> None:
        """Queue a request.

        Raises ContextLengthError if it can never fit, QueueFullError if too many wait, RequestError if it is malformed.
        """
        limits, prompt = self.limits, len(source.prompt)
        if source.id in self._live:
            raise RequestError(f"request id {source.id!r} is already in use; choose another")
        if not prompt or source.max_tokens < 1:
            raise RequestError(f"a request needs a prompt and max_tokens of at least 1, got {prompt} and {source.max_tokens}")
        if prompt >= limits.max_model_len:
            raise ContextLengthError(
                f"the prompt has {prompt} tokens, but the maximum context length is {limits.max_model_len} with one token of answer"
            )
        # Drained between steps only, so the queue may hold what the next step will admit: those do not count as waiting.
        admissible = max(0, limits.max_num_seqs - len(self.running))
        if len(self.waiting) >= limits.max_queue + admissible:
            raise QueueFullError(f"{len(self.waiting)} requests are waiting, the limit is {limits.max_queue}; try again later")
        request = Request.admit(self._numbers, source, limits.max_model_len)
        needed = blocks_for(request.stored_at_most)
        if needed > limits.num_blocks:
            raise ContextLengthError(
                f"prompt and answer of {request.limit} tokens need {needed} blocks of the {limits.num_blocks} in the cache; "
                "lower max_tokens or raise cache.memory_bytes"
            )
        self._numbers += 1
        self.waiting.append(request)
        self._live[source.id] = request

    def abort(self, id: str) -> Output | None:
        """End a request wherever it is and free what it holds. None for one that is unknown or has already ended."""
        request = self._live.get(id)
        return None if request is None else self._end(request, Output(id=id, finish="abort"))

    def fail(self, message: str) -> list[Output]:
        """End every request with an error, after a step that did not come back. The scheduler is then empty and usable."""
        self._planned = None
        return [self._end(request, Output(id=request.source.id, finish="error", error=message)) for request in list(self._live.values())]

    def schedule(self) -> StepPlan | None:
        """Plan the next step, or None if there is nothing to compute. Raises EngineError if the previous plan is still open."""
        if self._planned is not None:
            raise EngineError(f"step {self._planned.step} has not been answered")
        slices: list[Slice] = []
        budget = self.limits.max_num_batched_tokens
        for request in self.running.values():
            if request.decoding:
                slices.append(self._slice(request, 1))
                budget -= 1
        room = min(budget, self.limits.prefill_cap) if slices else budget
        for request in self._prefills():
            rows = prefill_rows(request.prompt_length - request.computed, room)
            if not rows:
                continue  # a shorter one behind it may fit; it is first again in the next step
            if request.slot < 0 and not self._start(request):
                break
            slices.append(self._slice(request, rows))
            room -= rows
        if not slices:
            return None
        self._planned = StepPlan(step=self._steps, slices=tuple(slices), forget=tuple(self._forget))
        self._forget.clear()
        self._steps += 1
        return self._planned

    def update(self, result: StepResult) -> list[Output]:
        """Take the tokens of the planned step. Raises EngineError if the result does not answer the plan."""
        plan = self._planned
        if plan is None or result.step != plan.step or [s.request for s in plan.slices] != [s.request for s in result.slices]:
            raise EngineError(f"the result of step {result.step} does not answer the plan {plan.step if plan else None}")
        self._planned = None
        outputs = []
        for piece, answer in zip(plan.slices, result.slices, strict=True):
            request = self.running.get(piece.request)
            if request is None:
                continue  # aborted while the step ran: its tokens belong to nobody
            if (output := self._advance(request, piece, answer)) is not None:
                outputs.append(output)
        return outputs

    def _prefills(self) -> Iterable[Request]:
        """Requests with prompt left, running ones first, then the queue."""
        yield from [request for request in self.running.values() if not request.decoding]
        while self.waiting:
            head = self.waiting[0]
            yield head
            if self.waiting and self.waiting[0] is head:
                return  # it could not start: nobody overtakes the head of the queue

    def _start(self, request: Request) -> bool:
        """Move the head of the queue to the running requests if a slot and all its blocks are free."""
        needed = blocks_for(request.stored_at_most)
        if len(self.running) >= self.limits.max_num_seqs or not self.slots.num_free or not self.blocks.can_reserve(needed):
            return False
        self.waiting.popleft()
        self.blocks.reserve(request.number, needed)
        request.slot = self.slots.allocate(request.number)
        self.running[request.number] = request
        return True

    def _slice(self, request: Request, rows: int) -> Slice:
        missing = blocks_for(request.computed + rows) - request.blocks
        blocks = self.blocks.take(request.number, missing) if missing else ()
        request.blocks += missing
        return make_slice(request, rows, blocks, history=self.limits.history, mark=self.limits.mark)

    def _advance(self, request: Request, piece: Slice, answer: SliceResult) -> Output | None:
        id, rows = request.source.id, len(piece.tokens)
        if answer.corrupt:
            return self._end(request, Output(id=id, finish="error", error="the model produced numbers that are not finite"))
        if bool(answer.tokens) != piece.sample:
            raise EngineError(f"request {id}: {len(answer.tokens)} tokens for a slice that asks for {'one' if piece.sample else 'none'}")
        request.computed += rows
        if piece.kind == "prefill":
            self._prompt_tokens += rows
        if not answer.tokens:
            return None
        accepted: list[int] = []
        finish: FinishReason | None = None
        for token in answer.tokens:
            accepted.append(token)
            finish = request.append(token)
            if finish is not None:
                break
        request.computed += len(answer.tokens) - 1  # accepted drafts are stored; without drafts this adds nothing
        self._generated_tokens += len(accepted)
        output = Output(id=id, tokens=tuple(accepted), finish=finish, stop_token=accepted[-1] if finish == "stop" else None)
        return output if finish is None else self._end(request, output)

    def _end(self, request: Request, output: Output) -> Output:
        """Free what a request holds and forget it; the workers hear of it with the next plan."""
        del self._live[request.source.id]
        if request.slot < 0:
            self.waiting.remove(request)
            return output
        del self.running[request.number]
        self.blocks.release(request.number)
        self.slots.release(request.number)
        self._forget.append(request.number)
        return output

"""Which rows each step computes: continuous batching over a token budget, decode rows first, prompts in chunks on the grid.

A request enters, in order of arrival, when a state slot is free and the block pool grants the blocks of its prompt. The blocks of its
answer it claims one by one; where one is refused, the request sits out the step and nothing of it is lost. The pool's rule lets the
oldest request always go on, so whatever runs finishes. The work of a call is proportional to the requests that run and the rows it
plans, never to the length of a context.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from revolta_serve.cache.block_pool import BlockPool
from revolta_serve.cache.state_pool import StatePool
from revolta_serve.errors import ContextLengthError, EngineError, QueueFullError, RequestError
from revolta_serve.scheduler.plan import blocks_for, make_slice, prefill_rows
from revolta_serve.scheduler.request import Request
from revolta_serve.types import EngineStatus, GenerateRequest, Output, Slice, SliceResult, StepPlan, StepResult


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
        self._stalled: set[int] = set()
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
            stalled=len(self._stalled),
            blocks_used=self.blocks.num_owned,
            blocks_total=self.blocks.num_blocks,
            slots_used=self.slots.num_owned,
            slots_total=self.slots.num_slots,
            steps=self._steps,
            prompt_tokens=self._prompt_tokens,
            generated_tokens=self._generated_tokens,
        )

    def add(self, sources: Sequence[GenerateRequest]) -> None:
        """Queue requests, all of them or, on an error, none.

        Raises ContextLengthError if one can never fit, RequestError if one is malformed or they are more than can ever be queued,
        QueueFullError if they are more than can be queued now.
        """
        ids = [source.id for source in sources]
        for number, id in enumerate(ids):
            if id in self._live or id in ids[:number]:
                raise RequestError(f"request id {id!r} is already in use; choose another")
        requests = [self._checked(self._numbers + number, source) for number, source in enumerate(sources)]
        limits, waiting = self.limits, len(self.waiting)
        # Drained between steps only, so the queue may hold what the next step will admit: those do not count as waiting.
        if len(requests) > limits.max_queue + max(0, limits.max_num_seqs - len(self.running)) - waiting:
            most = limits.max_queue + limits.max_num_seqs
            if len(requests) > most:
                raise RequestError(f"{len(requests)} answers are asked for at once, the server never takes more than {most}; ask for fewer")
            raise QueueFullError(
                f"no room in the queue for {len(requests)} more: {waiting} requests are waiting, the limit is {limits.max_queue}; "
                "try again later"
            )
        self._numbers += len(requests)
        self.waiting += requests
        self._live |= zip(ids, requests, strict=True)

    def abort(self, id: str) -> Output | None:
        """End a request wherever it is and free what it holds. None for one that is unknown or has already ended.

        Raises EngineError while a step is open: its rows are being written into what would be freed.
        """
        self._between_steps()
        request = self._live.get(id)
        return None if request is None else self._end(request, Output(id=id, finish="abort"))

    def fail(self, message: str) -> list[Output]:
        """End every request with an error, after a step that did not come back. The scheduler is then empty and usable."""
        self._planned = None
        return [self._end(request, Output(id=request.source.id, finish="error", error=message)) for request in list(self._live.values())]

    def schedule(self) -> StepPlan | None:
        """Plan the next step, or None if there is nothing to compute. Raises EngineError if the previous plan is still open."""
        self._between_steps()
        self._stalled.clear()
        slices: list[Slice] = []
        budget = self.limits.max_num_batched_tokens
        for request in self.running.values():
            if not request.decoding:
                continue
            missing = blocks_for(request.computed + 1) - request.blocks
            if missing and not self.blocks.claim(request.number, missing):
                self._stalled.add(request.number)
                continue
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
            if (output := self._advance(self.running[piece.request], piece, answer)) is not None:
                outputs.append(output)
        return outputs

    def _between_steps(self) -> None:
        if self._planned is not None:
            raise EngineError(f"step {self._planned.step} has not been answered")

    def _checked(self, number: int, source: GenerateRequest) -> Request:
        """The record of a request that can run. Raises RequestError or ContextLengthError."""
        limits, prompt = self.limits, len(source.prompt)
        if not prompt or source.max_tokens < 1:
            raise RequestError(f"a request needs a prompt and max_tokens of at least 1, got {prompt} and {source.max_tokens}")
        if prompt >= limits.max_model_len:
            raise ContextLengthError(
                f"the prompt has {prompt} tokens, but the maximum context length is {limits.max_model_len} with one token of answer"
            )
        request = Request.admit(number, source, limits.max_model_len)
        needed = blocks_for(request.stored_at_most)
        if needed > limits.num_blocks:
            raise ContextLengthError(
                f"prompt and answer of {request.limit} tokens need {needed} blocks of the {limits.num_blocks} in the cache; "
                "lower max_tokens or raise cache.memory_bytes"
            )
        return request

    def _prefills(self) -> Iterable[Request]:
        """Requests with prompt left, running ones first, then the queue."""
        yield from [request for request in self.running.values() if not request.decoding]
        while self.waiting:
            head = self.waiting[0]
            yield head
            if self.waiting and self.waiting[0] is head:
                return  # it could not start: nobody overtakes the head of the queue

    def _start(self, request: Request) -> bool:
        """Move the head of the queue to the running requests if a slot is free and it may have the blocks of its prompt.

        All of them, though its first slice may need fewer: a prompt that stopped half-way would hold blocks for nothing.
        """
        if len(self.running) >= self.limits.max_num_seqs or not self.slots.num_free:
            return False
        if not self.blocks.enter(request.number, blocks_for(request.stored_at_most), blocks_for(request.prompt_length)):
            return False
        self.waiting.popleft()
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
        if len(answer.tokens) != piece.sample:
            raise EngineError(f"request {id}: {len(answer.tokens)} tokens for a slice that asks for {'one' if piece.sample else 'none'}")
        request.computed += rows
        if piece.kind == "prefill":
            self._prompt_tokens += rows
        if not answer.tokens:
            return None
        (token,) = answer.tokens
        finish = request.append(token)
        self._generated_tokens += 1
        output = Output(id=id, tokens=(token,), finish=finish, stop_token=token if finish == "stop" else None)
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
        self._stalled.discard(request.number)
        self._forget.append(request.number)
        return output

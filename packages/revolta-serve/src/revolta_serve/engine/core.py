"""The engine without its surroundings: requests in, one step at a time, outputs out. No sockets, no processes."""

import logging
import time
from collections.abc import Sequence

from msgspec.structs import replace

from revolta_serve.cache.capacity import Capacity
from revolta_serve.cache.layout import WIDEST
from revolta_serve.config import ServeConfig
from revolta_serve.engine.channel import Channel
from revolta_serve.errors import EngineError, EngineUnavailableError
from revolta_serve.memory import resident_bytes
from revolta_serve.model.model_config import GRID, ModelConfig
from revolta_serve.scheduler.limits import Limits
from revolta_serve.scheduler.scheduler import Scheduler
from revolta_serve.types import CacheReset, EngineStatus, GenerateRequest, Output, StepCost, StepPlan, StepResult

log = logging.getLogger(__name__)

MOST_FAILURES = 3
"""Steps that may fail one after the other before the model counts as broken."""


def limits(config: ServeConfig, model: ModelConfig, planned: Capacity, domain: str = "") -> Limits:
    """What a resolved configuration and its planned pools allow the scheduler. domain: as in Limits."""
    schedule = config.schedule
    return Limits(
        max_num_seqs=schedule.max_num_seqs,
        max_num_batched_tokens=schedule.max_num_batched_tokens,
        prefill_cap=schedule.prefill_cap,
        max_model_len=schedule.max_model_len,
        max_queue=schedule.max_queue,
        num_blocks=planned.num_blocks,
        num_slots=planned.num_slots,
        history=model.ngram - 1,
        mark=model.eos,
        width=WIDEST,
        policy=schedule.policy,
        long_prefill=-(-schedule.long_prefill_tokens // GRID) * GRID,
        bypass_limit=schedule.bypass_limit,
        bypass_seconds=schedule.bypass_seconds,
        stall_steps=schedule.stall_steps,
        prefix=config.cache.prefix,
        generated=config.cache.generated,
        block_times=config.cache.block_times,
        domain=domain,
    )


def check_rows(plan: StepPlan, result: StepResult, most: Limits) -> None:
    """Raise EngineError for a step that was larger than it may be, or whose rows were not all computed."""
    decode = sum(len(piece.tokens) for piece in plan.slices if piece.kind == "decode")
    prefill = sum(len(piece.tokens) for piece in plan.slices if piece.kind == "prefill")
    if len(plan.slices) > most.max_num_seqs or decode + prefill > most.max_num_batched_tokens:
        raise EngineError(
            f"step {plan.step} has {decode + prefill} rows of {len(plan.slices)} requests; at most {most.max_num_batched_tokens} rows of "
            f"{most.max_num_seqs} may share a step"
        )
    if (result.decode_rows, result.prefill_rows) != (decode, prefill):
        raise EngineError(
            f"step {plan.step} has {decode} answer rows and {prefill} prompt rows, but {result.decode_rows} and {result.prefill_rows} "
            "were computed"
        )


class EngineCore:
    """A scheduler and the ranks that execute its plans. Rank 0 comes first and is the one that answers."""

    def __init__(self, scheduler: Scheduler, ranks: Sequence[Channel], *, audit_steps: int = 0) -> None:
        """audit_steps: steps between two audits while there is work; 0: none."""
        self.scheduler, self.ranks, self.audit_steps = scheduler, ranks, audit_steps
        self.accepting = True
        self.broken = ""
        """Why the engine must end; empty while it may go on."""
        self.failures = 0
        """Steps that failed since the last one that did not."""
        self.step_began = 0.0
        """time.monotonic() at the start of the step under way, 0 between steps: read by the thread that looks for stuck steps."""
        self.cost: StepCost | None = None
        """Of the last call of `step`; None if it computed nothing."""
        self.rss_bytes = resident_bytes()
        """Resident memory of this process when it was last measured, which the thread that beats does."""
        self._step_seconds = self._host_seconds = 0.0
        self._busy_since = 0.0
        """time.monotonic() from which on there was work and no step; 0 while there is none."""
        self._since_audit = 0
        """Steps since the last audit."""
        self._changed = False
        """Whether there was anything since then."""

    @property
    def has_work(self) -> bool:
        """Whether a request has not ended."""
        return self.scheduler.has_work

    @property
    def status(self) -> EngineStatus:
        """Counts as of now; for the thread that steps."""
        return replace(
            self.scheduler.status,
            paused=not self.scheduler.admitting,
            rss_bytes=self.rss_bytes,
            step_seconds=self._step_seconds,
            host_seconds=self._host_seconds,
        )

    def submit(self, *requests: GenerateRequest) -> None:
        """Queue requests, all or none. Raises RequestError, or EngineUnavailableError while draining."""
        if not self.accepting:
            raise EngineUnavailableError("the server is shutting down")
        self.scheduler.add(requests, time.monotonic())
        self._changed = True

    def abort(self, id: str) -> Output | None:
        """End a request; None if it has already ended."""
        return self.scheduler.abort(id, time.monotonic())

    def abort_all(self, reason: str) -> list[Output]:
        """End every request; `reason` tells its client why, in the output's `error`."""
        aborted = [output for id in self.scheduler.live for output in [self.abort(id)] if output is not None]
        return [replace(output, error=reason) for output in aborted]

    def hold(self, paused: bool) -> None:
        """Start no more requests, or start them again."""
        self.scheduler.admitting = not paused

    def rest(self) -> None:
        """Time that passes before the next step is nobody's work."""
        self._busy_since = 0.0

    def reset_cache(self, *, preempt: bool) -> CacheReset:
        """Forget what can be reused. preempt: running requests go back to the queue first, so that nothing is in use."""
        self._changed = True
        if preempt:
            self.scheduler.preempt_all()
        return self.scheduler.reset_cache()

    def step(self) -> list[Output]:
        """Run one step.

        If it fails, every request ends with an error: states written by half a step cannot be told from good ones. With one rank the
        engine is then empty and goes on; several ranks may no longer agree on where they are, and a model that fails
        MOST_FAILURES times in a row will not recover: then `broken` says so and the engine must end.
        """
        self.cost = None
        began = self.step_began = time.monotonic()
        try:
            plan = self.scheduler.schedule(began)
            if plan is None:
                self.rest()
                return self.scheduler.collect()
            sent = time.monotonic()
            for rank in reversed(self.ranks):
                rank.send(plan)
            result: StepResult = self.ranks[0].receive(StepResult)
            received = time.monotonic()
            check_rows(plan, result, self.scheduler.limits)
            outputs = self.scheduler.update(result, received)
        except Exception as error:
            return self._fail(error)
        finally:
            self.step_began = 0.0
        self.failures = 0
        self._account(result, self._busy_since or began, sent, received)
        return outputs

    def audit(self, *, idle: bool) -> list[Output]:
        """Check the books of the cache if it is time: every `audit_steps` steps and, if anything happened since, when idle.

        idle: no request is there and none has just come, so that nobody waits for this: it takes milliseconds for a large cache. Books
        that do not balance end every request with an error and must end the engine: nobody can tell whose tokens are in a block.
        """
        due = self.audit_steps and self._since_audit >= self.audit_steps
        if not (due or (self._changed and idle)):
            return []
        self._since_audit, self._changed = 0, self.has_work
        try:
            self.scheduler.audit()
        except Exception as error:
            reason = error.message if isinstance(error, EngineError) else f"{type(error).__name__}: {error}"
            self.broken = f"the books of the cache do not balance: {reason}"
            log.critical("%s; %d requests end with an error, and the engine ends", self.broken, len(self.scheduler.live))
            # The scheduler itself is not asked to end them: it would free what the books say.
            return [Output(id=id, finish="error", error=self.broken) for id in self.scheduler.live]
        return []

    def _fail(self, error: Exception) -> list[Output]:
        self.failures += 1
        log.error("step failed; %d requests end with an error", len(self.scheduler.live), exc_info=error)
        reason = error.message if isinstance(error, EngineError) else f"{type(error).__name__}: {error}"
        if len(self.ranks) > 1 or self.failures >= MOST_FAILURES:
            self.broken = f"{self.failures} steps failed in a row"
        return self.scheduler.fail(f"the engine failed in a step: {reason}", time.monotonic())

    def _account(self, result: StepResult, since: float, sent: float, received: float) -> None:
        rows = {"decode_rows": result.decode_rows, "prefill_rows": result.prefill_rows}
        self.cost = StepCost(**rows, seconds=received - sent, host_seconds=sent - since)
        self._step_seconds += self.cost.seconds
        self._host_seconds += self.cost.host_seconds
        self._busy_since = received if self.has_work else 0.0
        self._since_audit += 1

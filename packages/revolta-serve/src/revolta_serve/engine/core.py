"""The engine without its surroundings: requests in, one step at a time, outputs out. No sockets, no processes, no clock but the step's."""

import logging
import time
from collections.abc import Sequence

from revolta_serve.cache.capacity import Capacity
from revolta_serve.config import ServeConfig
from revolta_serve.engine.channel import Channel
from revolta_serve.errors import EngineError, EngineUnavailableError
from revolta_serve.model.model_config import ModelConfig
from revolta_serve.scheduler.scheduler import Limits, Scheduler
from revolta_serve.types import EngineStatus, GenerateRequest, Output, StepResult

log = logging.getLogger(__name__)

MOST_FAILURES = 3
"""Steps that may fail one after the other before the model counts as broken."""


def limits(config: ServeConfig, model: ModelConfig, planned: Capacity) -> Limits:
    """What a resolved configuration and its planned pools allow the scheduler."""
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
    )


class EngineCore:
    """A scheduler and the ranks that execute its plans. Rank 0 comes first and is the one that answers."""

    def __init__(self, scheduler: Scheduler, ranks: Sequence[Channel]) -> None:
        self.scheduler, self.ranks = scheduler, ranks
        self.accepting = True
        self.failures = 0
        """Steps that failed since the last one that did not."""
        self.step_began = 0.0
        """time.monotonic() at the start of the step under way, 0 between steps: read by the thread that looks for stuck steps."""
        self.last: StepResult | None = None

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""
        return self.scheduler.has_work

    @property
    def status(self) -> EngineStatus:
        """Counts as of now."""
        return self.scheduler.status

    def submit(self, *requests: GenerateRequest) -> None:
        """Queue requests, all or none. Raises RequestError, or EngineUnavailableError while draining."""
        if not self.accepting:
            raise EngineUnavailableError("the server is shutting down")
        self.scheduler.add(requests)

    def abort(self, id: str) -> Output | None:
        """End a request; None if it has already ended."""
        return self.scheduler.abort(id)

    def abort_all(self) -> list[Output]:
        """End every request."""
        return [output for id in self.scheduler.live for output in [self.abort(id)] if output is not None]

    def step(self) -> list[Output]:
        """Run one step.

        If it fails, every request ends with an error: states written by half a step cannot be told from good ones. With one rank the
        engine is then empty and goes on; several ranks may no longer agree on where they are, and a model that fails
        MOST_FAILURES times in a row will not recover: then `broken` is true and the engine must end.
        """
        self.step_began = time.monotonic()
        try:
            plan = self.scheduler.schedule()
            if plan is None:
                return []
            for rank in reversed(self.ranks):
                rank.send(plan)
            result: StepResult = self.ranks[0].receive(StepResult)
            outputs = self.scheduler.update(result)
        except Exception as error:
            self.failures += 1
            log.exception("step failed; %d requests end with an error", len(self.scheduler.live))
            reason = error.message if isinstance(error, EngineError) else f"{type(error).__name__}: {error}"
            return self.scheduler.fail(f"the engine failed in a step: {reason}")
        finally:
            self.step_began = 0.0
        self.failures = 0
        self.last = result
        return outputs

    @property
    def broken(self) -> bool:
        """Whether the engine must end after a failed step."""
        return bool(self.failures) and (len(self.ranks) > 1 or self.failures >= MOST_FAILURES)

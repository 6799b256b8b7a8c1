"""What the api asks of the engine: the whole of it."""

from collections.abc import AsyncIterator, Callable, Sequence
from typing import Literal, Protocol

from revolta_serve.types import CacheReset, EngineStatus, FinishReason, GenerateRequest, Output, PauseMode, StepCost

Phase = Literal["starting", "ready", "draining", "dead"]


class EnginePort(Protocol):
    """The engine as seen from the event loop of the api process."""

    @property
    def phase(self) -> Phase:
        """Only "ready" admits requests."""
        ...

    @property
    def max_model_len(self) -> int:
        """Tokens of prompt and answer together."""
        ...

    async def submit(self, requests: Sequence[GenerateRequest]) -> list[AsyncIterator[Output]]:
        """Admit requests to the engine's queue, all or none; returns their outputs, in order, before anything is computed.

        An iterator ends after an Output with `finish`. The tokens of an Output with `stop_token` end with that token. When the
        engine dies, every open iterator yields Output(finish="error", error=...). Raises RequestError (ContextLengthError and
        QueueFullError among them) and EngineUnavailableError; a refused or cancelled call leaves nothing behind.
        """
        ...

    def abort(self, id: str, ended_as: FinishReason = "abort") -> None:
        """Give a request up, wherever it is; unknown and finished ids are ignored. Its last Output says so.

        ended_as: how its answer ended for the client, for the log: `stop` when a stop string ended it.
        """
        ...

    async def pause(self, mode: PauseMode, *, clear: bool) -> None:
        """Start no more requests and deal with the running ones as `mode` says; returns when that is reached.

        clear: empty the prefix cache then. A later pause may only go from keep to wait and from wait to abort. Raises
        EngineUnavailableError unless ready, ConflictError if a resume comes before.
        """
        ...

    async def resume(self) -> None:
        """End a pause, if there is one. Raises EngineUnavailableError before the engine is ready and after its end."""
        ...

    async def reset_cache(self, *, preempt: bool) -> CacheReset:
        """Forget what can be reused; with `preempt` running requests give up what they hold, to recompute it.

        Raises EngineUnavailableError unless ready.
        """
        ...

    def observe(self, steps: Callable[[StepCost], None]) -> None:
        """Have `steps` called with the cost of every step from now on."""
        ...

    def status(self) -> EngineStatus:
        """The engine's latest counts; does not wait."""
        ...

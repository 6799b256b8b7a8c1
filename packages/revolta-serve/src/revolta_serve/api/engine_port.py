"""What the api asks of the engine: the whole of it."""

from collections.abc import AsyncIterator
from typing import Literal, Protocol

from revolta_serve.types import EngineStatus, GenerateRequest, Output

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

    async def submit(self, request: GenerateRequest) -> AsyncIterator[Output]:
        """Admit one request to the engine's queue; returns once it is there, before anything is computed.

        The iterator ends after an Output with `finish`. The tokens of an Output with `stop_token` end with that token. When the
        engine dies, every open iterator yields Output(finish="error", error=...). Raises RequestError (QueueFullError among them)
        and EngineUnavailableError.
        """
        ...

    def abort(self, id: str) -> None:
        """Give a request up, wherever it is; unknown and finished ids are ignored. Nobody reads its iterator any more."""
        ...

    def status(self) -> EngineStatus:
        """The engine's latest counts; does not wait."""
        ...

"""What the api asks of the engine: the whole of it."""

from collections.abc import AsyncIterator, Sequence
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

    async def submit(self, requests: Sequence[GenerateRequest]) -> list[AsyncIterator[Output]]:
        """Admit requests to the engine's queue, all or none; returns their outputs, in order, before anything is computed.

        An iterator ends after an Output with `finish`. The tokens of an Output with `stop_token` end with that token. When the
        engine dies, every open iterator yields Output(finish="error", error=...). Raises RequestError (ContextLengthError and
        QueueFullError among them) and EngineUnavailableError; a refused or cancelled call leaves nothing behind.
        """
        ...

    def abort(self, id: str) -> None:
        """Give a request up, wherever it is; unknown and finished ids are ignored. Nobody reads its iterator any more."""
        ...

    def status(self) -> EngineStatus:
        """The engine's latest counts; does not wait."""
        ...

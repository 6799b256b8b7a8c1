"""What chat and completions share in writing answers: ids, usage, and the Renderer both implement."""

import re
import secrets
import time
from collections.abc import Iterable, Sequence
from typing import Protocol

from msgspec import Struct
from starlette.requests import Request

from revolta_serve.api.fields import Fields
from revolta_serve.api.generation import Prompt
from revolta_serve.api.options import Options
from revolta_serve.api.shapes import CompletionDetails, PromptDetails, Usage
from revolta_serve.errors import RequestError
from revolta_serve.text.events import Answer, AnswerUsage, Event, Finish

_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")


class Renderer(Protocol):
    """Writes the events of one request in one dialect."""

    def chunks(self, choice: int, event: Event) -> Iterable[Struct]:
        """Stream objects for one event."""
        ...

    def closing(self) -> Iterable[Struct]:
        """Stream objects after the last event."""
        ...

    def whole(self, answers: Sequence[Answer]) -> Struct:
        """The body of an answer that is not streamed."""
        ...


class UsageCount:
    """Token counts of a request while its choices run. A prompt counts once, whatever n is."""

    def __init__(self, prompts: Sequence[Prompt], options: Options) -> None:
        self._prompt = sum(len(prompt.ids) for prompt in prompts)
        self._n = options.n
        self._generated: dict[int, int] = {}
        self._cached: dict[int, int] = {}
        self._reasoning: dict[int, int] = {}

    def see(self, choice: int, event: Event) -> None:
        """Take an event's counts."""
        if isinstance(event, Finish):
            self.finish(choice, event.usage)
        else:
            self._generated[choice] = event.generated

    def finish(self, choice: int, usage: AnswerUsage) -> None:
        """Take a choice's final counts. Reuse is counted on the first choice of a prompt: the others may reuse what that one computed."""
        self._generated[choice] = usage.generated
        self._reasoning[choice] = usage.reasoning
        if choice % self._n == 0:
            self._cached[choice] = usage.cached

    def usage(self) -> Usage:
        """The counts so far."""
        generated = sum(self._generated.values())
        return Usage(
            prompt_tokens=self._prompt,
            completion_tokens=generated,
            total_tokens=self._prompt + generated,
            prompt_tokens_details=PromptDetails(sum(self._cached.values())),
            completion_tokens_details=CompletionDetails(sum(self._reasoning.values())),
        )


def request_id(request: Request, fields: Fields) -> str:
    """The id of a request: header X-Request-Id, body request_id, else a random one. An unusual header is passed over."""
    header = request.headers.get("x-request-id", "")
    if _ID.fullmatch(header):
        return header
    given = fields.string("request_id", None)
    if given is None:
        return secrets.token_hex(16)
    if not _ID.fullmatch(given):
        raise RequestError("request_id: expected 1 to 128 letters, digits and . _ : -", param="request_id")
    return given


def now() -> int:
    """Seconds since 1970, as `created` wants them."""
    return int(time.time())

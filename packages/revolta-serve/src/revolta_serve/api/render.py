"""What chat and completions share in writing answers: ids, usage, and the renderer both are kinds of."""

import re
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

from msgspec import UNSET, Raw, Struct, UnsetType
from starlette.requests import Request

from revolta_serve.api.context import Api
from revolta_serve.api.fields import Fields
from revolta_serve.api.logprobs import LogprobWriter
from revolta_serve.api.options import Options
from revolta_serve.api.prompt import Prompt
from revolta_serve.api.shapes import CompletionDetails, PromptDetails, Usage
from revolta_serve.errors import RequestError
from revolta_serve.text.events import Answer, AnswerUsage, Event, Finish

_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")


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


class Renderer(ABC):
    """Writes the events of one request in one dialect."""

    streamed: ClassVar[type[Struct]]
    """What a stream consists of: a struct with the fields of `head`, choices and usage."""

    def __init__(self, api: Api, id: str, prompts: Sequence[Prompt], options: Options) -> None:
        self.head: dict[str, Any] = {"id": id, "created": int(time.time()), "model": api.name, "system_fingerprint": api.fingerprint}
        self.options = options
        self.logprobs = LogprobWriter(api.tokenizer, ids_as_text=options.ids_as_text)
        self.prompts = prompts
        self.usage = UsageCount(prompts, options)

    @property
    def laborious(self) -> bool:
        """Writing a whole answer takes a while: there are logprobs in it."""
        return self.options.sampling.logprobs >= 0 or self.options.sampling.prompt_logprobs >= 0

    @abstractmethod
    def chunks(self, choice: int, event: Event) -> Iterable[Struct]:
        """Stream objects for one event."""

    @abstractmethod
    def whole(self, answers: Sequence[Answer]) -> Struct:
        """The body of an answer that is not streamed."""

    def closing(self) -> Iterable[Struct]:
        """Stream objects after the last event: the usage, if it was asked for."""
        if self.options.include_usage:
            yield self.streamed(**self.head, choices=[], usage=self.usage.usage())

    def chunk(self, part: Struct, **more: Any) -> Struct:
        """A stream object with one choice, and the usage so far or null where the request asks for usage."""
        usage: Usage | UnsetType | None = UNSET
        if self.options.include_usage:
            usage = self.usage.usage() if self.options.continuous_usage else None
        return self.streamed(**self.head, choices=[part], usage=usage, **more)

    def token_ids(self, event: Event | Answer) -> tuple[int, ...] | UnsetType:
        """The ids of an event or answer, where the request asks for them."""
        return event.tokens if self.options.return_token_ids else UNSET

    def prompt_ids(self, number: int) -> tuple[int, ...] | UnsetType:
        """The ids of a prompt, where the request asks for them."""
        return self.prompts[number].ids if self.options.return_token_ids else UNSET

    def prompt_text(self, number: int) -> str | UnsetType:
        """The text of a prompt as the model sees it, where the request asks for it."""
        return self.prompts[number].text if self.options.return_prompt_text else UNSET

    def prompt_logprobs(self, answers: Sequence[Answer], number: int) -> list[Raw | None] | UnsetType:
        """The logprobs of a prompt, where the request asks for them: those of its first choice."""
        count = self.options.prompt_logprobs
        return UNSET if count < 0 else self.logprobs.prompt(answers[number * self.options.n].prompt_logprobs, count)


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

"""POST /v1/completions: raw prompts, no chat template, no reasoning split.

A prompt given as text is trusted: the spelling of an added token (<|im_start|>, ...) is that token, as in the chat template.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from msgspec import UNSET, UnsetType
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.types import ASGIApp

from revolta_serve.api.body import read_fields
from revolta_serve.api.context import Api, api_of
from revolta_serve.api.errors import UnsupportedParameterError
from revolta_serve.api.fields import Fields, shown
from revolta_serve.api.generation import Generation, Prompt
from revolta_serve.api.options import Options, answer_budget, check_token_ids, read_options, refuse_unsupported
from revolta_serve.api.render import UsageCount, now, request_id
from revolta_serve.api.shapes import TextChoice, TextCompletion
from revolta_serve.api.sse import respond
from revolta_serve.errors import RequestError
from revolta_serve.text.events import Answer, Event, Finish

DEFAULT_TOKENS = 16
MAX_SEQUENCES = 1024
"""Prompts times n of one request."""

NEUTRAL: Mapping[str, tuple[Any, ...]] = {"logprobs": (), "echo": (False,), "suffix": ("",)}
"""Unsupported fields of this route and the values that ask for nothing."""


@dataclass(frozen=True)
class CompletionPlan:
    """A checked request."""

    options: Options
    prompts: list[Prompt]


async def completions(request: Request) -> ASGIApp:
    """Everything about the request is checked before the first byte of the answer."""
    api = api_of(request)
    api.check_ready()
    fields = await read_fields(request, api.config.api.max_request_bytes)
    id = f"cmpl-{request_id(request, fields)}"
    plan = await run_in_threadpool(read_completion, api, fields)
    generation = Generation(api, id, plan.prompts, plan.options, None)
    renderer = CompletionRenderer(api, id, plan)
    await generation.start()
    return respond(generation, renderer, api.config.api.sse_keep_alive)


def read_completion(api: Api, fields: Fields) -> CompletionPlan:
    """Check and encode a request; for a thread, it may take a while."""
    api.check_model(fields)
    refuse_unsupported(fields, NEUTRAL)
    options = read_options(fields, api.defaults, api.tokenizer.size, ("max_tokens",))
    best_of = fields.integer("best_of", options.n, 1)
    if best_of != options.n:
        raise UnsupportedParameterError(f"best_of: {best_of} is not supported; leave it out or set it to n ({options.n})", param="best_of")
    sources = _prompts(fields, api.tokenizer.size)
    if len(sources) * options.n > MAX_SEQUENCES:
        raise RequestError(
            f"prompt: {len(sources)} prompts with n {options.n} are more than {MAX_SEQUENCES} sequences; send several requests",
            param="prompt",
        )
    add_special = fields.boolean("add_special_tokens", True)
    prompts = []
    for path, source in sources:
        ids = api.tokenizer.encode(source, add_special_tokens=add_special) if isinstance(source, str) else source
        if not ids:
            raise RequestError(f"{path}: the prompt is empty; send at least one token", param=path)
        prompts.append(Prompt(tuple(ids), answer_budget(len(ids), api.engine.max_model_len, options, DEFAULT_TOKENS, path)))
    return CompletionPlan(options, prompts)


def _prompts(fields: Fields, vocabulary: int) -> list[tuple[str, str | list[int]]]:
    """(path, text or ids) of every prompt: a string, a list of strings, a list of ids, or a list of lists of ids."""
    value = fields.raw.get("prompt")
    expected = "a string, a list of strings, a list of token ids or a list of lists of token ids"
    if isinstance(value, str):
        return [("prompt", value)]
    if not isinstance(value, list) or not value:
        raise fields.fail("prompt", expected)
    if all(isinstance(item, str) for item in value):
        return [(f"prompt[{number}]", item) for number, item in enumerate(value)]
    if all(isinstance(item, list) for item in value):
        for number, item in enumerate(value):
            check_token_ids(item, f"prompt[{number}]", vocabulary)
        return [(f"prompt[{number}]", item) for number, item in enumerate(value)]
    if isinstance(value[0], str | list):
        kind = type(value[0])
        number = next(number for number, item in enumerate(value) if not isinstance(item, kind))
        path = f"prompt[{number}]"
        raise RequestError(f"prompt: expected {expected}, got {shown(value[number])} at {path}", param=path)
    check_token_ids(value, "prompt", vocabulary)
    return [("prompt", value)]


class CompletionRenderer:
    """Events of a completion request as text_completion objects."""

    def __init__(self, api: Api, id: str, plan: CompletionPlan) -> None:
        self._head: dict[str, Any] = {"id": id, "created": now(), "model": api.name, "system_fingerprint": api.fingerprint}
        self._plan = plan
        self._options = plan.options
        self._usage = UsageCount(plan.prompts, plan.options)
        self._begun: set[int] = set()

    def chunks(self, choice: int, event: Event) -> Iterator[TextCompletion]:
        """One object per event."""
        self._usage.see(choice, event)
        first = choice not in self._begun
        self._begun.add(choice)
        tokens = event.tokens if self._options.return_token_ids else UNSET
        prompt = self._prompt_ids(choice) if first else UNSET
        if isinstance(event, Finish):
            part = TextChoice(
                index=choice, text="", finish_reason=event.reason, stop_reason=event.stop, token_ids=tokens, prompt_token_ids=prompt
            )
        else:
            part = TextChoice(index=choice, text=event.text, token_ids=tokens, prompt_token_ids=prompt)
        usage = self._usage.usage() if self._options.continuous_usage else (None if self._options.include_usage else UNSET)
        yield TextCompletion(**self._head, choices=[part], usage=usage)

    def closing(self) -> Iterable[TextCompletion]:
        """The usage object, if it was asked for."""
        if self._options.include_usage:
            yield TextCompletion(**self._head, choices=[], usage=self._usage.usage())

    def whole(self, answers: Sequence[Answer]) -> TextCompletion:
        """All choices of all prompts in one object."""
        for choice, answer in enumerate(answers):
            self._usage.finish(choice, answer.usage)
        choices = [
            TextChoice(
                index=choice,
                text=answer.content or "",
                finish_reason=answer.reason,
                stop_reason=answer.stop,
                token_ids=answer.tokens if self._options.return_token_ids else UNSET,
                prompt_token_ids=self._prompt_ids(choice),
            )
            for choice, answer in enumerate(answers)
        ]
        return TextCompletion(**self._head, choices=choices, usage=self._usage.usage())

    def _prompt_ids(self, choice: int) -> tuple[int, ...] | UnsetType:
        return self._plan.prompts[choice // self._options.n].ids if self._options.return_token_ids else UNSET

"""POST /v1/completions: raw prompts, no chat template, no reasoning split.

A prompt given as text is trusted: the spelling of an added token (<|im_start|>, ...) is that token, as in the chat template.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from msgspec import UNSET, Struct, UnsetType
from starlette.requests import Request
from starlette.types import ASGIApp

from revolta_serve.api.answer import respond
from revolta_serve.api.context import Api
from revolta_serve.api.errors import UnsupportedParameterError
from revolta_serve.api.fields import Fields, shown
from revolta_serve.api.generation import Prompt
from revolta_serve.api.options import Options, answer_budget, check_token_ids, read_options, refuse_unsupported
from revolta_serve.api.render import Renderer
from revolta_serve.api.shapes import TextChoice, TextCompletion
from revolta_serve.errors import RequestError
from revolta_serve.text.events import Answer, Event, Finish

DEFAULT_TOKENS = 16

NEUTRAL: Mapping[str, tuple[Any, ...]] = {"logprobs": (), "echo": (False,), "suffix": ("",)}
"""Unsupported fields of this route and the values that ask for nothing."""


@dataclass(frozen=True)
class CompletionPlan:
    """A checked request."""

    options: Options
    prompts: list[Prompt]


async def completions(request: Request) -> ASGIApp:
    """Answers are text, whatever it spells."""
    return await respond(request, "cmpl", read_completion, CompletionRenderer, None)


def read_completion(api: Api, fields: Fields) -> CompletionPlan:
    """Check and encode a request; for a thread, it may take a while."""
    api.check_model(fields)
    refuse_unsupported(fields, NEUTRAL)
    options = read_options(fields, api.defaults, api.tokenizer.size, ("max_tokens",))
    best_of = fields.integer("best_of", options.n, 1)
    if best_of != options.n:
        raise UnsupportedParameterError(f"best_of: {best_of} is not supported; leave it out or set it to n ({options.n})", param="best_of")
    add_special = fields.boolean("add_special_tokens", True)
    prompts = []
    for path, source in _sources(api, fields, options.n):
        ids = _ids(api, source, path, options, add_special=add_special)
        if not ids:
            raise RequestError(f"{path}: the prompt is empty; send at least one token", param=path)
        prompts.append(Prompt(tuple(ids), answer_budget(len(ids), api.engine.max_model_len, options, DEFAULT_TOKENS, path)))
    return CompletionPlan(options, prompts)


def _sources(api: Api, fields: Fields, n: int) -> list[tuple[str, str | list[Any]]]:
    """(path, text or ids) of every prompt: a string, a list of strings, a list of ids, or a list of lists of ids.

    Their number is checked before anything is done for each of them; their ids are not checked here.
    """
    value = fields.raw.get("prompt")
    expected = "a string, a list of strings, a list of token ids or a list of lists of token ids"
    if not isinstance(value, str | list) or value == []:
        raise fields.fail("prompt", expected)
    if isinstance(value, str) or not isinstance(value[0], str | list):
        api.check_sequences(1, n, "n")
        return [("prompt", value)]
    api.check_sequences(len(value), n, "prompt")
    for number, item in enumerate(value):
        if type(item) is not type(value[0]):
            path = f"prompt[{number}]"
            raise RequestError(f"prompt: expected {expected}, got {shown(item)} at {path}", param=path)
    return [(f"prompt[{number}]", item) for number, item in enumerate(value)]


def _ids(api: Api, source: str | list[Any], path: str, options: Options, *, add_special: bool) -> list[int]:
    """Ids of one prompt. What cannot fit is refused by its length, before it is looked at."""
    if isinstance(source, str):
        api.check_characters(len(source), path)
        return api.tokenizer.encode(source, add_special_tokens=add_special)
    answer_budget(len(source), api.engine.max_model_len, options, DEFAULT_TOKENS, path)
    check_token_ids(source, path, api.tokenizer.size)
    return source


class CompletionRenderer(Renderer):
    """Events of a completion request as text_completion objects."""

    streamed = TextCompletion

    def __init__(self, api: Api, id: str, plan: CompletionPlan) -> None:
        super().__init__(api, id, plan.prompts, plan.options)
        self._prompts = plan.prompts
        self._begun: set[int] = set()

    def chunks(self, choice: int, event: Event) -> Iterator[Struct]:
        """One object per event."""
        self.usage.see(choice, event)
        first = choice not in self._begun
        self._begun.add(choice)
        finish = event if isinstance(event, Finish) else None
        part = TextChoice(
            index=choice,
            text="" if isinstance(event, Finish) else event.text,
            finish_reason=finish.reason if finish else None,
            stop_reason=finish.stop if finish else UNSET,
            token_ids=self.token_ids(event),
            prompt_token_ids=self._prompt_ids(choice) if first else UNSET,
        )
        yield self.chunk(part)

    def whole(self, answers: Sequence[Answer]) -> TextCompletion:
        """All choices of all prompts in one object."""
        for choice, answer in enumerate(answers):
            self.usage.finish(choice, answer.usage)
        choices = [
            TextChoice(
                index=choice,
                text=answer.content or "",
                finish_reason=answer.reason,
                stop_reason=answer.stop,
                token_ids=self.token_ids(answer),
                prompt_token_ids=self._prompt_ids(choice),
            )
            for choice, answer in enumerate(answers)
        ]
        return TextCompletion(**self.head, choices=choices, usage=self.usage.usage())

    def _prompt_ids(self, choice: int) -> tuple[int, ...] | UnsetType:
        return self._prompts[choice // self.options.n].ids if self.options.return_token_ids else UNSET

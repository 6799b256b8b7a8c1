"""POST /v1/completions: raw prompts, no chat template, no reasoning split.

A prompt given as text is trusted: the spelling of an added token (<|im_start|>, ...) is that token, as in the chat template. With
`echo` the answer begins with the prompt as the model was given it: decoded from its ids, special tokens included.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from msgspec import UNSET, Struct
from starlette.requests import Request
from starlette.types import ASGIApp

from revolta_serve.api.answer import respond
from revolta_serve.api.context import Api
from revolta_serve.api.errors import UnsupportedParameterError
from revolta_serve.api.fields import Fields, shown
from revolta_serve.api.lengths import answer_budget
from revolta_serve.api.logprobs import read_text_logprobs
from revolta_serve.api.options import Options, read_options, refuse_unsupported
from revolta_serve.api.prompt import Prompt, check_prompt_logprobs, ready
from revolta_serve.api.render import Renderer
from revolta_serve.api.sampling import check_token_ids
from revolta_serve.api.shapes import TextChoice, TextCompletion, TextLogprobs
from revolta_serve.errors import RequestError
from revolta_serve.text.alignment import Placed
from revolta_serve.text.events import Answer, Event, Finish
from revolta_serve.types import TokenLogprobs

DEFAULT_TOKENS = 16

NEUTRAL: Mapping[str, tuple[Any, ...]] = {"suffix": ("",)}
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
    echo = fields.boolean("echo", False)
    options = read_options(api, fields, ("max_tokens", "max_completion_tokens"), read_text_logprobs(api, fields), echo=echo)
    best_of = fields.integer("best_of", options.n, 1)
    if best_of != options.n:
        raise UnsupportedParameterError(f"best_of: {best_of} is not supported; leave it out or set it to n ({options.n})", param="best_of")
    add_special = fields.boolean("add_special_tokens", True)
    prompts = []
    for path, source in _sources(api, fields, options.runs):
        ids = _ids(api, source, path, options, add_special=add_special)
        if not ids:
            raise RequestError(f"{path}: the prompt is empty; send at least one token", param=path)
        prompts.append(ready(api, options, ids, DEFAULT_TOKENS, path))
    check_prompt_logprobs(options, prompts)
    return CompletionPlan(options, prompts)


def _sources(api: Api, fields: Fields, runs: int) -> list[tuple[str, str | list[Any]]]:
    """(path, text or ids) of every prompt: a string, a list of strings, a list of ids, or a list of lists of ids.

    Their number is checked before anything is done for each of them; their ids are not checked here.
    """
    value = fields.raw.get("prompt")
    expected = "a string, a list of strings, a list of token ids or a list of lists of token ids"
    if not isinstance(value, str | list) or value == []:
        raise fields.fail("prompt", expected)
    if isinstance(value, str) or not isinstance(value[0], str | list):
        api.check_sequences(1, runs, "n")
        return [("prompt", value)]
    api.check_sequences(len(value), runs, "prompt")
    for number, item in enumerate(value):
        if type(item) is not type(value[0]):
            path = f"prompt[{number}]"
            raise RequestError(f"prompt: expected {expected}, got {shown(item)} at {path}", param=path)
    return [(f"prompt[{number}]", item) for number, item in enumerate(value)]


def _ids(api: Api, source: str | list[Any], path: str, options: Options, *, add_special: bool) -> list[int]:
    """Ids of one prompt. What cannot fit is refused by its length, before it is looked at."""
    whole = options.lengths.truncate is None
    if isinstance(source, str):
        if whole:
            api.check_characters(len(source), path)
        return api.tokenizer.encode(source, add_special_tokens=add_special)
    if whole:
        answer_budget(len(source), api.engine.max_model_len, options.lengths, DEFAULT_TOKENS, path)
    check_token_ids(source, path, api.tokenizer.size)
    return source


class CompletionRenderer(Renderer):
    """Events of a completion request as text_completion objects."""

    streamed = TextCompletion

    def __init__(self, api: Api, id: str, plan: CompletionPlan) -> None:
        super().__init__(api, id, plan.prompts, plan.options)
        self._begun: set[int] = set()

    def chunks(self, choice: int, event: Event) -> Iterator[Struct]:
        """One object per event."""
        self.usage.see(choice, event)
        first = choice not in self._begun
        self._begun.add(choice)
        finish = event if isinstance(event, Finish) else None
        text = "" if isinstance(event, Finish) else event.text
        number = choice // self.options.n
        part = TextChoice(
            index=choice,
            text=self._echoed(number) + text if first else text,
            logprobs=self._logprobs(number, event.logprobs, event.prompt_logprobs if first else None),
            finish_reason=finish.reason if finish else None,
            stop_reason=finish.stop if finish else UNSET,
            token_ids=self.token_ids(event),
            prompt_token_ids=self.prompt_ids(number) if first else UNSET,
            prompt_text=self.prompt_text(number) if first else UNSET,
        )
        yield self.chunk(part)

    def whole(self, answers: Sequence[Answer]) -> TextCompletion:
        """All choices of all prompts in one object."""
        for choice, answer in enumerate(answers):
            self.usage.finish(choice, answer.usage)
        known = [self.prompt_logprobs(answers, number) for number in range(len(answers) // self.options.n)]
        choices = []
        for choice, answer in enumerate(answers):
            number = choice // self.options.n
            text = answer.content or ""
            part = TextChoice(
                index=choice,
                text=self._echoed(number) + text,
                logprobs=self._logprobs(number, answer.logprobs, answers[number * self.options.n].prompt_logprobs),
                finish_reason=answer.reason,
                stop_reason=answer.stop,
                token_ids=self.token_ids(answer),
                prompt_logprobs=known[number],
                prompt_token_ids=self.prompt_ids(number),
                prompt_text=self.prompt_text(number),
            )
            choices.append(part)
        return TextCompletion(**self.head, choices=choices, usage=self.usage.usage())

    def _echoed(self, number: int) -> str:
        return self.prompts[number].text if self.options.echo else ""

    def _logprobs(self, number: int, tokens: Sequence[Placed], prompt: Sequence[TokenLogprobs] | None) -> TextLogprobs | None:
        """Of generated tokens, behind those of an echoed prompt, unless these have been told of (prompt is None)."""
        count = self.options.sampling.logprobs
        if count < 0:
            return None
        written = TextLogprobs()
        if self.options.echo and prompt is not None:
            self.logprobs.echo(written, self.prompts[number].ids, prompt, count)
        self.logprobs.text(written, tokens, len(self._echoed(number)))
        return written

"""POST /v1/chat/completions."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from msgspec import UNSET
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.types import ASGIApp

from revolta_serve.api.body import read_fields
from revolta_serve.api.chat_prompt import ChatPrompt, read_chat_prompt
from revolta_serve.api.context import Api, api_of
from revolta_serve.api.fields import Fields
from revolta_serve.api.generation import Generation, Prompt
from revolta_serve.api.options import Options, answer_budget, read_options, refuse_unsupported
from revolta_serve.api.render import UsageCount, now, request_id
from revolta_serve.api.shapes import ChatChoice, ChatChunk, ChatChunkChoice, ChatCompletion, ChatDelta, ChatMessage
from revolta_serve.api.sse import respond
from revolta_serve.text.events import Answer, Delta, Event, Finish

NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "logprobs": (False,),
    "top_logprobs": (0,),
    "functions": ([],),
    "function_call": ("none",),
    "audio": (),
    "modalities": (["text"],),
    "prediction": (),
    "web_search_options": (),
    "documents": ([],),
    "echo": (False,),
    "add_special_tokens": (False,),
    "chat_template": (),
    "verbosity": ("medium",),
}
"""Unsupported fields of this route and the values that ask for nothing."""


@dataclass(frozen=True)
class ChatPlan:
    """A checked request."""

    options: Options
    prompt: Prompt
    include_reasoning: bool


async def chat_completions(request: Request) -> ASGIApp:
    """Everything about the request is checked before the first byte of the answer."""
    api = api_of(request)
    api.check_ready()
    fields = await read_fields(request, api.config.api.max_request_bytes)
    id = f"chatcmpl-{request_id(request, fields)}"
    plan = await run_in_threadpool(read_chat, api, fields)
    generation = Generation(api, id, [plan.prompt], plan.options, api.think)
    renderer = ChatRenderer(api, id, plan)
    await generation.start()
    return respond(generation, renderer, api.config.api.sse_keep_alive)


def read_chat(api: Api, fields: Fields) -> ChatPlan:
    """Check, render and encode a request; for a thread, it may take a while."""
    api.check_model(fields)
    refuse_unsupported(fields, NEUTRAL)
    options = read_options(fields, api.defaults, api.tokenizer.size, ("max_completion_tokens", "max_tokens"))
    include_reasoning = fields.boolean("include_reasoning", True)
    prompt: ChatPrompt = read_chat_prompt(fields)
    ids = tuple(prompt.encode(api.template, api.tokenizer))
    budget = answer_budget(len(ids), api.engine.max_model_len, options, api.defaults.max_tokens, "messages")
    return ChatPlan(options, Prompt(ids, budget), include_reasoning)


class ChatRenderer:
    """Events of a chat request as chat.completion(.chunk) objects."""

    def __init__(self, api: Api, id: str, plan: ChatPlan) -> None:
        self._head: dict[str, Any] = {"id": id, "created": now(), "model": api.name, "system_fingerprint": api.fingerprint}
        self._plan = plan
        self._options = plan.options
        self._usage = UsageCount([plan.prompt], plan.options)
        self._begun: set[int] = set()
        self._prompt_ids = plan.prompt.ids if plan.options.return_token_ids else UNSET

    def chunks(self, choice: int, event: Event) -> Iterator[ChatChunk]:
        """One chunk per event, after one that opens the choice."""
        if choice not in self._begun:
            self._begun.add(choice)
            yield self._chunk(ChatChunkChoice(index=choice, delta=ChatDelta(role="assistant", content="")), first=True)
        self._usage.see(choice, event)
        tokens = event.tokens if self._options.return_token_ids else UNSET
        if isinstance(event, Finish):
            part = ChatChunkChoice(index=choice, delta=ChatDelta(), finish_reason=event.reason, stop_reason=event.stop, token_ids=tokens)
            yield self._chunk(part)
        else:
            delta = self._delta(event)
            if delta is not None or tokens is not UNSET:
                yield self._chunk(ChatChunkChoice(index=choice, delta=delta or ChatDelta(), token_ids=tokens))

    def closing(self) -> Iterable[ChatChunk]:
        """The usage chunk, if it was asked for."""
        if self._options.include_usage:
            yield ChatChunk(**self._head, choices=[], usage=self._usage.usage())

    def whole(self, answers: Sequence[Answer]) -> ChatCompletion:
        """All choices in one object."""
        for choice, answer in enumerate(answers):
            self._usage.finish(choice, answer.usage)
        choices = [self._choice(choice, answer) for choice, answer in enumerate(answers)]
        return ChatCompletion(**self._head, choices=choices, usage=self._usage.usage(), prompt_token_ids=self._prompt_ids)

    def _choice(self, index: int, answer: Answer) -> ChatChoice:
        reasoning = answer.reasoning if self._plan.include_reasoning else None
        return ChatChoice(
            index=index,
            message=ChatMessage(content=answer.content, reasoning=reasoning, reasoning_content=reasoning),
            finish_reason=answer.reason,
            stop_reason=answer.stop,
            token_ids=answer.tokens if self._options.return_token_ids else UNSET,
        )

    def _delta(self, event: Delta) -> ChatDelta | None:
        if event.kind == "content":
            return ChatDelta(content=event.text)
        return ChatDelta(reasoning=event.text, reasoning_content=event.text) if self._plan.include_reasoning else None

    def _chunk(self, part: ChatChunkChoice, *, first: bool = False) -> ChatChunk:
        usage = self._usage.usage() if self._options.continuous_usage else (None if self._options.include_usage else UNSET)
        return ChatChunk(**self._head, choices=[part], usage=usage, prompt_token_ids=self._prompt_ids if first else UNSET)

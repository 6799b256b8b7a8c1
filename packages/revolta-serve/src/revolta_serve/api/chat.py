"""POST /v1/chat/completions."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from msgspec import UNSET, Struct
from starlette.requests import Request
from starlette.types import ASGIApp

from revolta_serve.api.answer import respond
from revolta_serve.api.chat_prompt import read_chat_prompt
from revolta_serve.api.context import Api, api_of
from revolta_serve.api.errors import UnsupportedParameterError
from revolta_serve.api.fields import Fields
from revolta_serve.api.generation import Prompt
from revolta_serve.api.options import Options, answer_budget, read_options, refuse_unsupported
from revolta_serve.api.render import Renderer
from revolta_serve.api.shapes import ChatChoice, ChatChunk, ChatChunkChoice, ChatCompletion, ChatDelta, ChatMessage
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
    "best_of": (1,),
}
"""Unsupported fields of this route and the values that ask for nothing."""

MISPLACED = ("enable_thinking", "thinking")
"""Spellings of other servers and dialects: dropping them would give an answer without the thinking that was asked for."""


@dataclass(frozen=True)
class ChatPlan:
    """A checked request."""

    options: Options
    prompts: tuple[Prompt]
    include_reasoning: bool


async def chat_completions(request: Request) -> ASGIApp:
    """Answers have reasoning and content."""
    return await respond(request, "chatcmpl", read_chat, ChatRenderer, api_of(request).think)


def read_chat(api: Api, fields: Fields) -> ChatPlan:
    """Check, render and encode a request; for a thread, it may take a while."""
    api.check_model(fields)
    refuse_unsupported(fields, NEUTRAL)
    for name in MISPLACED:
        if fields.has(name):
            way_out = 'say reasoning_effort, or chat_template_kwargs: {"enable_thinking": true}'
            raise UnsupportedParameterError(f"{fields.at(name)}: not a field of this route; {way_out}", param=fields.at(name))
    options = read_options(fields, api.defaults, api.tokenizer.size, ("max_completion_tokens", "max_tokens"))
    api.check_sequences(1, options.n, "n")
    include_reasoning = fields.boolean("include_reasoning", True)
    pieces = read_chat_prompt(fields).render(api.template)
    api.check_characters(sum(len(piece) for piece in pieces if isinstance(piece, str)), "messages")
    ids = tuple(api.tokenizer.encode_pieces(pieces))
    budget = answer_budget(len(ids), api.engine.max_model_len, options, api.defaults.max_tokens, "messages")
    return ChatPlan(options, (Prompt(ids, budget),), include_reasoning)


class ChatRenderer(Renderer):
    """Events of a chat request as chat.completion(.chunk) objects."""

    streamed = ChatChunk

    def __init__(self, api: Api, id: str, plan: ChatPlan) -> None:
        super().__init__(api, id, plan.prompts, plan.options)
        self._include_reasoning = plan.include_reasoning
        self._begun: set[int] = set()
        self._prompt_ids = plan.prompts[0].ids if plan.options.return_token_ids else UNSET

    def chunks(self, choice: int, event: Event) -> Iterator[Struct]:
        """One chunk per event, after one that opens the choice."""
        if choice not in self._begun:
            self._begun.add(choice)
            opening = ChatChunkChoice(index=choice, delta=ChatDelta(role="assistant", content=""))
            yield self.chunk(opening, prompt_token_ids=self._prompt_ids)
        self.usage.see(choice, event)
        tokens = self.token_ids(event)
        if isinstance(event, Finish):
            part = ChatChunkChoice(index=choice, delta=ChatDelta(), finish_reason=event.reason, stop_reason=event.stop, token_ids=tokens)
            yield self.chunk(part)
        else:
            delta = self._delta(event)
            if delta is not None or tokens is not UNSET:
                yield self.chunk(ChatChunkChoice(index=choice, delta=delta or ChatDelta(), token_ids=tokens))

    def whole(self, answers: Sequence[Answer]) -> ChatCompletion:
        """All choices in one object."""
        for choice, answer in enumerate(answers):
            self.usage.finish(choice, answer.usage)
        choices = [self._choice(choice, answer) for choice, answer in enumerate(answers)]
        return ChatCompletion(**self.head, choices=choices, usage=self.usage.usage(), prompt_token_ids=self._prompt_ids)

    def _choice(self, index: int, answer: Answer) -> ChatChoice:
        reasoning = answer.reasoning if self._include_reasoning else None
        return ChatChoice(
            index=index,
            message=ChatMessage(content=answer.content, reasoning=reasoning, reasoning_content=reasoning),
            finish_reason=answer.reason,
            stop_reason=answer.stop,
            token_ids=self.token_ids(answer),
        )

    def _delta(self, event: Delta) -> ChatDelta | None:
        if event.kind == "content":
            return ChatDelta(content=event.text)
        return ChatDelta(reasoning=event.text, reasoning_content=event.text) if self._include_reasoning else None

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
from revolta_serve.api.logprobs import read_chat_logprobs
from revolta_serve.api.options import Options, read_options, refuse_unsupported
from revolta_serve.api.prompt import Prompt, check_prompt_logprobs, ready
from revolta_serve.api.render import Renderer
from revolta_serve.api.shapes import ChatChoice, ChatChunk, ChatChunkChoice, ChatCompletion, ChatDelta, ChatLogprobs, ChatMessage
from revolta_serve.text.alignment import Placed
from revolta_serve.text.events import Answer, Delta, Event, Finish

NEUTRAL: Mapping[str, tuple[Any, ...]] = {
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
    options = read_options(api, fields, ("max_completion_tokens", "max_tokens"), read_chat_logprobs(api, fields))
    api.check_sequences(1, options.runs, "n")
    include_reasoning = fields.boolean("include_reasoning", True)
    chat = read_chat_prompt(fields)
    pieces = chat.render(api.template)
    if options.lengths.truncate is None:
        api.check_characters(sum(len(piece) for piece in pieces if isinstance(piece, str)), "messages")
    ids = api.tokenizer.encode_pieces(pieces)
    prompt = ready(api, options, ids, api.defaults.max_tokens, "messages", chat.marks(ids, api.tokenizer))
    check_prompt_logprobs(options, (prompt,))
    return ChatPlan(options, (prompt,), include_reasoning)


class ChatRenderer(Renderer):
    """Events of a chat request as chat.completion(.chunk) objects."""

    streamed = ChatChunk

    def __init__(self, api: Api, id: str, plan: ChatPlan) -> None:
        super().__init__(api, id, plan.prompts, plan.options)
        self._include_reasoning = plan.include_reasoning
        self._begun: set[int] = set()

    def chunks(self, choice: int, event: Event) -> Iterator[Struct]:
        """One chunk per event, after one that opens the choice."""
        if choice not in self._begun:
            self._begun.add(choice)
            opening = ChatChunkChoice(index=choice, delta=ChatDelta(role="assistant", content=""))
            yield self.chunk(opening, prompt_token_ids=self.prompt_ids(0), prompt_text=self.prompt_text(0))
        self.usage.see(choice, event)
        tokens = self.token_ids(event)
        if isinstance(event, Finish):
            part = ChatChunkChoice(index=choice, delta=ChatDelta(), finish_reason=event.reason, stop_reason=event.stop, token_ids=tokens)
            yield self.chunk(part)
        else:
            delta = self._delta(event)
            if delta is not None or tokens is not UNSET:
                logprobs = self._logprobs(event.logprobs) if event.kind == "content" else None
                yield self.chunk(ChatChunkChoice(index=choice, delta=delta or ChatDelta(), logprobs=logprobs, token_ids=tokens))

    def whole(self, answers: Sequence[Answer]) -> ChatCompletion:
        """All choices in one object."""
        for choice, answer in enumerate(answers):
            self.usage.finish(choice, answer.usage)
        choices = [self._choice(choice, answer) for choice, answer in enumerate(answers)]
        return ChatCompletion(
            **self.head,
            choices=choices,
            usage=self.usage.usage(),
            prompt_logprobs=self.prompt_logprobs(answers, 0),
            prompt_token_ids=self.prompt_ids(0),
            prompt_text=self.prompt_text(0),
        )

    def _choice(self, index: int, answer: Answer) -> ChatChoice:
        reasoning = answer.reasoning if self._include_reasoning else None
        return ChatChoice(
            index=index,
            message=ChatMessage(content=answer.content, reasoning=reasoning, reasoning_content=reasoning),
            logprobs=self._logprobs(answer.logprobs),
            finish_reason=answer.reason,
            stop_reason=answer.stop,
            token_ids=self.token_ids(answer),
        )

    def _logprobs(self, tokens: Sequence[Placed]) -> ChatLogprobs | None:
        return self.logprobs.chat(tokens) if self.options.sampling.logprobs >= 0 else None

    def _delta(self, event: Delta) -> ChatDelta | None:
        if event.kind == "content":
            return ChatDelta(content=event.text)
        return ChatDelta(reasoning=event.text, reasoning_content=event.text) if self._include_reasoning else None

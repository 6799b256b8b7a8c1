"""The choices of one request in the engine: submitted together, read side by side, given up together."""

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

from starlette.types import Receive

from revolta_serve.api.context import Api
from revolta_serve.api.errors import ClientGoneError
from revolta_serve.api.mailbox import Mailbox
from revolta_serve.api.options import Options, choice_seed
from revolta_serve.errors import EngineError, EngineUnavailableError
from revolta_serve.text.events import Answer, AnswerStream, Delta, Event, Finish, collect
from revolta_serve.text.reasoning import ThinkTokens
from revolta_serve.types import GenerateRequest, Output, SamplingParams

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Prompt:
    """One prompt of a request and the tokens each of its answers may have."""

    ids: tuple[int, ...]
    max_tokens: int


@dataclass
class _Choice:
    index: int
    request: GenerateRequest
    answer: AnswerStream
    last_event: float | None = None
    running: bool = True
    """The engine may still be working on it."""
    generated: int = 0


class Generation:
    """n choices for each of some prompts; choice index = prompt index * n + choice of the prompt.

    Once started it must be closed: that aborts whatever the engine has not finished.
    """

    def __init__(self, api: Api, id: str, prompts: Sequence[Prompt], options: Options, think: ThinkTokens | None) -> None:
        self.prompts = tuple(prompts)
        self.options = options
        self._api = api
        self._arrival = time.monotonic()
        self._mailbox = Mailbox()
        self._tasks: list[asyncio.Task[None]] = []
        self._choices = [
            _Choice(
                index=number * options.n + choice,
                request=_request(f"{id}-{number}-{choice}-{secrets.token_hex(4)}", prompt, options, choice),
                answer=AnswerStream(api.tokenizer, prompt.ids, options.text, think),
            )
            for number, prompt in enumerate(prompts)
            for choice in range(options.n)
        ]
        self._unfinished = len(self._choices)

    async def start(self) -> None:
        """Submit every choice; returns when the engine has admitted all of them. It admits all or none."""
        streams = await self._api.engine.submit([choice.request for choice in self._choices])
        for prompt in self.prompts:
            self._api.metrics.request(len(prompt.ids), self.options.n, prompt.max_tokens)
        pairs = zip(self._choices, streams, strict=True)
        self._tasks = [asyncio.create_task(self._consume(choice, stream)) for choice, stream in pairs]

    @property
    def finished(self) -> bool:
        """Every choice has given its Finish event to the reader."""
        return self._unfinished == 0

    async def next(self) -> tuple[int, Event]:
        """The next event of any choice. Safe to cancel. Raises EngineError, or ClientGoneError once `watch` has seen the client go."""
        index, event = await self._mailbox.get()
        if isinstance(event, Finish):
            self._unfinished -= 1
        return index, event

    async def answers(self) -> list[Answer]:
        """Every choice as a whole, by index."""
        events: list[list[Event]] = [[] for _ in self._choices]
        while not self.finished:
            index, event = await self.next()
            events[index].append(event)
        return [collect(each) for each in events]

    def watch(self, receive: Receive) -> None:
        """Notice that the client closes the connection, and end everything then. The body must have been read."""
        self._tasks.append(asyncio.create_task(self._watch(receive)))

    def close(self) -> None:
        """Give up what still runs; may be called at any time and more than once."""
        for choice in self._choices:
            if choice.running and self._tasks:
                self._give_up(choice)
                self._ended(choice, "abort", 0)
        for task in self._tasks:
            task.cancel()
        self._tasks = []

    async def _consume(self, choice: _Choice, stream: AsyncIterator[Output]) -> None:
        try:
            async for output in stream:
                choice.generated += len(output.tokens)
                if output.finish is not None:
                    choice.running = False
                if output.finish in ("abort", "error"):
                    self._ended(choice, output.finish, 0)
                    raise _failure(output)
                for event in choice.answer.push(output):
                    self._deliver(choice, event)
                if choice.answer.finished:
                    if choice.running:
                        self._give_up(choice)
                    return
            raise EngineError("the engine ended an answer without saying why")
        except Exception as error:  # the reader must hear of it, whatever it is
            self._mailbox.fail(error)

    def _deliver(self, choice: _Choice, event: Event) -> None:
        now = time.monotonic()
        if choice.last_event is None:
            self._api.metrics.first_event(now - self._arrival)
        elif isinstance(event, Delta):
            self._api.metrics.next_event(now - choice.last_event)
        choice.last_event = now
        if isinstance(event, Finish):
            choice.generated = event.usage.generated
            self._ended(choice, event.reason, event.usage.cached)
        self._mailbox.put(choice.index, event)

    def _give_up(self, choice: _Choice) -> None:
        choice.running = False
        self._api.engine.abort(choice.request.id)

    def _ended(self, choice: _Choice, reason: str, cached: int) -> None:
        self._api.metrics.ended(reason, choice.generated, cached, time.monotonic() - self._arrival)

    async def _watch(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        if not self.finished:
            self._api.metrics.disconnected()
            self._mailbox.fail(ClientGoneError())


def _failure(output: Output) -> EngineError:
    """An answer nobody asked to end early: generation failed, or the server is shutting down."""
    if output.finish == "abort":
        return EngineUnavailableError("the server is shutting down; the answer was given up")
    # Clients may be told less: see errors.error_body.
    log.error("%s: %s", output.id, output.error)
    return EngineError(output.error or "generation failed")


def _request(id: str, prompt: Prompt, options: Options, choice: int) -> GenerateRequest:
    plain = options.sampling
    sampling = SamplingParams(
        temperature=plain.temperature,
        top_k=plain.top_k,
        top_p=plain.top_p,
        min_p=plain.min_p,
        seed=choice_seed(options.seed, choice),
    )
    return GenerateRequest(
        id=id,
        prompt=prompt.ids,
        max_tokens=prompt.max_tokens,
        sampling=sampling,
        stop_token_ids=options.stop_token_ids,
    )

"""The choices of one request in the engine: submitted together, read side by side, given up together."""

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

from msgspec.structs import replace
from starlette.types import Receive

from revolta_serve.api.context import Api
from revolta_serve.api.errors import ClientGoneError
from revolta_serve.api.mailbox import Mailbox
from revolta_serve.api.options import Options, choice_seed
from revolta_serve.api.prompt import Prompt
from revolta_serve.errors import EngineError, EngineUnavailableError
from revolta_serve.text.events import Answer, AnswerStream, Delta, Event, Finish, collect
from revolta_serve.text.reasoning import ThinkTokens
from revolta_serve.types import FinishReason, GenerateRequest, Output

log = logging.getLogger(__name__)


_reading: set[asyncio.Task[None]] = set()
"""Tasks that read outputs: kept here, for some go on when their generation is closed."""


@dataclass
class _Run:
    """One request of the engine and the choices that show its answer."""

    choices: range
    request: GenerateRequest
    answer: AnswerStream
    last_event: float | None = None
    running: bool = True
    """The engine may still be working on it."""
    over: bool = False
    """Nobody wants to know more of it than what it has cost."""
    generated: int = 0


class Generation:
    """n choices for each of some prompts; choice index = prompt index * n + choice of the prompt.

    Greedy choices of one prompt are all the same: the engine makes one, and every choice shows it. Once started a generation must be
    closed: that aborts whatever the engine has not finished.
    """

    def __init__(self, api: Api, id: str, prompts: Sequence[Prompt], options: Options, think: ThinkTokens | None, tenant: str = "") -> None:
        """think: None where reasoning is not told from content. tenant: whose request it is."""
        self.prompts = tuple(prompts)
        self.options = options
        self._api = api
        self._arrival = time.monotonic()
        self._mailbox = Mailbox()
        self._watcher: asyncio.Task[None] | None = None
        self._started = False
        copies = options.n // options.runs
        self._runs: list[_Run] = []
        for number, prompt in enumerate(prompts):
            for run in range(options.runs):
                request = _request(f"{id}-{number}-{run}-{secrets.token_hex(4)}", prompt, options, run, tenant)
                told = request.sampling.prompt_logprobs >= 0
                answer = AnswerStream(api.tokenizer, prompt.ids, options.text, think, prompt_logprobs=told)
                first = number * options.n + run * copies
                self._runs.append(_Run(range(first, first + copies), request, answer))
        self._unfinished = len(prompts) * options.n
        self._unended = len(self._runs)

    async def start(self) -> None:
        """Submit every choice; returns when the engine has admitted all of them. It admits all or none."""
        streams = await self._api.engine.submit(self.requests)
        self._started = True
        for prompt in self.prompts:
            self._api.metrics.request(len(prompt.ids), self.options.n, prompt.max_tokens)
        for run, stream in zip(self._runs, streams, strict=True):
            task = asyncio.create_task(self._consume(run, stream))
            _reading.add(task)
            task.add_done_callback(_reading.discard)

    @property
    def requests(self) -> list[GenerateRequest]:
        """What the engine is asked for."""
        return [run.request for run in self._runs]

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
        events: list[list[Event]] = [[] for _ in range(self._unfinished)]
        while not self.finished:
            index, event = await self.next()
            events[index].append(event)
        return [collect(each) for each in events]

    def watch(self, receive: Receive) -> None:
        """Notice that the client closes the connection, and end everything then. The body must have been read."""
        self._watcher = asyncio.create_task(self._watch(receive))

    def close(self) -> None:
        """Give up what still runs; may be called at any time and more than once."""
        for run in self._runs:
            if run.running and self._started:
                self._give_up(run, "abort")
                self._ended(run, "abort", 0)
        if self._watcher is not None:
            self._watcher.cancel()
        # A task that was cancelled and an exception that was raised keep the frames they went through, and so this object and its
        # prompts: kept by it in turn, they would wait for a collection of cycles, which may come hundreds of requests later.
        self._watcher = None
        self._mailbox.close()

    async def _consume(self, run: _Run, stream: AsyncIterator[Output]) -> None:
        """Turn outputs into events; read on after the last event, for the record comes with the last output."""
        try:
            async for output in stream:
                if output.record is not None:
                    self._api.metrics.record(output.record)
                if not run.over:
                    self._take(run, output)
            if not run.over:
                raise EngineError("the engine ended an answer without saying why")
        except Exception as error:  # the reader must hear of it, whatever it is
            self._mailbox.fail(error)

    def _take(self, run: _Run, output: Output) -> None:
        run.generated += len(output.tokens)
        if output.finish is not None:
            run.running = False
        if output.finish in ("abort", "error"):
            run.over = True
            self._ended(run, output.finish, 0)
            raise _failure(output)
        for event in run.answer.push(output):
            self._deliver(run, event)
        if run.answer.finished:
            run.over = True
            if run.running:
                self._give_up(run, "stop")

    def _deliver(self, run: _Run, event: Event) -> None:
        now = time.monotonic()
        if run.last_event is None:
            self._api.metrics.first_event(now - self._arrival)
        elif isinstance(event, Delta):
            self._api.metrics.next_event(now - run.last_event)
        run.last_event = now
        if isinstance(event, Finish):
            run.generated = event.usage.generated
            self._ended(run, event.reason, event.usage.cached)
        for choice in run.choices:
            self._mailbox.put(choice, event)

    def _give_up(self, run: _Run, ended_as: FinishReason) -> None:
        run.running, run.over = False, True
        self._api.engine.abort(run.request.id, ended_as)

    def _ended(self, run: _Run, reason: str, cached: int) -> None:
        """Count every choice; what was reused was reused once."""
        seconds = time.monotonic() - self._arrival
        for choice in run.choices:
            self._api.metrics.ended(reason, run.generated, cached if choice == run.choices[0] else 0, seconds)
        self._unended -= 1
        if not self._unended:
            self._api.metrics.longest(max(each.generated for each in self._runs))

    async def _watch(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        if not self.finished:
            self._api.metrics.disconnected()
            self._mailbox.fail(ClientGoneError())


def _failure(output: Output) -> EngineError:
    """An answer nobody asked to end early: generation failed, or whoever runs the server pauses it or shuts it down."""
    if output.finish == "abort":
        return EngineUnavailableError(output.error or "the answer was given up")
    # Clients may be told less: see errors.error_body.
    log.error("%s: %s", output.id, output.error)
    return EngineError(output.error or "generation failed")


def _request(id: str, prompt: Prompt, options: Options, run: int, tenant: str) -> GenerateRequest:
    sampling = replace(options.sampling, seed=choice_seed(options.seed, run), thinking=prompt.thinking)
    if run and not options.stream:
        # A whole answer tells of its prompt once, for all choices; a stream cannot wait for another choice.
        sampling = replace(sampling, prompt_logprobs=-1)
    return GenerateRequest(
        id=id,
        prompt=prompt.ids,
        max_tokens=prompt.max_tokens,
        sampling=sampling,
        stop_token_ids=options.stop_token_ids,
        boundaries=prompt.boundaries,
        opening=prompt.opening,
        cache_salt=options.cache_salt,
        priority=options.priority,
        tenant=tenant,
        repetition=options.repetition,
    )

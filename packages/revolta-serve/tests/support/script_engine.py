"""An engine that says what a test wants, and a loopback server around it."""

import asyncio
import contextlib
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import httpx
import uvicorn

from revolta_serve.api.app import create_app
from revolta_serve.api.connection import Connection
from revolta_serve.api.engine_port import Phase
from revolta_serve.config import ServeConfig
from revolta_serve.engine.service import PAUSED
from revolta_serve.errors import RevoltaError
from revolta_serve.text.defaults import GenerationDefaults
from revolta_serve.types import (
    CacheReset,
    EngineStatus,
    FinishReason,
    GenerateRequest,
    Output,
    PauseMode,
    RequestRecord,
    StepCost,
    TokenLogprobs,
)
from support import text
from support.text import template, tokenizer


def scripted_logprobs(token: int, count: int) -> TokenLogprobs:
    """Logprobs that a test can work out: the most likely ids are the next even ones, so an even token is the first, an odd one none."""
    size = tokenizer().size
    top = tuple(((token + token % 2 + 2 * place) % size, -0.25 * (place + 1)) for place in range(min(count, size // 2)))
    return TokenLogprobs(token, -9.5 if token % 2 else -0.25, size // 2 if token % 2 else 1, top)


@dataclass
class ScriptEngine:
    """Every request gets `script`, cut by its own max_tokens, stop ids and aborts as the real engine would."""

    script: Sequence[int] | Callable[[GenerateRequest], Sequence[int]] = ()
    group: int = 1
    """Tokens per Output."""
    delay: float = 0.0
    """Seconds before every Output."""
    break_after: int | None = None
    """Tokens after which generation fails."""
    break_with: str = "error"
    break_reason: str = "a step failed"
    cached: int = 0
    logprobs: Callable[[int, int], TokenLogprobs] = scripted_logprobs
    """Of a token of answer or prompt, where they are asked for, and the number of most likely ids."""
    paused: bool = False
    refuse: dict[int, RevoltaError] = field(default_factory=dict)
    """Submissions, counted from 1, that are refused."""
    finish: str | None = None
    """How the script ends that no stop id ends; None: by length."""
    endless: bool = False
    """Never an end before max_tokens: the script repeats."""
    phase: Phase = "ready"
    max_model_len: int = 512
    batches: list[list[GenerateRequest]] = field(default_factory=list)
    """Every submission."""
    requests: list[GenerateRequest] = field(default_factory=list)
    """What was admitted."""
    aborted: list[str] = field(default_factory=list)
    ended_as: dict[str, FinishReason] = field(default_factory=dict)
    observer: Callable[[StepCost], None] | None = None
    running: set[str] = field(default_factory=set)
    generated: int = 0

    async def submit(self, requests: Sequence[GenerateRequest]) -> list[AsyncIterator[Output]]:
        self.batches.append(list(requests))
        error = self.refuse.get(len(self.batches))
        if error is not None:
            raise error
        self.requests += requests
        self.running |= {request.id for request in requests}
        return [self._run(request) for request in requests]

    def abort(self, id: str, ended_as: FinishReason = "abort") -> None:
        self.aborted.append(id)
        self.ended_as[id] = ended_as
        self.running.discard(id)

    async def pause(self, mode: PauseMode, *, clear: bool) -> None:
        self.paused = True
        if mode == "abort":
            self.running.clear()

    async def resume(self) -> None:
        self.paused = False

    async def reset_cache(self, *, preempt: bool) -> CacheReset:
        return CacheReset(blocks_freed=3, snapshots_freed=0, blocks_in_use=0)

    def observe(self, steps: Callable[[StepCost], None]) -> None:
        self.observer = steps

    def status(self) -> EngineStatus:
        return EngineStatus(running=len(self.running), blocks_used=3, blocks_total=4, generated_tokens=self.generated, paused=self.paused)

    async def _run(self, request: GenerateRequest) -> AsyncIterator[Output]:
        script = list(self.script(request) if callable(self.script) else self.script)
        if self.endless:
            script = script * (request.max_tokens // len(script) + 1)
        stop = next((n for n, token in enumerate(script, 1) if token in request.stop_token_ids), None)
        count = min(request.max_tokens, stop or len(script))
        finish = "stop" if stop is not None and stop <= request.max_tokens else self.finish or "length"
        for part in self._prompt_logprobs(request)[:-1]:
            yield Output(id=request.id, prompt_logprobs=part)
        done = 0
        while done < count:
            await asyncio.sleep(self.delay)
            if request.id not in self.running:
                yield Output(id=request.id, finish="abort", error=PAUSED, record=self._record(request, done))
                return
            if self.break_after is not None and done >= self.break_after:
                self.running.discard(request.id)
                yield Output(id=request.id, finish=self.break_with, error=self.break_reason)  # type: ignore[arg-type]
                return
            tokens = tuple(script[done : min(count, done + self.group)])
            asked = request.sampling.logprobs
            first, last = not done, done + len(tokens) == count
            done += len(tokens)
            self.generated += len(tokens)
            if last:
                self.running.discard(request.id)
            yield Output(
                id=request.id,
                tokens=tokens,
                finish=finish if last else None,  # type: ignore[arg-type]
                stop_token=tokens[-1] if last and finish == "stop" else None,
                cached_tokens=self.cached,
                logprobs=tuple(self.logprobs(token, asked) for token in tokens) if asked >= 0 else (),
                prompt_logprobs=self._prompt_logprobs(request)[-1] if first else (),
                record=self._record(request, done) if last else None,
            )

    def _prompt_logprobs(self, request: GenerateRequest) -> list[tuple[TokenLogprobs, ...]]:
        """In pieces of three, as the chunks of a prompt would bring them."""
        asked = request.sampling.prompt_logprobs
        told = [self.logprobs(token, asked) for token in request.prompt[1:]] if asked >= 0 else []
        return [tuple(told[start : start + 3]) for start in range(0, max(1, len(told)), 3)]

    def _record(self, request: GenerateRequest, generated: int) -> RequestRecord:
        return RequestRecord(
            prompt_tokens=len(request.prompt),
            generated_tokens=generated,
            cached_tokens=self.cached,
            seamless=True,
            miss="none",
            queue_seconds=0.0,
            prefill_seconds=0.0,
            decode_seconds=0.0,
            preemptions=0,
            slices=1,
        )


@dataclass
class Server:
    """A running server: where it is and what its engine saw."""

    url: str
    engine: ScriptEngine
    client: httpx.Client

    def post(self, path: str, body: Any = None, **options: Any) -> httpx.Response:
        return self.client.post(path, json=body, **options)

    def chat(self, **fields: Any) -> httpx.Response:
        return self.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}], **fields})

    def complete(self, **fields: Any) -> httpx.Response:
        return self.post("/v1/completions", {"prompt": "hi", **fields})


def config(schedule: Mapping[str, Any] | None = None, **api: Any) -> ServeConfig:
    """A configuration that serves the model under the names tiny and other."""
    base = ServeConfig()
    return replace(
        base,
        model=replace(base.model, path="tiny", served_name=("tiny", "other")),
        schedule=replace(base.schedule, **(schedule or {})),
        api=replace(base.api, **api),
    )


@contextlib.contextmanager
def serving(
    engine: ScriptEngine, schedule: Mapping[str, Any] | None = None, defaults: GenerationDefaults | None = None, **api: Any
) -> Iterator[Server]:
    """Serve on a free loopback port in a thread of its own. defaults: of the checkpoint, where they are not those of the tiny one."""
    app = create_app(config(schedule, **api), engine, tokenizer(), template(), defaults or text.defaults())
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    settings = uvicorn.Config(
        app, http=Connection, log_level="error", log_config=None, ws="none", lifespan="off", timeout_graceful_shutdown=1
    )
    server = uvicorn.Server(settings)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    try:
        wait_for(lambda: server.started)
        with httpx.Client(base_url=url, timeout=20, trust_env=False) as client:
            yield Server(url, engine, client)
    finally:
        server.should_exit = True
        thread.join(10)
        listener.close()
        assert not thread.is_alive(), "the server does not stop"


def wait_for(condition: Callable[[], bool], seconds: float = 5.0) -> None:
    """Wait until something has happened in the server's thread."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it has not happened"
        time.sleep(0.005)


def data_lines(body: str) -> list[str]:
    """The payloads of a server-sent event body; checks its form."""
    assert body.endswith("\n\n")
    events = body.removesuffix("\n\n").split("\n\n")
    assert all("\n" not in event for event in events), "every event is one line"
    assert all(event.startswith(("data: ", ": ")) for event in events)
    return [event.removeprefix("data: ") for event in events if event.startswith("data: ")]

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
from revolta_serve.errors import RevoltaError
from revolta_serve.types import EngineStatus, GenerateRequest, Output
from support.text import defaults, template, tokenizer


@dataclass
class ScriptEngine:
    """Every request gets `script`, cut by its own max_tokens and stop ids as the real engine would."""

    script: Sequence[int] | Callable[[GenerateRequest], Sequence[int]] = ()
    group: int = 1
    """Tokens per Output."""
    pause: float = 0.0
    """Seconds before every Output."""
    break_after: int | None = None
    """Tokens after which generation fails."""
    break_with: str = "error"
    break_reason: str = "a step failed"
    cached: int = 0
    refuse: dict[int, RevoltaError] = field(default_factory=dict)
    """Submissions, counted from 1, that are refused."""
    endless: bool = False
    """Never an end before max_tokens: the script repeats."""
    phase: Phase = "ready"
    max_model_len: int = 512
    batches: list[list[GenerateRequest]] = field(default_factory=list)
    """Every submission."""
    requests: list[GenerateRequest] = field(default_factory=list)
    """What was admitted."""
    aborted: list[str] = field(default_factory=list)
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

    def abort(self, id: str) -> None:
        self.aborted.append(id)
        self.running.discard(id)

    def status(self) -> EngineStatus:
        return EngineStatus(running=len(self.running), blocks_used=3, blocks_total=4, generated_tokens=self.generated)

    async def _run(self, request: GenerateRequest) -> AsyncIterator[Output]:
        script = list(self.script(request) if callable(self.script) else self.script)
        if self.endless:
            script = script * (request.max_tokens // len(script) + 1)
        stop = next((n for n, token in enumerate(script, 1) if token in request.stop_token_ids), None)
        count = min(request.max_tokens, stop or len(script))
        finish = "stop" if stop is not None and stop <= request.max_tokens else "length"
        done = 0
        while done < count:
            await asyncio.sleep(self.pause)
            if self.break_after is not None and done >= self.break_after:
                self.running.discard(request.id)
                yield Output(id=request.id, finish=self.break_with, error=self.break_reason)  # type: ignore[arg-type]
                return
            tokens = tuple(script[done : min(count, done + self.group)])
            done += len(tokens)
            self.generated += len(tokens)
            last = done == count
            if last:
                self.running.discard(request.id)
            yield Output(
                id=request.id,
                tokens=tokens,
                finish=finish if last else None,  # type: ignore[arg-type]
                stop_token=tokens[-1] if last and finish == "stop" else None,
                cached_tokens=self.cached,
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


def config(schedule: Mapping[str, int] | None = None, **api: Any) -> ServeConfig:
    """A configuration that serves the model under the names tiny and other."""
    base = ServeConfig()
    return replace(
        base,
        model=replace(base.model, path="tiny", served_name=("tiny", "other")),
        schedule=replace(base.schedule, **(schedule or {})),
        api=replace(base.api, **api),
    )


@contextlib.contextmanager
def serving(engine: ScriptEngine, schedule: Mapping[str, int] | None = None, **api: Any) -> Iterator[Server]:
    """Serve on a free loopback port in a thread of its own."""
    app = create_app(config(schedule, **api), engine, tokenizer(), template(), defaults())
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

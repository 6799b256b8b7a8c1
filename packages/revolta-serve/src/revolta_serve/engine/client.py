"""The api process's side of the engine: starts it, passes requests, hands out their tokens, and knows when it is gone."""

import asyncio
import contextlib
import itertools
import logging
import os
import shutil
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from subprocess import Popen
from typing import Any, Literal

import msgspec
import zmq
import zmq.asyncio

from revolta_serve.config import ServeConfig
from revolta_serve.engine.channel import Sender, decoder, receiver
from revolta_serve.engine.messages import (
    Abort,
    Admitted,
    Command,
    Done,
    Drain,
    Event,
    Failed,
    Heartbeat,
    LaunchSpec,
    Outputs,
    Pause,
    Ready,
    Refused,
    ResetCache,
    Resume,
    Submit,
)
from revolta_serve.engine.supervise import describe_exit, spawn
from revolta_serve.errors import EngineUnavailableError, RequestError
from revolta_serve.logs import parameters, request_ended
from revolta_serve.types import CacheReset, EngineStatus, FinishReason, GenerateRequest, Output, PauseMode, StartupReport, StepCost

log = logging.getLogger(__name__)

Phase = Literal["starting", "ready", "draining", "dead"]

COMMAND = (sys.executable, "-P", "-m", "revolta_serve.engine.process")
"""-P: a file in the user's directory must not take the place of a module."""

LAST_EVENTS_SECONDS = 0.2
"""After the engine's end: silence for this long means that nothing it sent is still on its way."""

CHECK_SECONDS = 0.25


class Stream:
    """The outputs of one request, an async iterator that ends after the output with `finish`."""

    def __init__(self, client: "EngineClient", request: GenerateRequest) -> None:
        self.id, self.prompt_tokens = request.id, len(request.prompt)
        self.asked = parameters(request)
        self.ended_as: FinishReason | None = None
        """How the answer ended as its reader sees it, where that was not the engine's doing."""
        self._client = client
        self._queue: asyncio.Queue[Output] = asyncio.Queue()
        self._ended = False

    def __aiter__(self) -> AsyncIterator[Output]:
        return self

    async def __anext__(self) -> Output:
        if self._ended:
            raise StopAsyncIteration
        output = await self._queue.get()
        self._ended = output.finish is not None
        return output

    async def aclose(self) -> None:
        """Abort the request unless it has ended."""
        if not self._ended:
            self._ended = True
            self._client.abort(self.id)

    def put(self, output: Output) -> None:
        """Called by the client as outputs arrive."""
        self._queue.put_nowait(output)


class EngineClient:
    """Use from one event loop, in a thread that lives as long as the engine: await start(), ready(), requests, then close()."""

    def __init__(self, config: ServeConfig, command: Sequence[str] = COMMAND) -> None:
        """config must be resolved. command starts the engine process; another one than the default is for tests."""
        self.config, self._command = config, tuple(command)
        self.max_model_len = config.schedule.max_model_len
        self.phase: Phase = "starting"
        self.reason = ""
        """Why the engine is dead."""
        self.given_up = False
        """It was ended on purpose, requests or not."""
        self.exit_code: int | None = None
        self.reports: tuple[StartupReport, ...] = ()
        self._status = EngineStatus()
        self._observer: Callable[[StepCost], None] = lambda cost: None
        self._streams: dict[str, Stream] = {}
        self._asked: dict[int, asyncio.Future[CacheReset | None]] = {}
        """Tickets that have not been answered."""
        self._submitted: dict[int, tuple[str, ...]] = {}
        """Ids of the requests of those that are a Submit."""
        self._tickets = itertools.count()
        self._child: Popen[bytes] | None = None
        self._context: zmq.Context[Any] = zmq.Context()
        self._folder = ""
        self._last_beat = 0.0
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def pid(self) -> int:
        """Process id of the engine, 0 before it is started."""
        return self._child.pid if self._child else 0

    async def start(self) -> None:
        """Start the engine process and return at once."""
        self._loop = asyncio.get_running_loop()
        self._ready, self._closed = self._loop.create_future(), asyncio.Event()
        self._folder = tempfile.mkdtemp(prefix="revolta-")
        parallel = self.config.parallel
        if parallel.tensor > 1 and not parallel.rendezvous:
            parallel = replace(parallel, rendezvous=os.path.join(self._folder, "rendezvous"))
        config = replace(self.config, parallel=parallel, api=replace(self.config.api, keys=()))
        self._in = zmq.asyncio.Socket.from_socket(receiver(self._context, os.path.join(self._folder, "up0")))
        self._out = Sender(self._context, os.path.join(self._folder, "down0"))
        self._child = spawn(LaunchSpec(config=config, rank=0, parent=os.getpid(), folder=self._folder, command=self._command))
        self._last_beat = time.monotonic()
        self._pidfd = os.pidfd_open(self._child.pid)
        exited = self._loop.create_future()
        self._loop.add_reader(self._pidfd, _settle, exited)
        self._tasks = [asyncio.create_task(self._receive()), asyncio.create_task(self._check_life())]
        self._end = asyncio.create_task(self._wait_for_end(exited))

    async def ready(self) -> tuple[StartupReport, ...]:
        """Wait until requests may come. Raises EngineUnavailableError with the reason if the engine ends first."""
        return await asyncio.shield(self._ready)

    async def submit(self, requests: Sequence[GenerateRequest]) -> list[AsyncIterator[Output]]:
        """Queue requests, all or none; returns their streams, in order, when the engine has admitted them to its queue.

        Raises RequestError (malformed, too long, queue full) or EngineUnavailableError (starting, draining, dead).
        """
        self._check_phase("ready")
        streams: dict[str, Stream] = {}
        for request in requests:
            if request.id in self._streams or request.id in streams:
                raise RequestError(f"request id {request.id!r} is already in use; choose another")
            streams[request.id] = Stream(self, request)
        self._streams |= streams
        ticket = next(self._tickets)
        self._submitted[ticket] = tuple(streams)
        try:
            await self._ask(Submit(ticket, tuple(requests)))
        except asyncio.CancelledError:
            for id in streams:
                self.abort(id)
            raise
        return list(streams.values())

    def abort(self, id: str, ended_as: FinishReason = "abort") -> None:
        """End a request; its stream's last output says so. Nothing happens if it has already ended.

        ended_as: how its answer ended for its reader, for the log: `stop` where a text outside of the engine's view ended it.
        """
        if id in self._streams and self.phase != "dead":
            self._streams[id].ended_as = ended_as
            self._send(Abort(id))

    async def pause(self, mode: PauseMode, *, clear: bool) -> None:
        """Start no more requests; returns when the pause is reached. clear: empty the prefix cache then.

        Raises EngineUnavailableError unless ready, ConflictError if `resume` is called before.
        """
        self._check_phase("ready")
        await self._ask(Pause(next(self._tickets), mode, clear))

    async def resume(self) -> None:
        """End a pause, if there is one. Raises EngineUnavailableError before the engine is ready and after its end."""
        self._check_phase("ready", "draining")
        await self._ask(Resume(next(self._tickets)))

    async def reset_cache(self, *, preempt: bool) -> CacheReset:
        """Forget what can be reused. preempt: running requests recompute what they hold. Raises EngineUnavailableError unless ready."""
        self._check_phase("ready")
        reset = await self._ask(ResetCache(next(self._tickets), preempt))
        assert reset is not None, "the answer to a reset has its counts"
        return reset

    def observe(self, steps: Callable[[StepCost], None]) -> None:
        """Call `steps` with the cost of every step from now on."""
        self._observer = steps

    def status(self) -> EngineStatus:
        """The engine's counts after its last step or command."""
        return self._status

    async def closed(self) -> int:
        """Wait for the end of the engine process and return its exit code, negative for a signal."""
        await self._closed.wait()
        assert self.exit_code is not None
        return self.exit_code

    async def drain(self, seconds: float) -> int:
        """Refuse new requests, give running ones `seconds`, abort the rest, end the engine; returns its exit code."""
        if self.phase != "ready":
            return await self.close() if self.phase == "starting" else await self.closed()
        self.phase = "draining"
        self._send(Drain(seconds))
        with contextlib.suppress(TimeoutError):
            return await asyncio.wait_for(self.closed(), seconds + self.config.engine.heartbeat_timeout)
        log.warning("the engine does not end after a drain and is killed")
        return await self.close()

    def give_up(self, reason: str) -> None:
        """The engine is about to be ended on purpose, with what runs; clients hear the reason."""
        self.given_up, self.reason = True, reason

    async def close(self) -> int:
        """End the engine now, if it has not ended, and return its exit code."""
        if self._child is not None and self.exit_code is None:
            self._child.kill()
        return await self.closed()

    def _send(self, command: Command) -> None:
        self._out.send(command)

    async def _ask(self, command: Submit | Pause | Resume | ResetCache) -> CacheReset | None:
        """Send a command and wait for the answer to its ticket."""
        done: asyncio.Future[CacheReset | None] = self._loop.create_future()
        self._asked[command.ticket] = done
        self._send(command)
        return await done

    def _check_phase(self, *good: Phase) -> None:
        """Raise EngineUnavailableError in any other phase."""
        if self.phase not in good:
            reasons = {"starting": "the model is still loading; try again later", "draining": "the server is shutting down"}
            raise EngineUnavailableError(reasons.get(self.phase, f"the engine is dead: {self.reason}"))

    async def _receive(self) -> None:
        try:
            while True:
                self._handle(decoder(Event).decode(await self._in.recv()))
        except Exception as error:  # never silence: without a reader every request would hang
            log.exception("an event of the engine cannot be handled; the engine is killed")
            self.reason = f"{type(error).__name__}: {error}"
            assert self._child is not None
            self._child.kill()

    def _handle(self, event: Event) -> None:
        if isinstance(event, Outputs):
            self._status = event.status
            if event.cost is not None:
                self._observer(event.cost)
            for output in event.outputs:
                self._deliver(output)
        elif isinstance(event, Admitted | Done | Refused):
            if isinstance(event, Done):
                self._status = event.status
            self._answer(event)
        elif isinstance(event, Heartbeat):
            self._status, self._last_beat = msgspec.structs.replace(self._status, rss_bytes=event.rss_bytes), time.monotonic()
        elif isinstance(event, Ready):
            self.reports, self._status = event.reports, event.status
            self.phase, self._last_beat = "ready", time.monotonic()
            # Once all sockets are connected their files are not needed: nothing is left behind, however this process may end.
            self._out.wait()
            shutil.rmtree(self._folder, ignore_errors=True)
            self._ready.set_result(event.reports)
        elif isinstance(event, Failed):
            self.reason = event.message

    def _answer(self, event: Admitted | Done | Refused) -> None:
        done, ids = self._asked.pop(event.ticket), self._submitted.pop(event.ticket, ())
        if isinstance(event, Refused):
            for id in ids:
                del self._streams[id]
        if done.done():
            return  # its caller has gone; the aborts are on their way
        if isinstance(event, Refused):
            done.set_exception(event.exception())
        else:
            done.set_result(event.reset if isinstance(event, Done) else None)

    def _deliver(self, output: Output) -> None:
        stream = self._streams.get(output.id)
        if stream is None:
            return
        stream.put(output)
        if output.finish is not None:
            del self._streams[output.id]
            if self.config.api.log_requests:
                request_ended(output.id, stream.ended_as or output.finish, stream.prompt_tokens, stream.asked, output.record)

    async def _check_life(self) -> None:
        """Kill an engine that has not started in time or gives no sign of life; its end is then noticed like any other."""
        limits = self.config.engine
        checked = time.monotonic()
        while True:
            await asyncio.sleep(CHECK_SECONDS)
            now = time.monotonic()
            late, checked = now - checked > 4 * CHECK_SECONDS, now
            if late:
                continue  # it was this process that stood still; signs of life may be waiting unread
            allowed = limits.start_timeout if self.phase == "starting" else limits.heartbeat_timeout
            if now - self._last_beat > allowed:
                self.reason = f"no sign of life for {allowed:g} s while {self.phase}"
                log.error("the engine gave %s and is killed", self.reason)
                assert self._child is not None
                self._child.kill()
                return

    async def _wait_for_end(self, exited: "asyncio.Future[None]") -> None:
        """When the process is gone: read what it still sent, end every open request with an error, then tell everyone who waits."""
        await exited
        self._loop.remove_reader(self._pidfd)
        os.close(self._pidfd)
        assert self._child is not None
        self.exit_code = self._child.wait()
        if self._child.stdin is not None:
            self._child.stdin.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        while await self._in.poll(round(LAST_EVENTS_SECONDS * 1000)):
            self._handle(decoder(Event).decode(await self._in.recv()))
        expected = self.phase == "draining" and self.exit_code == 0
        self.phase = "dead"
        self.reason = self.reason or ("it was shut down" if expected else f"the engine process ended with {describe_exit(self.exit_code)}")
        self._fail_everything()
        self._context.destroy(linger=0)
        shutil.rmtree(self._folder, ignore_errors=True)
        self._closed.set()

    def _fail_everything(self) -> None:
        error = EngineUnavailableError(f"the engine is dead: {self.reason}")
        for done in self._asked.values():
            if not done.done():
                done.set_exception(error)
        finish: FinishReason = "abort" if self.given_up else "error"
        reason = f"{self.reason}; the answer was given up" if self.given_up else error.message
        for id in list(self._streams):
            self._deliver(Output(id=id, finish=finish, error=reason))
        self._asked.clear()
        self._submitted.clear()
        if not self._ready.done():
            self._ready.set_exception(error)
            self._ready.exception()  # whoever waits gets it; nobody need wait


def _settle(future: "asyncio.Future[None]") -> None:
    if not future.done():
        future.set_result(None)

"""Answers over HTTP: as a stream of server-sent events, or whole.

Headers of a stream go out as soon as the engine has admitted the request; from then on a failure is an error event. When nothing
has been sent for a while a comment line keeps proxies and clients patient. A client that leaves is noticed at once, in both forms.
"""

import asyncio
import logging
import time
from collections.abc import Iterator

import msgspec
from starlette.concurrency import run_in_threadpool
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from revolta_serve.api.errors import ClientGoneError, error_body, error_response, known
from revolta_serve.api.generation import Generation
from revolta_serve.api.render import Renderer
from revolta_serve.text.events import Answer

log = logging.getLogger(__name__)

KEEP_ALIVE = b": keep-alive\n\n"
DONE = b"data: [DONE]\n\n"
HEADERS = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")]


class EventStream:
    """Streams a started generation and closes it."""

    def __init__(self, generation: Generation, renderer: Renderer, keep_alive: float) -> None:
        """`keep_alive`: seconds of silence before a comment; 0: never."""
        self.generation = generation
        self.renderer = renderer
        self.keep_alive = keep_alive or None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        generation = self.generation
        generation.watch(receive)
        try:
            await send({"type": "http.response.start", "status": 200, "headers": HEADERS})
            try:
                sent = time.monotonic()
                while not generation.finished:
                    # Events that show nothing (hidden reasoning) do not count as a sign of life.
                    for part in await self._next(sent):
                        await _write(send, part)
                        sent = time.monotonic()
                for struct in self.renderer.closing():
                    await _write(send, _data(struct))
            except ClientGoneError:
                return
            except Exception as error:  # too late for a status: the client must be told in the stream
                await _write(send, _data(error_body(known(error))))
            await _write(send, DONE)
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        except OSError:
            log.debug("the client closed its stream")
        finally:
            generation.close()

    async def _next(self, sent: float) -> Iterator[bytes]:
        try:
            async with asyncio.timeout(None if self.keep_alive is None else sent + self.keep_alive - time.monotonic()):
                choice, event = await self.generation.next()
        except TimeoutError:
            return iter((KEEP_ALIVE,))
        if event.prompt_logprobs:
            return iter(await run_in_threadpool(lambda: [_data(chunk) for chunk in self.renderer.chunks(choice, event)]))
        return map(_data, self.renderer.chunks(choice, event))


class WholeAnswer:
    """Waits for a started generation, answers in one piece and closes it."""

    def __init__(self, generation: Generation, renderer: Renderer) -> None:
        self.generation = generation
        self.renderer = renderer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.generation.watch(receive)
        try:
            answers = await self.generation.answers()
            body = await run_in_threadpool(self._body, answers) if self.renderer.laborious else self._body(answers)
            response = Response(body, media_type="application/json")
        except ClientGoneError:
            return
        except Exception as error:  # nothing has been sent yet: the status can still say it
            response = error_response(known(error))
        finally:
            self.generation.close()
        await response(scope, receive, send)

    def _body(self, answers: list[Answer]) -> bytes:
        return msgspec.json.encode(self.renderer.whole(answers))


async def _write(send: Send, part: bytes) -> None:
    await send({"type": "http.response.body", "body": part, "more_body": True})


def _data(value: object) -> bytes:
    return b"data: " + msgspec.json.encode(value) + b"\n\n"

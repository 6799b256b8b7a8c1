"""One HTTP connection: uvicorn's protocol, made to notice that its client has gone whatever the client had sent before.

uvicorn knows the latest request of a connection only, and stops reading once a second one has arrived. A client that pipelines a
request behind a long one could therefore leave unnoticed: nobody reads the end of its stream, and the request that is marked as
lost is the one that never ran. Here reading goes on, what is read ahead is bounded, and a lost connection marks every request.

Closing after the answer under way, and thereby leaving what was pipelined unanswered, is a server's right (RFC 9112 section 9.3.2).
"""

import asyncio
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

MOST_AHEAD = 16
"""Requests that may wait behind the one that is answered, each with a body of up to uvicorn's HIGH_WATER_LIMIT bytes."""


class Connection(HttpToolsProtocol):
    """For uvicorn.Config(http=Connection)."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._answered: RequestResponseCycle | None = None
        """The request whose answer is under way, or the last one that was answered. uvicorn's `cycle` is the one that came last."""
        self._deaf = False
        """Nothing more is read from this client; the connection ends with the answer under way."""

    def data_received(self, data: bytes) -> None:
        if self._deaf:
            return
        super().data_received(data)
        if self.pipeline or self._deaf:
            self.flow.resume_reading()  # who does not read never learns that the client has gone

    def connection_lost(self, exc: Exception | None) -> None:
        waiting = [cycle for cycle, _ in self.pipeline]
        self.pipeline.clear()
        super().connection_lost(exc)
        for cycle in (self._answered, *waiting):
            if cycle is not None and not cycle.response_complete:
                cycle.disconnected = True
                cycle.message_event.set()

    def on_headers_complete(self) -> None:
        if len(self.pipeline) >= MOST_AHEAD:
            self._stop_listening()
        if not self._deaf:
            super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        if self._deaf:
            return
        super().on_body(body)
        if self.pipeline and len(self.cycle.body) > HIGH_WATER_LIMIT:
            self._stop_listening()

    def on_message_complete(self) -> None:
        if not self._deaf:
            super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        """What is no HTTP ends the connection: at once, or behind an answer that is under way."""
        answered = self._answered
        if answered is None or answered.response_complete or answered.more_body:
            super().send_400_response(msg)
        else:
            self._stop_listening()

    def _stop_listening(self) -> None:
        assert self._answered is not None
        self._deaf = True
        self.pipeline.clear()
        self.cycle = self._answered
        self.cycle.keep_alive = False

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._answered = cycle
        careful: Any = _Careful(app, cycle, self.transport)  # the same thing to uvicorn and starlette, under two names of each type
        super()._start_asgi_task(cycle, careful)


class _Careful:
    """An ASGI application for which sending to a client that has gone is no error.

    Between the end of a connection and the call that reports it, uvloop answers a write with RuntimeError.
    """

    def __init__(self, app: ASGIApp, cycle: RequestResponseCycle, transport: asyncio.Transport) -> None:
        self._app, self._cycle, self._transport = app, cycle, transport

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def careful(message: Message) -> None:
            try:
                await send(message)
            except RuntimeError:
                if self._cycle.response_complete or not self._transport.is_closing():
                    raise
                self._cycle.disconnected = True
                self._cycle.message_event.set()

        await self._app(scope, receive, careful)

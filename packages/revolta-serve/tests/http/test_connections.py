"""What clients do to a connection while an answer is under way: nothing of it may hide that they leave, or spoil the answer."""

import asyncio
import json
import logging
import random
import socket
import struct
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from revolta_serve.api.connection import MOST_AHEAD, _Careful
from support.script_engine import ScriptEngine, Server, wait_for
from support.text import byte_tokens

GET = b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n"
PATH = "/v1/completions"


def post(**fields: Any) -> bytes:
    """One request, byte by byte."""
    body = json.dumps({"prompt": "x", "ignore_eos": True, **fields}).encode()
    return f"POST {PATH} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body


BEHIND: dict[str, bytes] = {
    "nothing": b"",
    "a request": GET,
    "another answer": post(max_tokens=400),
    "many requests": GET * 5,
    "too many requests": GET * (MOST_AHEAD + 5),
    "far too many requests": GET * 20_000,
    "part of a head": GET[:20],
    "part of a body": post(max_tokens=400)[:-5],
    "a large body": b"POST /tokenize HTTP/1.1\r\nhost: x\r\ncontent-length: 3000000\r\n\r\n" + b"x" * 400_000,
    "no http": b"\x16\x03\x01\x02\r\n\r\n",
    "an upgrade": GET.replace(b"host: x", b"host: x\r\nupgrade: websocket\r\nconnection: upgrade\r\nsec-websocket-key: eA=="),
}
"""What a client sends behind its first request."""


@pytest.fixture
def no_errors(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """A client that leaves is no error of the server: nothing is logged."""
    yield
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR] == []


def connect(server: Server) -> socket.socket:
    host, port = server.url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=10)


def read_all(connection: socket.socket) -> bytes:
    """Everything until the server closes."""
    parts = []
    while part := connection.recv(65536):
        parts.append(part)
    return b"".join(parts)


@pytest.mark.usefixtures("no_errors")
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("together", [False, True], ids=["later", "together"])
@pytest.mark.parametrize("behind", BEHIND)
def test_leaving_is_noticed_whatever_was_sent_before(serve: Callable[..., Server], behind: str, together: bool, stream: bool) -> None:
    engine = ScriptEngine(byte_tokens("ab"), endless=True, delay=100.0)
    server = serve(engine)
    with connect(server) as connection:
        connection.sendall(post(max_tokens=400, stream=stream) + (BEHIND[behind] if together else b""))
        wait_for(lambda: len(engine.running) == 1)
        if not together:
            connection.sendall(BEHIND[behind])
        server.client.get("/health")  # the server has had its turn
    wait_for(lambda: not engine.running, 3)
    assert len(engine.requests) == 1, "what waited behind it never began"
    assert engine.aborted == [engine.requests[0].id]
    wait_for(lambda: 'revolta:client_disconnects_total{model_name="tiny"} 1.0' in server.client.get("/metrics").text)


@pytest.mark.usefixtures("no_errors")
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("behind", ["too many requests", "far too many requests", "a large body", "no http"])
def test_the_answer_under_way_is_not_spoiled(serve: Callable[..., Server], behind: str, stream: bool) -> None:
    engine = ScriptEngine(byte_tokens("ab"), delay=0.05)
    server = serve(engine)
    with connect(server) as connection:
        connection.sendall(post(max_tokens=2, stream=stream) + BEHIND[behind])
        answer = read_all(connection)
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 OK")
    if stream:
        assert body.count(b"data: [DONE]") == 1
    else:
        assert json.loads(body.partition(b"HTTP/1.1")[0])["choices"][0]["text"] == "ab"


@pytest.mark.usefixtures("no_errors")
def test_pipelined_requests_are_answered_in_order(serve: Callable[..., Server]) -> None:
    server = serve(ScriptEngine(byte_tokens("ab"), delay=0.02))
    last = b"GET /version HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"
    with connect(server) as connection:
        connection.sendall(post(max_tokens=2) + GET * 3 + post(max_tokens=1) + last)
        first, *health, second, version = read_all(connection).split(b"HTTP/1.1 ")[1:]
    assert b'"ab"' in first
    assert [part[:6] for part in health] == [b"200 OK"] * 3
    assert b'"text":"a"' in second
    assert b'"version"' in version
    assert len(server.engine.requests) == 2
    assert server.engine.aborted == []


@pytest.mark.usefixtures("no_errors")
def test_too_much_ahead_closes_behind_the_answer(serve: Callable[..., Server]) -> None:
    server = serve(ScriptEngine(byte_tokens("ab"), delay=0.05))
    with connect(server) as connection:
        connection.sendall(post(max_tokens=2) + GET * (MOST_AHEAD + 1))
        answer = read_all(connection)
    assert answer.count(b"HTTP/1.1 ") == 1
    assert b"connection: close" in answer.lower()
    with connect(server) as connection:
        connection.sendall(post(max_tokens=2) + GET * (MOST_AHEAD - 1) + GET.replace(b"host: x", b"host: x\r\nconnection: close"))
        assert read_all(connection).count(b"HTTP/1.1 200 OK") == MOST_AHEAD + 1


@pytest.mark.usefixtures("no_errors")
def test_a_storm_of_clients_leaves_nothing_behind(serve: Callable[..., Server]) -> None:
    """Requests cut anywhere, doubled, abandoned after any time, closed or reset."""
    engine = ScriptEngine(byte_tokens("ab"), endless=True, delay=0.001)
    server = serve(engine)

    async def client(number: int) -> None:
        dice = random.Random(number)
        request = post(max_tokens=dice.choice([1, 5, 400]), n=dice.choice([1, 3]), stream=dice.random() < 0.6)
        host, port = server.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        if dice.random() < 0.2:
            request = request[: dice.randrange(len(request))]
        elif dice.random() < 0.5:
            request += dice.choice(list(BEHIND.values()))
        try:
            writer.write(request)
            async with asyncio.timeout(dice.random() * 0.3):
                while await reader.read(65536):
                    pass
        except (OSError, TimeoutError):
            pass
        if dice.random() < 0.5:
            raw = writer.get_extra_info("socket")
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        writer.close()

    async def storm() -> None:
        for first in range(0, 200, 40):
            await asyncio.gather(*(client(number) for number in range(first, first + 40)))

    asyncio.run(storm())
    wait_for(lambda: not engine.running, 5)
    assert server.complete(max_tokens=2).json()["choices"][0]["text"] == "ab"


class _Lost:
    """A cycle and a transport in one, whose client has gone although nobody has said so."""

    response_complete = disconnected = False

    def __init__(self, closing: bool) -> None:
        self._closing = closing
        self.message_event = asyncio.Event()

    def is_closing(self) -> bool:
        return self._closing


@pytest.mark.parametrize("closing", [False, True])
def test_writing_to_a_closed_transport_is_a_client_that_has_gone(closing: bool) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200})

    async def send(message: Any) -> None:
        raise RuntimeError("unable to perform operation on <TCPTransport closed=True>; the handler is closed")

    lost: Any = _Lost(closing)
    receive: Any = None
    run = _Careful(app, lost, lost)({}, receive, send)
    if closing:
        asyncio.run(run)
    else:
        with pytest.raises(RuntimeError, match="handler is closed"):
            asyncio.run(run)
    assert lost.disconnected == lost.message_event.is_set() == closing

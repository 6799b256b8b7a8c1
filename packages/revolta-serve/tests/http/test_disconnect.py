"""A client that leaves: everything it asked for is given up, in whatever state it was."""

import json
import socket
import threading
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from support.script_engine import ScriptEngine, Server, wait_for
from support.text import byte_tokens


def leave(server: Server, fields: dict[str, Any], seen: Callable[[], bool]) -> None:
    """Send a request and close the connection once `seen`."""
    body = json.dumps({"prompt": "x", **fields}).encode()
    host, port = server.url.removeprefix("http://").split(":")
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(head.encode() + body)
        wait_for(seen)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("pause", [0.01, 100.0], ids=["decoding", "waiting"])
@pytest.mark.parametrize("fields", [{}, {"n": 4}, {"prompt": ["a", "b", "c"], "n": 2}], ids=["one", "choices", "prompts"])
def test_leaving_aborts_every_choice(serve: Callable[..., Server], stream: bool, pause: float, fields: dict[str, Any]) -> None:
    engine = ScriptEngine(byte_tokens("ab"), endless=True, delay=pause)
    server = serve(engine)
    count = len(fields.get("prompt", "x")) * fields.get("n", 1)
    wanted = 1 if pause < 1 else 0
    leave(
        server,
        {"max_tokens": 400, "ignore_eos": True, "stream": stream, **fields},
        lambda: len(engine.running) == count and engine.generated >= wanted,
    )
    wait_for(lambda: not engine.running, 2)
    assert sorted(engine.aborted) == sorted(request.id for request in engine.requests)
    wait_for(lambda: f'finished_reason="abort",model_name="tiny"}} {count}.0' in server.client.get("/metrics").text)
    assert 'revolta:client_disconnects_total{model_name="tiny"} 1.0' in server.client.get("/metrics").text


def test_others_are_not_disturbed(serve: Callable[..., Server]) -> None:
    engine = ScriptEngine(byte_tokens("ab"), endless=True, delay=0.005)
    server = serve(engine)
    answers: list[httpx.Response] = []
    other = threading.Thread(
        target=lambda: answers.append(httpx.post(f"{server.url}/v1/completions", json={"prompt": "x", "max_tokens": 60}))
    )
    other.start()
    wait_for(lambda: len(engine.running) == 1)
    leave(server, {"max_tokens": 400}, lambda: len(engine.running) == 2)
    other.join(20)
    assert answers[0].json()["choices"][0]["text"] == "ab" * 30
    assert len(engine.aborted) == 1


def test_a_client_that_leaves_while_sending_its_body(serve: Callable[..., Server]) -> None:
    server = serve(ScriptEngine(byte_tokens("ab")))
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: 100\r\n\r\n{")
    assert server.complete(max_tokens=2).json()["choices"][0]["text"] == "ab"
    assert len(server.engine.requests) == 1


def test_a_finished_answer_is_not_aborted(serve: Callable[..., Server]) -> None:
    server = serve(ScriptEngine(byte_tokens("ab")))
    assert server.complete(max_tokens=2).status_code == 200
    assert server.complete(max_tokens=2, stream=True).text.endswith("data: [DONE]\n\n")
    assert server.engine.aborted == []

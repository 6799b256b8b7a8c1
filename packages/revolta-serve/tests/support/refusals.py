"""Requests that must be refused: what such an answer looks like."""

import json
from typing import Any

from support.script_engine import Server
from support.text import tokenizer

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
USER = [{"role": "user", "content": "hi"}]
SIZE = tokenizer().size

Case = tuple[str, Any, str]
"""A field, a value and the param of the error it must give."""


def body(path: str, **fields: Any) -> dict[str, Any]:
    """A small request to a route with some fields changed."""
    base: dict[str, Any] = {"messages": USER} if path == CHAT else {"prompt": "hi"}
    return {"model": "tiny", **base, **fields}


def check(server: Server, path: str, content: bytes, param: str | None) -> dict[str, Any]:
    """A 400 in the OpenAI shape about `param`, and nothing reached the engine. Returns the error."""
    before = len(server.engine.requests)
    response = server.client.post(path, content=content, headers={"content-type": "application/json"})
    assert response.status_code == 400, response.text
    assert response.headers["content-type"] == "application/json"
    error = json.loads(response.content)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param, error
    assert error["message"]
    assert " at 0x" not in error["message"]
    assert len(error["message"]) < 600
    assert len(server.engine.requests) == before
    return dict(error)


def check_all(server: Server, path: str, cases: list[Case], **common: Any) -> None:
    """Every case alone, on top of `common`, as a stream and whole."""
    for field, value, param in cases:
        for stream in (False, True):
            fields = {field: value} if field in ("stream", "stream_options") else {"stream": stream, field: value}
            error = check(server, path, json.dumps(body(path, **common, **fields)).encode(), param)
            assert param in error["message"] or error["code"] == "context_length_exceeded", error

"""The form of streams: raw bytes, headers, keep-alive, usage, errors inside."""

import asyncio
import json
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from revolta_serve.errors import EngineUnavailableError, QueueFullError
from support.script_engine import ScriptEngine, Server, data_lines, wait_for
from support.text import byte_tokens, tokenizer

END = tokenizer().added["<|im_end|>"]
PATHS = ["/v1/chat/completions", "/v1/completions"]


def stream(server: Server, path: str, **fields: Any) -> Any:
    return (server.chat if "chat" in path else server.complete)(stream=True, **fields)


@pytest.mark.parametrize("path", PATHS)
def test_headers_and_form(shared: Server, path: str) -> None:
    response = stream(shared, path)
    assert response.status_code == 200
    assert response.headers["content-type"].startswith("text/event-stream")
    assert response.headers["cache-control"] == "no-cache"
    assert response.headers["x-accel-buffering"] == "no"
    lines = data_lines(response.text)
    assert lines[-1] == "[DONE]"
    chunks = [json.loads(line) for line in lines[:-1]]
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk" if "chat" in path else "text_completion"}
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None] * (len(chunks) - 1) + ["stop"]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("options", [None, {}, {"include_usage": False}, {"continuous_usage_stats": True}])
def test_no_usage_unless_asked(shared: Server, path: str, options: Any) -> None:
    assert '"usage"' not in stream(shared, path, stream_options=options).text


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("continuous", [False, True])
def test_one_usage_chunk(serve: Callable[..., Server], path: str, continuous: bool) -> None:
    server = serve(ScriptEngine([*byte_tokens("abc"), END], cached=1))
    whole = (server.chat if "chat" in path else server.complete)(n=2).json()["usage"]
    options = {"include_usage": True, "continuous_usage_stats": continuous}
    chunks = [json.loads(line) for line in data_lines(stream(server, path, n=2, stream_options=options).text)[:-1]]
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"] == whole
    assert whole["completion_tokens"] == 8
    assert whole["prompt_tokens_details"]["cached_tokens"] == 1 <= whole["prompt_tokens"]
    assert all(chunk["choices"] for chunk in chunks[:-1])
    counts = [chunk["usage"] and chunk["usage"]["completion_tokens"] for chunk in chunks[:-1]]
    assert counts == sorted(counts) if continuous else set(counts) == {None}


TOOLS = {"tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": "none"}


@pytest.mark.parametrize(("options", "chunks", "inside"), [
    (None, 0, False),
    ({}, 0, False),
    ({"include_usage": False}, 0, False),
    ({"include_usage": False, "continuous_usage_stats": True}, 0, False),
    ({"include_usage": True}, 1, False),
    ({"include_usage": True, "continuous_usage_stats": False}, 1, False),
    ({"include_usage": True, "continuous_usage_stats": True}, 1, True),
])  # fmt: skip
def test_usage_in_streams(serve: Callable[..., Server], options: Any, chunks: int, inside: bool) -> None:
    """One chunk, just before the end, and only when it is asked for; the same counts as in the whole answer."""
    server = serve(ScriptEngine([*byte_tokens("abcdef"), END], group=2, cached=1))
    for path in PATHS:
        for fields in ({}, {"n": 2}, {"max_tokens": 3}, {"n": 2, "temperature": 0}, {"stop": "d"}, TOOLS if "chat" in path else {}):
            said = [json.loads(line) for line in data_lines(stream(server, path, stream_options=options, **fields).text)[:-1]]
            closing = [chunk for chunk in said if not chunk["choices"]]
            assert len(closing) == chunks
            if not chunks:
                assert all("usage" not in chunk for chunk in said)
                continue
            assert said[-1] == closing[0]
            whole = (server.chat if "chat" in path else server.complete)(**fields).json()["usage"]
            assert closing[0]["usage"] == whole
            assert whole["prompt_tokens_details"]["cached_tokens"] == 1 <= whole["prompt_tokens"]
            assert whole["total_tokens"] == whole["prompt_tokens"] + whole["completion_tokens"]
            assert all((chunk["usage"] is not None) == inside for chunk in said[:-1])
            refused = (server.chat if "chat" in path else server.complete)(stream_options=options, **fields)
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, "stream_options")


def test_usage_of_several_prompts_is_their_sum(serve: Callable[..., Server]) -> None:
    usage = serve(ScriptEngine([*byte_tokens("a"), END], cached=1)).complete(prompt=[[1, 2], [3, 4, 5]], n=2).json()["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["prompt_tokens_details"]["cached_tokens"]) == (5, 8, 2)


@pytest.mark.parametrize("path", PATHS)
def test_silence_is_filled_with_comments(serve: Callable[..., Server], path: str) -> None:
    server = serve(ScriptEngine([*byte_tokens("ab"), END], delay=0.4), sse_keep_alive=0.1)
    response = stream(server, path)
    before, _, _ = response.text.partition("data: ")
    assert before.count(": keep-alive\n\n") >= 2
    assert data_lines(response.text)[-1] == "[DONE]"
    quiet = serve(ScriptEngine([*byte_tokens("ab"), END], delay=0.2), sse_keep_alive=0)
    assert "keep-alive" not in stream(quiet, path).text


def test_hidden_reasoning_is_silence_too(serve: Callable[..., Server]) -> None:
    server = serve(ScriptEngine(byte_tokens("thinking"), delay=0.08), sse_keep_alive=0.1)
    response = stream(server, PATHS[0], reasoning_effort="high", include_reasoning=False, max_tokens=8)
    assert response.text.count(": keep-alive") >= 2
    assert "thinking" not in response.text


def test_headers_come_before_the_first_token(serve: Callable[..., Server]) -> None:
    server = serve(ScriptEngine([END], delay=1.0))
    begun = time.monotonic()
    with server.client.stream("POST", "/v1/completions", json={"prompt": "x", "stream": True}) as response:
        assert response.status_code == 200
        assert time.monotonic() - begun < 0.7
        assert server.client.get("/health").status_code == 200
        response.read()


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("after", [0, 2])
@pytest.mark.parametrize(("how", "kind"), [("error", "server_error"), ("abort", "service_unavailable")])
def test_failures_inside_a_stream(serve: Callable[..., Server], path: str, after: int, how: str, kind: str) -> None:
    server = serve(ScriptEngine(byte_tokens("abcdef"), break_after=after, break_with=how, break_reason="why it ended", delay=0.001))
    lines = data_lines(stream(server, path, n=2).text)
    assert lines[-1] == "[DONE]"
    errors = [json.loads(line)["error"] for line in lines[:-1] if "error" in json.loads(line)]
    assert len(errors) == 1
    assert json.loads(lines[-2])["error"] == errors[0]
    assert errors[0]["type"] == kind
    assert errors[0]["message"] == "why it ended"
    wait_for(lambda: not server.engine.running)
    server.engine.break_after = None
    assert server.complete(max_tokens=6).json()["choices"][0]["text"] == "abcdef"


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("streamed", [False, True])
def test_a_pause_that_gives_answers_up(serve: Callable[..., Server], path: str, streamed: bool) -> None:
    server = serve(ScriptEngine(byte_tokens("abc"), endless=True, delay=0.002, max_model_len=100_000))
    answers: list[Any] = []
    send = server.chat if "chat" in path else server.complete
    client = threading.Thread(target=lambda: answers.append(send(stream=streamed, max_tokens=50_000)))
    client.start()
    wait_for(lambda: server.engine.generated > 5)
    asyncio.run(server.engine.pause("abort", clear=True))
    client.join(10)
    [response] = answers
    lines = data_lines(response.text) if streamed else [response.text, "[DONE]"]
    error = json.loads(lines[-2])["error"]
    assert (error["code"], error["type"]) == (503, "service_unavailable")
    assert error["message"] == "the server was paused; the answer was given up"
    assert lines[-1] == "[DONE]"
    assert streamed or (response.status_code, response.headers["retry-after"]) == (503, "1")


@pytest.mark.parametrize(("how", "status"), [("error", 500), ("abort", 503)])
def test_failures_of_whole_answers(serve: Callable[..., Server], how: str, status: int) -> None:
    server = serve(ScriptEngine(byte_tokens("abcdef"), break_after=2, break_with=how))
    response = server.chat()
    assert (response.status_code, response.json()["error"]["code"]) == (status, status)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("streamed", [False, True])
def test_refusals_come_before_the_stream_and_leave_nothing_behind(serve: Callable[..., Server], path: str, streamed: bool) -> None:
    server = serve(ScriptEngine(byte_tokens("ab"), delay=0.05, refuse={1: QueueFullError("256 requests wait; try again later")}))
    response = (server.chat if "chat" in path else server.complete)(n=3, stream=streamed)
    assert response.status_code == 429
    assert response.headers["retry-after"] == "1"
    assert response.json()["error"]["type"] == "rate_limit_error"
    assert [len(batch) for batch in server.engine.batches] == [3], "the choices are admitted together or not at all"
    assert not server.engine.running
    dead = serve(ScriptEngine(refuse={1: EngineUnavailableError("the engine is dead")}))
    assert (dead.chat(stream=streamed).status_code, dead.chat(model="absent").status_code) == (503, 404)


def test_an_engine_that_says_nothing_more_is_an_error(serve: Callable[..., Server]) -> None:
    response = serve(ScriptEngine([])).complete()
    assert response.status_code == 500
    assert "without saying why" in response.json()["error"]["message"]


def test_a_slow_reader_gets_everything(serve: Callable[..., Server]) -> None:
    engine = ScriptEngine(byte_tokens("abcdefgh"), endless=True, max_model_len=100_000)
    server = serve(engine)
    with server.client.stream("POST", "/v1/completions", json={"prompt": "x", "stream": True, "max_tokens": 30_000}) as response:
        # The engine is not slowed down by a client that reads nothing.
        wait_for(lambda: not engine.running, 20)
        text = "".join(response.iter_text())
    lines = data_lines(text)
    assert "".join(json.loads(line)["choices"][0]["text"] for line in lines[:-1]) == "abcdefgh" * 3750
    assert len(lines) < 20_000, "what waited was merged"

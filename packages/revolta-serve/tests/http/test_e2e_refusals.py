"""What a real server refuses, and clients that leave it: nothing of them stays, and the next answer is what it was before."""

import json
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from revolta_serve.testing import RunningServer, running_server
from revolta_serve.weights.tiny import make_tiny
from support.wire import IDLE, Wire, get, in_use, metrics, post, wait_until_idle

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
LIMIT = 2048
BODY_LIMIT = 1 << 20
JSON = {"content-type": "application/json"}
SLOTS = 2


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    directory = tmp_path_factory.mktemp("model") / "tiny"
    make_tiny(directory, layers=4)
    settings = {
        "schedule.max_model_len": LIMIT, "schedule.max_num_seqs": SLOTS, "api.max_request_bytes": BODY_LIMIT,
        "engine.heartbeat_interval": 0.1, "schedule.max_queue": 4,
    }  # fmt: skip
    with running_server(directory, settings) as running:
        yield running


def normal(server: RunningServer) -> list[Any]:
    """The answers to a request of each route, sampled with a seed, without what always differs."""
    answers = []
    for path, fields in ((COMPLETIONS, {"prompt": "Once"}), (CHAT, {"messages": [{"role": "user", "content": "hi"}]})):
        body = {**fields, "max_tokens": 6, "seed": 5, "temperature": 1, "n": 2, "return_token_ids": True}
        answer = post(server.url, path, body).json()
        answers.append([answer["choices"], answer["usage"]])
    return answers


def refused(server: RunningServer, path: str, body: bytes, headers: dict[str, str] = JSON) -> tuple[int, dict[str, Any]]:
    """(status, error object) of a request that must be refused in OpenAI's form."""
    response = post(server.url, path, body, headers)
    assert response.headers["content-type"] == "application/json", response.text
    assert 400 <= response.status_code < 500, response.text
    [(key, error)] = response.json().items()
    assert key == "error"
    assert set(error) == {"message", "type", "param", "code"}
    assert isinstance(error["message"], str)
    assert 0 < len(error["message"]) < 600
    return response.status_code, error


def of(status: int, param: str | None, code: str | int = 400) -> tuple[int, str | None, str | int]:
    """What an error must say."""
    return status, param, code


FIELDS: list[tuple[str, Any, tuple[int, str | None, str | int]]] = [
    ("temperature", "hot", of(400, "temperature")),
    ("temperature", -0.1, of(400, "temperature")),
    ("temperature", 10**400, of(400, "temperature")),
    ("top_p", True, of(400, "top_p")),
    ("top_k", 2**64, of(400, "top_k")),
    ("seed", 2**63, of(400, "seed")),
    ("n", 0, of(400, "n")),
    ("n", 10**9, of(400, "n")),
    ("stop", ["a", 5], of(400, "stop[1]")),
    ("stop_token_ids", [0, -1], of(400, "stop_token_ids[1]")),
    ("max_tokens", 10**30, of(400, "max_tokens", "context_length_exceeded")),
    ("max_tokens", LIMIT, of(400, "max_tokens", "context_length_exceeded")),
    ("stream_options", [], of(400, "stream_options")),
    ("model", "absent", of(404, "model", "model_not_found")),
    ("model", ["tiny"], of(400, "model")),
    ("logit_bias", {"1": "much"}, of(400, "logit_bias.1")),
    ("repetition_penalty", 99, of(400, "repetition_penalty")),
    ("min_tokens", LIMIT, of(400, "min_tokens")),
    ("allowed_token_ids", [], of(400, "allowed_token_ids")),
    ("bad_words", ["x", ""], of(400, "bad_words[1]")),
    ("prompt_logprobs", 21, of(400, "prompt_logprobs")),
    ("priority", 1, of(400, "priority", "unsupported_parameter")),
    ("guided_regex", "a*", of(400, "guided_regex", "unsupported_parameter")),
]
PROMPTS: list[tuple[str, str, Any, tuple[int, str | None, str | int]]] = [
    (CHAT, "messages", [], of(400, "messages")),
    (CHAT, "messages", None, of(400, "messages")),
    (CHAT, "messages", [{"role": "user", "content": "x"}, {"role": "user", "content": {"a": 1}}], of(400, "messages[1].content")),
    (CHAT, "messages", [{"role": "user", "content": "long " * LIMIT}], of(400, "messages", "context_length_exceeded")),
    (CHAT, "tools", [{"type": "function", "function": {"name": 5}}], of(400, "tools[0].function.name")),
    (COMPLETIONS, "prompt", "", of(400, "prompt")),
    (COMPLETIONS, "prompt", [1] * LIMIT, of(400, "prompt", "context_length_exceeded")),
    (COMPLETIONS, "prompt", ["fits", "long " * LIMIT], of(400, "prompt[1]", "context_length_exceeded")),
    (COMPLETIONS, "prompt", [1, 10**25], of(400, "prompt[1]")),
    (COMPLETIONS, "prompt", [[1], [1.5]], of(400, "prompt[1][0]")),
]
DEEP = 10_000
RAW: list[tuple[str, str | None]] = [
    ('{"temperature": NaN, %s}', "temperature"),
    ('{"top_p": -Infinity, %s}', "top_p"),
    ('{"temperature": 1e999, %s}', "temperature"),
    ('{"user": "\\ud800", %s}', "user"),
    ('{"metadata": {"a": ["\\udfff x"]}, %s}', "metadata.a[0]"),
    ('{"metadata": ' + '{"a":' * DEEP + "1" + "}" * DEEP + ", %s}", None),
    ("[" * DEEP + "]" * DEEP, None),
    ('{"temperature": 0, %s', None),
    ("{%s}{}", None),
    ("[{%s}]", None),
    ("", None),
    ("\x00", None),
]
BASE: dict[str, dict[str, Any]] = {CHAT: {"messages": [{"role": "user", "content": "hi"}]}, COMPLETIONS: {"prompt": "hi"}}


def bad_bodies(path: str, stream: bool) -> Iterator[tuple[bytes, tuple[int, str | None, str | int]]]:
    """Every malformed body for a route and what its error must say."""
    for name, value, expected in FIELDS + [(name, value, expected) for to, name, value, expected in PROMPTS if to == path]:
        yield json.dumps({"stream": stream, **BASE[path], name: value}).encode(), expected
    inside = json.dumps({"stream": stream, **BASE[path]})[1:-1]
    for text, param in RAW:
        yield text.replace("%s", inside).encode(), of(400, param)
    yield json.dumps({"stream": stream, **BASE[path]}).encode().replace(b"hi", b"\xff"), of(400, None)


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("stream", [False, True])
def test_malformed_requests_leave_no_trace(server: RunningServer, path: str, stream: bool) -> None:
    before, answers = metrics(server.url), normal(server)
    computed = metrics(server.url)
    for body, (status, param, code) in bad_bodies(path, stream):
        said, error = refused(server, path, body)
        assert (said, error["param"], error["code"]) == (status, param, code), (body[:200], error)
    after = metrics(server.url)
    for name in ("engine_steps_total", "prompt_tokens_total", "generation_tokens_total"):
        assert after[name] == computed[name] > before[name], "nothing was computed for any of them"
    assert not in_use(server.url)
    assert normal(server) == answers


def test_wrong_types_and_sizes_of_bodies(server: RunningServer) -> None:
    answers = normal(server)
    body = json.dumps(BASE[COMPLETIONS]).encode()
    for media in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", ""):
        status, error = refused(server, COMPLETIONS, body, {"content-type": media})
        assert (status, error["code"]) == (415, 415)
    large = b'{"stream": true, "prompt": "' + b"x" * BODY_LIMIT + b'"}'
    for path in (CHAT, COMPLETIONS):
        status, error = refused(server, path, large)
        assert (status, error["code"]) == (413, 413)
        assert str(BODY_LIMIT) in error["message"]
    status, error = refused(server, "/v1/no/such/route", body)
    assert (status, error["type"]) == (404, "not_found_error")
    assert get(server.url, CHAT).status_code == 405
    assert not in_use(server.url)
    assert normal(server) == answers


def test_what_is_no_http_ends_its_own_connection_only(server: RunningServer) -> None:
    host, port = server.url.removeprefix("http://").split(":")
    for garbage in (b"\x16\x03\x01\x02\x00\x01\x00", b"GET\r\n\r\n", b"POST / HTTP/9.9\r\n\r\n", b"\x00" * 1000):
        with socket.create_connection((host, int(port)), timeout=5) as connection:
            connection.sendall(garbage)
            assert b" 200 " not in connection.recv(1000)
    assert get(server.url, "/health").status_code == 200


LONG: dict[str, Any] = {"prompt": [5, 6, 7], "max_tokens": 2000, "ignore_eos": True, "temperature": 1}


def until(server: RunningServer, running: int, waiting: int) -> None:
    """Wait until so many requests run and wait."""
    deadline = time.monotonic() + 5
    while (now := [metrics(server.url)[name] for name in IDLE[:2]]) != [running, waiting]:
        assert time.monotonic() < deadline, f"running and waiting: {now}"
        time.sleep(0.01)


LEAVERS: dict[str, tuple[list[dict[str, Any]], int, int]] = {
    "a stream": ([{"stream": True}], 1, 0),
    "a whole answer": ([{}], 1, 0),
    "a stream with choices that wait": ([{"stream": True, "n": 4}], 2, 2),
    "a long prompt": ([{"prompt": [9] * 40, "stream": True}], 1, 0),
    "all of a full server": ([{"stream": True}, {}, {}, {"stream": True}], 2, 2),
}


@pytest.mark.parametrize("name", LEAVERS)
def test_who_leaves_frees_everything(server: RunningServer, name: str) -> None:
    requests, running, waiting = LEAVERS[name]
    answers, before = normal(server), metrics(server.url)
    with ExitStack() as stack:
        for fields in requests:
            stack.enter_context(Wire(server.url, COMPLETIONS, {**LONG, **fields}))
        until(server, running, waiting)
        assert set(in_use(server.url)) >= {"kv_blocks_used", "state_slots_used"}
    wait_until_idle(server.url, 2)
    after = metrics(server.url)
    assert after["client_disconnects_total"] - before["client_disconnects_total"] == len(requests)
    assert after["generation_tokens_total"] - before["generation_tokens_total"] < LONG["max_tokens"], "it was given up, not finished"
    assert normal(server) == answers


@pytest.mark.parametrize("stream", [False, True])
def test_who_leaves_with_more_requests_behind_the_first(server: RunningServer, stream: bool) -> None:
    """A connection has been read ahead of the answer that is under way: the client's end is behind all of that."""
    body = json.dumps({**LONG, "stream": stream}).encode()
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    before = metrics(server.url)
    host, port = server.url.removeprefix("http://").split(":")
    for behind in (b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n", head.encode() + body):
        with socket.create_connection((host, int(port)), timeout=5) as connection:
            connection.sendall(head.encode() + body)
            until(server, 1, 0)
            connection.sendall(behind)
            time.sleep(0.02)
        wait_until_idle(server.url, 2)
    after = metrics(server.url)
    assert after["client_disconnects_total"] - before["client_disconnects_total"] == 2
    assert after["generation_tokens_total"] - before["generation_tokens_total"] < LONG["max_tokens"]
    assert "Traceback" not in server.log()


@pytest.mark.parametrize("stream", [False, True])
def test_who_leaves_the_queue_does_not_disturb_who_runs(server: RunningServer, stream: bool) -> None:
    with ExitStack() as stack:
        first = [stack.enter_context(Wire(server.url, COMPLETIONS, {**LONG, "stream": True})) for _ in range(SLOTS)]
        until(server, SLOTS, 0)
        used = metrics(server.url)
        with Wire(server.url, COMPLETIONS, {**LONG, "stream": stream}) as queued:
            until(server, SLOTS, 1)
            queued.receive(0.05)
            assert queued.body == b"", "nothing has been computed for it"
        until(server, SLOTS, 0)
        assert metrics(server.url)["state_slots_used"] == used["state_slots_used"] == SLOTS
        length = len(first[0].receive(0.02))
        assert len(first[0].receive(0.3)) > length, "the others go on"
    wait_until_idle(server.url, 2)


def test_a_full_queue_is_429_before_any_stream(server: RunningServer) -> None:
    with ExitStack() as stack:
        for _ in range(3):
            stack.enter_context(Wire(server.url, COMPLETIONS, {**LONG, "n": 2, "stream": True}))
        until(server, SLOTS, 4)
        for stream in (False, True):
            response = post(server.url, COMPLETIONS, {**LONG, "stream": stream})
            assert (response.status_code, response.json()["error"]["type"]) == (429, "rate_limit_error")
            assert response.headers["retry-after"] == "1"
        for fields in ({"n": 2}, {"prompt": [[5], [6], [7]]}, {"n": 6}):
            assert post(server.url, COMPLETIONS, {**LONG, **fields}).status_code == 429
        assert metrics(server.url)["num_requests_waiting"] == 4, "nothing of a refused request is in the queue"
        error = post(server.url, COMPLETIONS, {**LONG, "n": 7}).json()["error"]
        assert (error["code"], error["param"]) == (400, "n"), "this never fits"
    wait_until_idle(server.url, 2)


def test_all_choices_or_none(server: RunningServer) -> None:
    """One place is left in the queue: two choices are refused together, one is taken."""
    with ExitStack() as stack:
        for fields in ({"n": 2}, {"n": 3}):
            stack.enter_context(Wire(server.url, COMPLETIONS, {**LONG, **fields, "stream": True}))
            until(server, SLOTS, 0 if fields["n"] == 2 else 3)
        before = metrics(server.url)
        assert post(server.url, COMPLETIONS, {**LONG, "prompt": [[5], [6]]}).status_code == 429
        assert post(server.url, CHAT, {"messages": [{"role": "user", "content": "x"}], "n": 2}).status_code == 429
        now = metrics(server.url)
        assert {name: now[name] for name in IDLE[:2]} == {name: before[name] for name in IDLE[:2]}
        stack.enter_context(Wire(server.url, COMPLETIONS, {**LONG, "stream": True}))
        until(server, SLOTS, 4)
    wait_until_idle(server.url, 2)


def test_many_who_leave_at_any_moment(server: RunningServer) -> None:
    """Before the body is read, while it is checked, in the queue, in the first step: whenever it hits."""
    answers = normal(server)
    for moment in range(30):
        fields = {**LONG, "stream": moment % 2 == 0, "n": 1 + moment % 3}
        with Wire(server.url, COMPLETIONS, fields) as wire:
            wire.receive(0.0007 * moment)
    wait_until_idle(server.url, 2)
    assert normal(server) == answers

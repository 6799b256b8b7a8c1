"""A body of 15 MiB, whatever is in it, holds up nobody but its own client."""

import json
import threading
import time
from collections.abc import Iterator

import httpx
import pytest

from revolta_serve.api.json_bounds import MAX_CONTAINERS, MAX_KEYS, MAX_VALUES
from support.script_engine import ScriptEngine, Server, serving
from support.text import byte_tokens, tokenizer

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
SIZE = 15 << 20
LIMIT = 512
SECONDS = 1.0
"""A few hundredths when nothing else runs. Decoded where others wait, the worst of these take several seconds."""


def fill(unit: bytes, size: int = SIZE) -> bytes:
    return unit * (size // len(unit))


def chat(role: str, text: bytes) -> bytes:
    return b'{"messages":[{"role":"%s","content":"%s"}],"max_tokens":1}' % (role.encode(), text)


REST = b'"prompt":"x","max_tokens":1}'
TOO_LONG, TOO_MUCH = "context_length_exceeded", "intricate"
BODIES: dict[str, tuple[str, bytes, str]] = {
    "lists": (COMPLETIONS, b'{"metadata":[' + fill(b"[],") + b"[]]," + REST, TOO_MUCH),
    "nested": (COMPLETIONS, b'{"metadata":' + fill(b"[") + REST, "nested too deeply"),
    "nested in turns": (COMPLETIONS, b'{"metadata":' + fill(b'{"":[') + REST, "nested too deeply"),
    "names": (COMPLETIONS, b'{"metadata":{' + b",".join(b'"%x":1' % n for n in range(1_200_000)) + b"}," + REST, TOO_MUCH),
    "ids": (COMPLETIONS, b'{"prompt":[' + fill(b"100000,") + b"1]}", TOO_LONG),
    "short ids": (COMPLETIONS, b'{"prompt":[' + fill(b"1,") + b"1]}", TOO_MUCH),
    "lists of ids": (COMPLETIONS, b'{"prompt":[[' + fill(b"100000,") + b"1],[1]]}", TOO_LONG),
    "prompts": (COMPLETIONS, b'{"prompt":[' + fill(b'"ab",') + b'"a"]}', "answers"),
    "numbers": (COMPLETIONS, b'{"prompt":[' + fill(b"9" * 4000 + b",") + b"1]}", TOO_LONG),
    "text": (COMPLETIONS, b'{"prompt":"' + fill(b"word ") + b'"}', TOO_LONG),
    "a word": (COMPLETIONS, b'{"prompt":"' + fill(b"x") + b'"}', TOO_LONG),
    "escapes": (COMPLETIONS, b'{"prompt":"' + fill(b'\\"\\\\') + b'"}', TOO_LONG),
    "no JSON": (COMPLETIONS, b'{"prompt":"' + fill(b"x"), "not valid JSON"),
    "not finite": (COMPLETIONS, b'{"prompt":"' + fill(b"x", 1_000_000) + b'","top_p":NaN}', "top_p"),
    "a message": (CHAT, chat("user", fill(b"word ")), TOO_LONG),
    "a message of lines": (CHAT, chat("system", fill(b"x\\n")), TOO_LONG),
    "a message of tokens": (CHAT, chat("user", fill(b"<|im_start|>")), TOO_LONG),
    "messages": (CHAT, json.dumps({"messages": [{"role": "user", "content": "xy"}] * 30_000}).encode(), TOO_LONG),
}


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving(ScriptEngine(byte_tokens("ok"), max_model_len=LIMIT)) as running:
        yield running


def worst_wait(server: Server, path: str, body: bytes) -> tuple[float, httpx.Response]:
    """The longest that /health took while a body was read and answered, in seconds, and the answer."""
    waits: list[float] = []
    done = threading.Event()

    def probe() -> None:
        with httpx.Client(base_url=server.url, timeout=60, trust_env=False) as client:
            while not waits or not done.wait(0.005):
                began = time.monotonic()
                assert client.get("/health").status_code == 200
                waits.append(time.monotonic() - began)

    other = threading.Thread(target=probe)
    other.start()
    try:
        response = server.client.post(path, content=body, headers={"content-type": "application/json"}, timeout=60)
    finally:
        done.set()
        other.join()
    return max(waits), response


@pytest.mark.parametrize("name", BODIES)
def test_nobody_waits_for_a_large_body(server: Server, name: str) -> None:
    path, body, reason = BODIES[name]
    before = len(server.engine.requests)
    worst, response = worst_wait(server, path, body)
    assert response.status_code == 400
    assert reason in response.text
    assert len(response.text) < 1000
    assert len(server.engine.requests) == before
    if worst >= SECONDS:  # a machine that is busy with something else is so twice less often than once
        worst, _ = worst_wait(server, path, body)
    assert worst < SECONDS


# Of the body itself: one object, three names.
@pytest.mark.parametrize(
    ("metadata", "status"),
    [
        ("[" + "[]," * (MAX_CONTAINERS - 2) + "1]", 200),
        ("[" + "[]," * (MAX_CONTAINERS - 1) + "1]", 400),
        ("{" + ",".join(f'"{n}":1' for n in range(MAX_KEYS - 3)) + "}", 200),
        ("{" + ",".join(f'"{n}":1' for n in range(MAX_KEYS - 2)) + "}", 400),
        ("[" + "1," * (MAX_VALUES - 3) + "1]", 200),
        ("[" + "1," * (MAX_VALUES - 1) + "1]", 400),
        ('"' + "[{:," * 1_000_000 + '\\"' + "[" * 1000 + '"', 200),
    ],
    ids=["lists", "too many lists", "names", "too many names", "values", "too many values", "a text of signs"],
)
def test_the_bounds_of_json(server: Server, metadata: str, status: int) -> None:
    body = f'{{"metadata":{metadata},"prompt":"x","max_tokens":1}}'.encode()
    response = server.client.post(COMPLETIONS, content=body, headers={"content-type": "application/json"})
    assert response.status_code == status, response.text[:500]


def test_what_fits_by_its_length_is_still_encoded(server: Server) -> None:
    """The bound on characters never refuses what encoding would have allowed."""
    longest = max((tokenizer().token_bytes(token) for token in range(tokenizer().size)), key=len).decode()
    answer = server.complete(prompt=longest * (LIMIT - 1), max_tokens=1).json()
    assert answer["usage"]["prompt_tokens"] == LIMIT - 1

"""A stream shows each token's text as soon as the token exists: the engine is held after every single step and the client looked at."""

import codecs
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from tokenizers import Tokenizer

from revolta_serve.testing import RunningServer, running_server, scripted_checkpoint
from revolta_serve.text.tokenizer import byte_alphabet
from support.wire import Wire, get, payloads, post, wait_until_idle

FAMILY = "👨\u200d👩\u200d👧"
REASONING = f"é{FAMILY}"
CONTENT = f"SO STOLE{FAMILY}e\u0301 STOSTOP after"
STOP = "STOP"
PROMPT = "Say it:"
KEEP_ALIVE = 0.15
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "reasoning_effort": "high"}
PLAIN: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 200}


@dataclass
class Held:
    """A server that can be held between steps, and the bytes of each token it will say (empty for a control token)."""

    server: RunningServer
    tokens: list[bytes]
    think: int
    """Index of </think>."""


@pytest.fixture(scope="module")
def held(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Held]:
    directory = tmp_path_factory.mktemp("scripted")
    emitted = scripted_checkpoint(directory, f"{REASONING}</think>\n\n{CONTENT}", prompts=[PROMPT], bytewise=True)
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    byte = byte_alphabet()
    spelling, control = {token: text for text, token in tokenizer.get_vocab().items()}, tokenizer.get_added_tokens_decoder()
    tokens = [b"" if token in control else bytes(byte[char] for char in spelling[token]) for token in emitted]
    with running_server(directory, {"api.sse_keep_alive": KEEP_ALIVE}, pausable=True) as server:
        yield Held(server, tokens, emitted.index(tokenizer.token_to_id("</think>")))


@pytest.fixture(autouse=True)
def _let_it_go(held: Held) -> Iterator[None]:
    """A test that fails leaves no gate closed for the next one."""
    yield
    held.server.resume()
    wait_until_idle(held.server.url)


def complete(raw: bytes) -> str:
    """The characters of `raw` but for an unfinished one at its end."""
    return codecs.getincrementaldecoder("utf-8")("strict").decode(raw)


def visible(text: str, stop: str) -> str:
    """What may be shown of a text that goes on: not the end of it that `stop` may begin with."""
    if stop in text:
        return text[: text.index(stop)]
    hidden = max(count for count in range(len(stop)) if text.endswith(stop[:count]))
    return text[: len(text) - hidden]


def shown(body: bytes) -> tuple[str, str]:
    """(reasoning, content) in a stream so far."""
    choices = [choice for event in payloads(body) if event != "[DONE]" for choice in event.get("choices", ())]
    deltas = [choice["delta"] if "delta" in choice else {"content": choice["text"]} for choice in choices]
    return "".join(delta.get("reasoning", "") for delta in deltas), "".join(delta.get("content", "") for delta in deltas)


def spoken(held: Held, steps: int, chat: bool) -> tuple[str, str]:
    """(reasoning, content) of so many tokens, from their bytes alone."""
    tokens = held.tokens[:steps]
    if not chat:
        return "", complete(b"".join(b"</think>" if index == held.think else token for index, token in enumerate(tokens)))
    return complete(b"".join(tokens[: held.think])), complete(b"".join(tokens[held.think :])).removeprefix("\n").removeprefix("\n")


def after(held: Held, steps: int, chat: bool, stop: str) -> tuple[str, str]:
    """What a client must have got after so many tokens."""
    reasoning, content = spoken(held, steps, chat)
    return reasoning, visible(content, stop)


@pytest.mark.parametrize("stop", [STOP, "never said"])
@pytest.mark.parametrize("chat", [True, False], ids=["chat", "completions"])
def test_after_every_step_the_client_has_its_text(held: Held, chat: bool, stop: str) -> None:
    server = held.server
    path, fields = ("/v1/chat/completions", CHAT) if chat else ("/v1/completions", PLAIN)
    whole = after(held, len(held.tokens), chat, stop)
    first, silent, seen = server.steps, 0, ("", "")
    server.pause_after(0)
    with Wire(server.url, path, {**fields, "stream": True, "stop": stop}) as wire:
        for steps in range(1, len(held.tokens)):
            server.wait_until_paused()
            assert server.steps - first == steps - 1
            server.pause_after(1)
            if stop in spoken(held, steps, chat)[1]:
                # Held or not: the client's end of the answer needs no further token.
                wire.finish(2)
                break
            server.wait_until_paused()
            expected = after(held, steps, chat, stop)
            shows(wire, expected, f"after {steps} steps")
            silent, seen = silent + (expected == seen), expected
        assert wire.ended == (stop == STOP)
        server.resume()
        body = wire.finish()
    assert shown(body) == whole
    assert payloads(body)[-1] == "[DONE]"
    assert silent > 15, "characters came in pieces and text was held back"


def shows(wire: Wire, expected: tuple[str, str], when: str) -> None:
    """Wait until the client has these texts; it may not get more than them."""
    deadline = time.monotonic() + 2
    while shown(wire.receive(0.005)) != expected and time.monotonic() < deadline:
        pass
    assert shown(wire.body) == expected, when


@pytest.mark.parametrize("steps", [1, 5, 17, 30])
def test_a_stream_held_after_some_steps_goes_on_to_the_end(held: Held, steps: int) -> None:
    server = held.server
    server.pause_after(steps)
    with Wire(server.url, "/v1/chat/completions", {**CHAT, "stream": True, "return_token_ids": True}) as wire:
        server.wait_until_paused()
        shows(wire, after(held, steps, True, "\0"), f"held after {steps} steps")
        server.resume()
        events = payloads(wire.finish())
    choices = [event["choices"][0] for event in events[:-1]]
    assert shown(wire.body) == (REASONING, CONTENT)
    assert sum(len(choice.get("token_ids", ())) for choice in choices) == len(held.tokens)
    assert choices[-1]["finish_reason"] == "stop"


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_the_bytes_of_a_stream(held: Held, path: str) -> None:
    """Headers before any token, comments while the engine is held, then events of one line and an empty one each."""
    server, fields = held.server, CHAT if "chat" in path else PLAIN
    server.pause_after(0)
    with Wire(server.url, path, {**fields, "stream": True, "stream_options": {"include_usage": True}}) as wire:
        server.wait_until_paused()
        wire.receive(3.5 * KEEP_ALIVE)
        assert wire.status == 200
        assert wire.headers["content-type"] == "text/event-stream; charset=utf-8"
        assert wire.headers["cache-control"] == "no-cache"
        assert wire.headers["x-accel-buffering"] == "no"
        assert wire.headers["transfer-encoding"] == "chunked"
        comments = wire.receive_until(b": keep-alive\n\n" * 2)
        assert comments == b": keep-alive\n\n" * (len(comments) // 14)
        assert get(server.url, "/health").status_code == 200, "held is not dead"
        server.resume()
        body = wire.finish()
    events = body[len(comments) :].split(b"\n\n")
    assert events[-2:] == [b"data: [DONE]", b""]
    assert all(event.startswith(b"data: {") and event.endswith(b"}") and b"\n" not in event for event in events[:-2] if event[:1] != b":")
    assert b"\r" not in body
    objects = payloads(body)[:-1]
    assert len({event["id"] for event in objects}) == len({event["created"] for event in objects}) == 1
    assert objects[-1]["choices"] == []
    assert objects[-1]["usage"]["completion_tokens"] == len(held.tokens)


def test_a_failed_step_is_an_error_of_its_requests_only(held: Held) -> None:
    server = held.server
    server.pause_after(3)
    with Wire(server.url, "/v1/completions", {**PLAIN, "stream": True}) as wire:
        server.wait_until_paused()
        shown_before = shown(wire.receive_until(b"data: "))
        server.fail_step()
        server.resume()
        events = payloads(wire.finish())
    assert shown_before[1] == REASONING[:1]
    assert events[-1] == "[DONE]"
    assert events[-2]["error"]["code"] == 500
    server.fail_step()
    whole = post(server.url, "/v1/completions", PLAIN)
    assert (whole.status_code, whole.json()["error"]["type"]) == (500, "server_error")
    for error in (events[-2]["error"], whole.json()["error"]):
        assert error["message"] == "the engine failed in a step; the server's log has the reason"
    assert "injected fault" in server.log()
    assert post(server.url, "/v1/completions", PLAIN).json()["choices"][0]["text"] == f"{REASONING}</think>\n\n{CONTENT}"

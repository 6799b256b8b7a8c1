"""Reasoning over HTTP: where it starts comes from the prompt that was sent."""

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from revolta_serve.text.reasoning import ThinkTokens
from support.script_engine import ScriptEngine, Server, data_lines, serving
from support.text import byte_tokens, tokenizer

THINK = ThinkTokens(tokenizer())
END = tokenizer().added["<|im_end|>"]
ANSWER = [*byte_tokens("hm"), THINK.close, *byte_tokens("\n\nyes </"), *byte_tokens("think>"), THINK.close, *byte_tokens("!"), END]


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving(ScriptEngine(ANSWER)) as running:
        yield running


def message(server: Server, **fields: Any) -> tuple[Any, Any]:
    """(content, reasoning) of a whole answer; checks that the stream says the same."""
    whole = server.chat(**fields).json()["choices"][0]
    assert whole["message"]["reasoning"] == whole["message"]["reasoning_content"]
    stream = data_lines(server.chat(stream=True, **fields).text)
    deltas = [choice["delta"] for line in stream[:-1] for choice in json.loads(line)["choices"]]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert "".join(delta.get("content", "") for delta in deltas) == (whole["message"]["content"] or "")
    for name in ("reasoning", "reasoning_content"):
        assert "".join(delta.get(name, "") for delta in deltas) == (whole["message"][name] or "")
    return whole["message"]["content"], whole["message"]["reasoning"]


ON = ("yes </think></think>!", "hm")
OFF = ("hm</think>\n\nyes </think></think>!", None)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, OFF),
        ({"reasoning_effort": "none"}, OFF),
        ({"reasoning_effort": None}, OFF),
        ({"reasoning_effort": "low"}, ON),
        ({"chat_template_kwargs": {"enable_thinking": True}}, ON),
        ({"chat_template_kwargs": {"enable_thinking": False}, "reasoning_effort": "high"}, OFF),
        ({"chat_template_kwargs": {"enable_thinking": True}, "reasoning_effort": "none"}, ON),
        ({"reasoning_effort": "max", "include_reasoning": False}, (ON[0], None)),
    ],
)
def test_thinking_on_and_off(server: Server, fields: dict[str, Any], expected: tuple[Any, Any]) -> None:
    assert message(server, **fields) == expected


def test_a_continued_message_is_content_whatever_thinking_says(server: Server) -> None:
    for thinking in (True, False):
        messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "The answer is "}]
        fields = {
            "messages": messages,
            "continue_final_message": True,
            "add_generation_prompt": False,
            "chat_template_kwargs": {"enable_thinking": thinking},
        }
        assert message(server, **fields) == OFF
        ids = server.engine.requests[-1].prompt
        assert tokenizer().decode(ids).endswith("<think>\n\n</think>\n\nThe answer is ")
        assert server.post("/tokenize", fields).json()["tokens"] == list(ids)


def test_a_prefill_with_closed_reasoning(server: Server) -> None:
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "<think>done</think>so"}]
    assert message(server, messages=messages, continue_final_message=True)[1] is None
    assert tokenizer().decode(server.engine.requests[-1].prompt).endswith("<think>\ndone\n</think>\n\nso")


@pytest.mark.parametrize(
    ("messages", "fields"),
    [
        ([{"role": "assistant", "content": "x"}], {"add_generation_prompt": True}),
        ([{"role": "assistant", "tool_calls": [{"function": {"name": "f"}}]}], {}),
        ([{"role": "user", "content": "x"}], {}),
        ([{"role": "system", "content": "x-anthropic-billing-header: 1"}], {}),
    ],
)
def test_what_cannot_be_continued(server: Server, messages: list[Any], fields: dict[str, Any]) -> None:
    response = server.chat(messages=messages, continue_final_message=True, **fields)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "continue_final_message")


def test_cut_in_reasoning(serve: Callable[..., Server]) -> None:
    server = serve(ScriptEngine(byte_tokens("thinking...")))
    answer = server.chat(reasoning_effort="high", max_tokens=5).json()
    choice = answer["choices"][0]
    assert (choice["message"]["content"], choice["message"]["reasoning"], choice["finish_reason"]) == (None, "think", "length")
    assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] == 5


def test_reasoning_tokens_are_counted_even_when_hidden(server: Server) -> None:
    for include in (True, False):
        usage = server.chat(reasoning_effort="high", include_reasoning=include).json()["usage"]
        assert usage["completion_tokens_details"]["reasoning_tokens"] == 2
        assert usage["completion_tokens"] == len(ANSWER)


def test_completions_do_not_split(server: Server) -> None:
    choice = server.complete(prompt="<think>", max_tokens=100).json()["choices"][0]
    assert choice["text"] == "hm</think>\n\nyes </think></think>!"

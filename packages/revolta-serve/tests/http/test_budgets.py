"""Budgets, efforts and defaults by every name that clients use, and conversations of an unusual form."""

from typing import Any

import pytest

from support.refusals import CHAT, COMPLETIONS, body, check
from support.script_engine import Server
from support.text import defaults, tokenizer

NAMES = ("max_tokens", "max_completion_tokens")


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_budgets(shared: Server, path: str) -> None:
    limit = shared.engine.max_model_len
    for fields, budget in (
        ({"max_tokens": 7}, 7),
        ({"max_completion_tokens": 7}, 7),
        ({"max_tokens": 7, "max_completion_tokens": 7}, 7),
        ({"max_tokens": None, "max_completion_tokens": 7}, 7),
        ({}, None),
        ({"max_tokens": None, "max_completion_tokens": None}, None),
    ):
        assert shared.post(path, body(path, **fields)).status_code == 200
        request = shared.engine.requests[-1]
        assert request.max_tokens == (budget or (16 if path == COMPLETIONS else limit - len(request.prompt)))


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_two_budgets(shared: Server, path: str) -> None:
    raw = b'{"prompt": "x", "messages": [{"role": "user", "content": "x"}], "max_tokens": 5, "max_completion_tokens": 6}'
    error = check(shared, path, raw, NAMES[path == CHAT])
    for word in ("max_tokens 5", "max_completion_tokens 6"):
        assert word in error["message"]


@pytest.mark.parametrize("effort", ["none", "minimal", "low", "medium", "high", "xhigh", "max", None])
def test_efforts(shared: Server, effort: str | None) -> None:
    assert shared.chat(reasoning_effort=effort).status_code == 200
    text = tokenizer().decode(shared.engine.requests[-1].prompt)
    assert text.endswith("<think>\n\n</think>\n\n" if effort in ("none", None) else "assistant\n<think>\n")


def test_an_unknown_effort(shared: Server) -> None:
    check(shared, CHAT, b'{"messages": [{"role": "user", "content": "x"}], "reasoning_effort": "x"}', "reasoning_effort")


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize(
    ("fields", "temperature", "top_k"),
    [
        ({}, 0.6, 20),
        ({"temperature": None, "top_k": None}, 0.6, 20),
        ({"temperature": 0}, 0.0, 20),
        ({"temperature": 1, "top_k": 0}, 1.0, 0),
        ({"top_k": -1}, 0.6, 0),
    ],
)
def test_the_request_before_the_checkpoint(shared: Server, path: str, fields: dict[str, Any], temperature: float, top_k: int) -> None:
    assert (defaults().temperature, defaults().top_k) == (0.6, 20)
    assert shared.post(path, body(path, **fields)).status_code == 200
    sampling = shared.engine.requests[-1].sampling
    assert (sampling.temperature, sampling.top_k) == (temperature, top_k)


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "system", "content": "s"}],
        [{"role": "system", "content": ""}],
        [{"role": "user", "content": "u"}, {"role": "assistant", "content": "a"}],
        [{"role": "assistant", "content": "a"}],
        [{"role": "tool", "content": "t"}],
    ],
)
def test_conversations_without_a_question(shared: Server, messages: list[Any]) -> None:
    for stream in (False, True):
        response = shared.chat(messages=messages, stream=stream)
        assert response.status_code == 200, response.text
    assert shared.engine.requests[-1].boundaries[-1] == len(shared.engine.requests[-1].prompt)

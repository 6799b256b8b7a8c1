"""Prompt and answer must fit: what is said, and what is cut to fit."""

from typing import Any

import pytest

from support.script_engine import Server

LIMIT = 512


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prompt", [LIMIT, LIMIT + 1, 3 * LIMIT])
def test_a_prompt_that_leaves_no_room(shared: Server, prompt: int, stream: bool) -> None:
    response = shared.complete(prompt=[1] * prompt, stream=stream)
    error = response.json()["error"]
    assert (response.status_code, error["code"], error["param"]) == (400, "context_length_exceeded", "prompt")
    assert f"maximum context length is {LIMIT} tokens" in error["message"]
    assert f"{prompt} tokens" in error["message"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_the_words_of_a_refusal(shared: Server, name: str, stream: bool) -> None:
    """Clients look for the phrase and read the numbers."""
    response = shared.complete(prompt=[1] * (LIMIT - 10), stream=stream, **{name: 100})
    assert response.headers["content-type"] == "application/json"
    assert response.json()["error"] == {
        "message": f"This model's maximum context length is {LIMIT} tokens, but you requested {LIMIT + 90} tokens: {LIMIT - 10} in the "
        f"prompt and 100 in the answer ({name}). Shorten the prompt or ask for at most 10 tokens.",
        "type": "invalid_request_error",
        "param": name,
        "code": "context_length_exceeded",
    }
    response = shared.complete(prompt=[1] * LIMIT, stream=stream)
    assert response.json()["error"]["message"] == (
        f"This model's maximum context length is {LIMIT} tokens, but the prompt alone has {LIMIT} tokens and an answer needs at least 1. "
        "Shorten the prompt."
    )
    assert shared.complete(prompt=[1] * (LIMIT - 10), stream=stream).status_code == 200
    assert shared.engine.requests[-1].max_tokens == 10


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_an_answer_that_does_not_fit_is_not_blamed_on_the_prompt(shared: Server, name: str) -> None:
    count = shared.post("/tokenize", {"messages": [{"role": "user", "content": "hi"}]}).json()["count"]
    response = shared.chat(**{name: LIMIT - count + 1})
    error = response.json()["error"]
    assert (response.status_code, error["code"], error["param"]) == (400, "context_length_exceeded", name)
    for number in (LIMIT, LIMIT + 1, count, LIMIT - count + 1):
        assert str(number) in error["message"]
    assert shared.chat(**{name: LIMIT - count}).status_code == 200


def test_the_limit_itself_is_served(shared: Server) -> None:
    assert shared.complete(prompt=[1] * (LIMIT - 1), max_tokens=1).status_code == 200
    assert shared.complete(prompt=[1] * (LIMIT - 1), max_tokens=2).status_code == 400


@pytest.mark.parametrize(
    ("path", "fields", "budget"),
    [
        ("/v1/completions", {"prompt": [1] * 10}, 16),
        ("/v1/completions", {"prompt": [1] * (LIMIT - 5)}, 5),
        ("/v1/completions", {"prompt": [1] * 10, "max_tokens": 100}, 100),
        ("/v1/completions", {"prompt": [1] * 10, "max_completion_tokens": 100}, 100),
        ("/v1/completions", {"prompt": [1] * 10, "max_completion_tokens": 7, "max_tokens": 7}, 7),
    ],
)
def test_default_budgets(shared: Server, path: str, fields: dict[str, Any], budget: int) -> None:
    assert shared.post(path, fields).status_code == 200
    assert shared.engine.requests[-1].max_tokens == budget


def test_chat_may_use_all_that_is_left(shared: Server) -> None:
    assert shared.chat().status_code == 200
    request = shared.engine.requests[-1]
    assert request.max_tokens == LIMIT - len(request.prompt)

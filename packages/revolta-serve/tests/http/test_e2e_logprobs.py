"""Logprobs and sampling fields against a real server: what is told of a token does not depend on how it was asked for."""

from collections.abc import Iterator
from typing import Any

import pytest

from revolta_serve.testing import RunningServer, running_server
from revolta_serve.text.tokenizer import Tokenizer
from revolta_serve.weights.tiny import make_tiny
from support.wire import post, wait_until_idle

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
PROMPT = [17 + (7 * n) % 200 for n in range(150)]
CLOSE = 1e-4


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    directory = tmp_path_factory.mktemp("model") / "tiny"
    make_tiny(directory, layers=4)
    with running_server(directory, {"schedule.max_model_len": 1024, "schedule.max_num_batched_tokens": 192}) as running:
        yield running


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    directory = tmp_path_factory.mktemp("tokenizer") / "tiny"
    make_tiny(directory, layers=4)
    return Tokenizer.load(directory)


def complete(server: RunningServer, **fields: Any) -> dict[str, Any]:
    """The first choice of a greedy completion of PROMPT."""
    body = {"prompt": PROMPT, "temperature": 0, "max_tokens": 12, "return_token_ids": True, "ignore_eos": True, **fields}
    response = post(server.url, COMPLETIONS, body)
    assert response.status_code == 200, response.text
    return dict(response.json()["choices"][0])


def values(entries: list[Any], ids: list[int]) -> list[float]:
    """The logprobs of the tokens of a prompt after the first."""
    assert len(entries) == len(ids)
    assert entries[0] is None
    return [entry[str(token)]["logprob"] for entry, token in zip(entries[1:], ids[1:], strict=True)]


def test_one_truth_however_it_is_asked_for(server: RunningServer) -> None:
    """Generated, echoed and of a prompt; cold, and with the prompt in the cache."""
    first = complete(server, logprobs=3)
    answer = first["token_ids"]
    generated = first["logprobs"]["token_logprobs"]
    assert complete(server, logprobs=3)["logprobs"] == first["logprobs"], "with the prompt in the cache"
    known = values(complete(server, prompt=PROMPT + answer, prompt_logprobs=3, max_tokens=1)["prompt_logprobs"], PROMPT + answer)
    assert known[len(PROMPT) - 1 :] == pytest.approx(generated, abs=CLOSE)
    echoed = complete(server, prompt=PROMPT + answer, echo=True, logprobs=3, max_tokens=1)["logprobs"]
    assert echoed["token_logprobs"][1:-1] == known
    assert len(echoed["token_logprobs"]) == len(PROMPT + answer) + 1
    for top, value in zip(first["logprobs"]["top_logprobs"], generated, strict=True):
        assert max(top.values()) == value, "greedy"


@pytest.mark.parametrize("length", [1, 2, 63, 64, 65, 150])
def test_every_length_of_prompt(server: RunningServer, length: int) -> None:
    ids = PROMPT[:length]
    entries = complete(server, prompt=ids, prompt_logprobs=2, max_tokens=1)["prompt_logprobs"]
    assert values(entries, ids) == pytest.approx(values(complete(server, prompt_logprobs=2)["prompt_logprobs"][:length], ids), abs=CLOSE)
    for entry in entries[1:]:
        ranks = sorted(place["rank"] for place in entry.values())
        assert ranks[:2] == [1, 2]
        assert len(entry) in (2, 3)
        for place in entry.values():
            assert sum(other["logprob"] > place["logprob"] for other in entry.values()) == min(place["rank"] - 1, 2)


def test_a_chat(server: RunningServer) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 10, "seed": 3, "temperature": 1, "logprobs": True, "n": 2}
    choices = post(server.url, CHAT, {**body, "top_logprobs": 5}).json()["choices"]
    for choice in choices:
        told = b"".join(bytes(entry["bytes"]) for entry in choice["logprobs"]["content"])
        assert told.decode(errors="replace") == choice["message"]["content"]
    fewer = post(server.url, CHAT, {**body, "top_logprobs": 1}).json()["choices"]
    for choice, other in zip(choices, fewer, strict=True):
        assert other["message"] == choice["message"]
        assert [entry["logprob"] for entry in other["logprobs"]["content"]] == [entry["logprob"] for entry in choice["logprobs"]["content"]]


def test_what_may_be_drawn(server: RunningServer, tokenizer: Tokenizer) -> None:
    plain = complete(server)["token_ids"]
    assert set(complete(server, allowed_token_ids=[70, 71])["token_ids"]) <= {70, 71}
    assert complete(server, logit_bias={"70": 100})["token_ids"] == [70] * 12
    assert plain[0] not in complete(server, logit_bias={str(plain[0]): -100})["token_ids"]
    word = tokenizer.decode(plain[:1])
    assert plain[0] not in complete(server, bad_words=[word])["token_ids"]
    stopped = complete(server, stop_token_ids=plain[:1])
    assert (stopped["token_ids"], stopped["finish_reason"]) == (plain[:1], "stop")
    later = complete(server, stop_token_ids=plain[:1], min_tokens=5)["token_ids"]
    assert plain[0] not in later[:4]
    assert len(later) >= 5
    repeated = complete(server, logit_bias={"70": 100}, repetition_detection={"max_pattern_size": 2, "min_count": 4})
    assert (repeated["token_ids"], repeated["finish_reason"]) == ([70] * 4, "repetition")
    varied = complete(server, presence_penalty=2, frequency_penalty=2, repetition_penalty=10, logit_bias={"70": 100, "71": 99})["token_ids"]
    assert varied.count(70) < 12
    wait_until_idle(server.url)


def test_a_limit_of_reasoning(server: RunningServer, tokenizer: Tokenizer) -> None:
    close = tokenizer.added["</think>"]
    body = {"messages": [{"role": "user", "content": "hi"}], "reasoning_effort": "high", "temperature": 0, "max_tokens": 8}
    for budget in (0, 3):
        fields = {"thinking_token_budget": budget, "return_token_ids": True, "logit_bias": {str(close): -100}, "ignore_eos": True}
        answer = post(server.url, CHAT, {**body, **fields}).json()
        assert answer["choices"][0]["token_ids"].index(close) == budget
        assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] == budget

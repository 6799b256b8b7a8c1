"""What a request becomes in the engine: seeds, sampling, stop ids, prompts, ids."""

from typing import Any

import pytest

from revolta_serve.api.options import choice_seed
from revolta_serve.types import GenerateRequest, SamplingParams
from support.script_engine import Server
from support.text import tokenizer

ADDED = tokenizer().added
STOPS = (ADDED["<|im_end|>"], ADDED["<|endoftext|>"])


def sent(server: Server, path: str = "/v1/completions", **fields: Any) -> list[GenerateRequest]:
    """The engine's requests for one HTTP request."""
    before = len(server.engine.requests)
    assert (server.chat(**fields) if "chat" in path else server.complete(**fields)).status_code == 200
    return server.engine.requests[before:]


def test_sampling_defaults_come_from_the_checkpoint(shared: Server) -> None:
    [request] = sent(shared, seed=7)
    assert request.sampling == SamplingParams(temperature=0.6, top_k=20, top_p=0.95, min_p=0.0, seed=choice_seed(7, 0))
    assert request.stop_token_ids == STOPS


@pytest.mark.parametrize(("asked", "used"), [(0, 0.0), (1e-6, 0.0), (0.001, 0.01), (0.5, 0.5), (None, 0.6)])
def test_temperatures(shared: Server, caplog: pytest.LogCaptureFixture, asked: Any, used: float) -> None:
    assert sent(shared, temperature=asked)[0].sampling.temperature == used
    said = [record.getMessage() for record in caplog.records if record.name == "revolta_serve.api.sampling"]
    assert said == (["temperature 0.001 is raised to 0.01, the coldest that is drawn from; 0 is greedy"] if asked == 0.001 else [])


def test_requests_override_the_checkpoint(shared: Server) -> None:
    [request] = sent(shared, temperature=1.5, top_k=-1, top_p=1, min_p=0.1, ignore_eos=True, stop_token_ids=[5, 5, 6])
    assert request.sampling == SamplingParams(temperature=1.5, top_k=0, top_p=1.0, min_p=0.1, seed=request.sampling.seed)
    assert request.stop_token_ids == (5, 6)


def test_every_choice_has_its_own_noise_and_batch_mates_do_not_matter(shared: Server) -> None:
    alone = [request.sampling.seed for request in sent(shared, seed=3, n=3)]
    both = [request.sampling.seed for request in sent(shared, seed=3, n=3, prompt=["hi", "other"])]
    assert len(set(alone)) == 3
    assert both == alone * 2
    assert all(0 <= seed < 2**63 for seed in alone)
    assert [choice_seed(3, n) for n in range(3)] == alone
    assert sent(shared, seed=4)[0].sampling.seed != alone[0]


def test_without_a_seed_every_request_differs(shared: Server) -> None:
    seeds = {sent(shared, **fields)[0].sampling.seed for fields in ({}, {"seed": None}, {"seed": -1}) for _ in range(2)}
    assert len(seeds) == 6


def test_greedy_with_several_choices(shared: Server) -> None:
    answer = shared.chat(n=3, temperature=0).json()
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    assert {choice["message"]["content"] for choice in answer["choices"]} == {"ok"}


HI, THERE = tokenizer().encode("hi"), tokenizer().encode("there")


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [("hi", [HI]), (["hi", "there"], [HI, THERE]), ([1, 2, 3], [[1, 2, 3]]), ([[1, 2], [3]], [[1, 2], [3]])],
)
def test_prompts(shared: Server, prompt: Any, expected: list[list[int]]) -> None:
    requests = sent(shared, prompt=prompt, n=2)
    assert [list(request.prompt) for request in requests] == [ids for ids in expected for _ in range(2)]
    assert len({request.id for request in requests}) == len(requests)


def test_raw_prompts_keep_special_tokens(shared: Server) -> None:
    assert sent(shared, prompt="<|im_start|>x")[0].prompt[0] == ADDED["<|im_start|>"]


def test_ids(shared: Server) -> None:
    given = shared.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}, headers={"x-request-id": "from-header"})
    assert given.json()["id"] == "chatcmpl-from-header"
    assert shared.complete(request_id="from-body").json()["id"] == "cmpl-from-body"
    assert shared.complete().json()["id"] != shared.complete().json()["id"]
    odd = shared.post("/v1/completions", {"prompt": "x"}, headers={"x-request-id": "a b"})
    assert odd.status_code == 200
    twice = [shared.complete(request_id="same").status_code for _ in range(2)]
    assert twice == [200, 200]


def test_token_ids_on_request(shared: Server) -> None:
    chat = shared.chat(return_token_ids=True).json()
    assert chat["choices"][0]["token_ids"] == [*tokenizer().encode("o"), *tokenizer().encode("k"), STOPS[0]]
    assert tuple(chat["prompt_token_ids"]) == shared.engine.requests[-1].prompt
    assert "token_ids" not in shared.chat().json()["choices"][0]
    text = shared.complete(prompt=["a", "b"], return_token_ids=True).json()
    assert [choice["prompt_token_ids"] for choice in text["choices"]] == [tokenizer().encode("a"), tokenizer().encode("b")]

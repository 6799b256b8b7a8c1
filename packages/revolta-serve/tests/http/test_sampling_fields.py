"""What the sampling fields become in the engine's requests, on both routes."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from msgspec.structs import replace as changed

from revolta_serve.api.options import choice_seed
from revolta_serve.text.boundaries import STRETCH
from revolta_serve.text.reasoning import ThinkTokens
from revolta_serve.types import GenerateRequest, Repetition, SamplingParams, Thinking
from support.refusals import CHAT, COMPLETIONS, SIZE, body
from support.script_engine import ScriptEngine, Server, wait_for
from support.text import byte_tokens, defaults, tokenizer

ENDS = defaults().stop_ids
THINK = ThinkTokens(tokenizer())
END = tokenizer().added["<|im_end|>"]
PLAIN = SamplingParams(temperature=0.6, top_k=20, top_p=0.95, seed=choice_seed(7, 0))
"""What a request with seed 7 becomes that asks for nothing else."""


def sent(server: Server, path: str, **fields: Any) -> list[GenerateRequest]:
    """The engine's requests for one HTTP request."""
    before = len(server.engine.requests)
    response = server.post(path, {**body(path), **fields})
    assert response.status_code == 200, response.text
    return server.engine.requests[before:]


Effect = tuple[dict[str, Any], dict[str, Any]]
"""Fields of a request, and how its SamplingParams differ from PLAIN."""

EFFECTS: list[Effect] = [
    ({}, {}),
    ({"presence_penalty": 1.5, "frequency_penalty": -2}, {"presence_penalty": 1.5, "frequency_penalty": -2.0}),
    ({"presence_penalty": None, "frequency_penalty": 0, "repetition_penalty": 1}, {}),
    ({"repetition_penalty": 0.01}, {"repetition_penalty": 0.01}),
    ({"repetition_penalty": 10}, {"repetition_penalty": 10.0}),
    ({"temperature": 0}, {"temperature": 0.0}),
    ({"temperature": 1e6, "top_k": 0, "top_p": 1, "min_p": 0.5}, {"temperature": 1e6, "top_k": 0, "top_p": 1.0, "min_p": 0.5}),
    ({"top_k": 2**31 - 1}, {"top_k": 2**31 - 1}),
    ({"logit_bias": {}}, {}),
    ({"logit_bias": {"9": 0, "7": 1, "5": -0.5}}, {"logit_bias": ((5, -0.5), (7, 1.0))}),
    ({"logit_bias": {"0": 100, str(SIZE - 1): -100}}, {"logit_bias": ((0, 100.0), (SIZE - 1, -100.0))}),
    ({"logit_bias": {"1": 10**20, "2": -1e300, "3": 100.5}}, {"logit_bias": ((1, 100.0), (2, -100.0), (3, 100.0))}),
    ({"allowed_token_ids": [9, 3, 9]}, {"allowed_tokens": (3, 9)}),
    ({"allowed_token_ids": list(range(512)) * 2}, {"allowed_tokens": tuple(range(512))}),
    ({"min_tokens": 0, "stop_token_ids": [5]}, {}),
    ({"min_tokens": 3, "max_tokens": 3}, {"min_tokens": 3, "ending_tokens": ENDS}),
    ({"min_tokens": 2, "max_tokens": 3, "stop_token_ids": [5, ENDS[0]]}, {"min_tokens": 2, "ending_tokens": (*ENDS, 5)}),
    ({"min_tokens": 2, "max_tokens": 3, "ignore_eos": True}, {"min_tokens": 2}),
    ({"min_tokens": 2, "max_tokens": 3, "ignore_eos": True, "stop_token_ids": [5]}, {"min_tokens": 2, "ending_tokens": (5,)}),
    ({"prompt_logprobs": 0}, {"prompt_logprobs": 0}),
    ({"prompt_logprobs": 20}, {"prompt_logprobs": 20}),
    ({"use_beam_search": False, "kv_transfer_params": {"x": [1]}, "vllm_xargs": {"y": {}}}, {}),
    ({"spaces_between_special_tokens": False, "return_tokens_as_token_ids": True, "thinking_token_budget": -1}, {}),
    ({"thinking_token_budget": None, "repetition_detection": None, "priority": 0, "cache_salt": None}, {}),
]


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_effects(shared: Server, path: str) -> None:
    for fields, differences in EFFECTS:
        [request] = sent(shared, path, seed=7, **fields)
        assert request.sampling == changed(PLAIN, **differences), fields


OF_ONE_ROUTE: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    (CHAT, {"logprobs": False}, {}),
    (CHAT, {"logprobs": True}, {"logprobs": 0}),
    (CHAT, {"logprobs": True, "top_logprobs": 0}, {"logprobs": 0}),
    (CHAT, {"logprobs": True, "top_logprobs": 20}, {"logprobs": 20}),
    (CHAT, {"logprobs": None, "top_logprobs": 0}, {}),
    (COMPLETIONS, {"logprobs": None}, {}),
    (COMPLETIONS, {"logprobs": 0}, {"logprobs": 0}),
    (COMPLETIONS, {"logprobs": 5}, {"logprobs": 5}),
    (COMPLETIONS, {"echo": True}, {}),
    (COMPLETIONS, {"echo": True, "logprobs": 5}, {"logprobs": 5, "prompt_logprobs": 5}),
    (COMPLETIONS, {"echo": True, "logprobs": 5, "prompt_logprobs": 7}, {"logprobs": 5, "prompt_logprobs": 7}),
    (COMPLETIONS, {"echo": True, "prompt_logprobs": 7}, {"prompt_logprobs": 7}),
    (COMPLETIONS, {"echo": True, "logprobs": 1, "stream": True}, {"logprobs": 1, "prompt_logprobs": 1}),
]


def test_effects_on_one_route(shared: Server) -> None:
    for path, fields, differences in OF_ONE_ROUTE:
        [request] = sent(shared, path, seed=7, **fields)
        assert request.sampling == changed(PLAIN, **differences), fields


def test_the_whole_vocabulary_and_processed_logprobs(serve: Callable[..., Server]) -> None:
    server = serve(ScriptEngine([END]), max_logprobs=-1, logprobs_mode="processed")
    [request] = sent(server, CHAT, logprobs=True, top_logprobs=-1, prompt_logprobs=-1)
    assert (request.sampling.logprobs, request.sampling.prompt_logprobs, request.sampling.processed_logprobs) == (SIZE, SIZE, True)


def test_the_checkpoint_is_asked_where_the_request_says_nothing(serve: Callable[..., Server]) -> None:
    odd = replace(defaults(), repetition_penalty=1.05, presence_penalty=0.5, frequency_penalty=0.25)
    server = serve(ScriptEngine([END]), defaults=odd)
    for path in (CHAT, COMPLETIONS):
        for fields in ({}, {"repetition_penalty": None}):
            sampling = sent(server, path, **fields)[0].sampling
            assert (sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty) == (1.05, 0.5, 0.25)
        sampling = sent(server, path, repetition_penalty=1, presence_penalty=0, frequency_penalty=0)[0].sampling
        assert (sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty) == (1.0, 0.0, 0.0)


def test_bad_words_with_and_without_a_space(shared: Server) -> None:
    encode = tokenizer().encode
    [request] = sent(shared, COMPLETIONS, bad_words=["the", " other", "  x", " ", "</think>", "the"])
    expected = [encode(text) for text in ("the", " the", "other", " other", "x", " x", " ", "</think>", " </think>")]
    assert request.sampling.bad_words == tuple(map(tuple, expected))
    assert request.sampling.bad_words[-2] == (THINK.close,)
    most = sent(shared, COMPLETIONS, bad_words=[chr(ord("A") + n) for n in range(58)])[0].sampling.bad_words
    assert len(most) == 116


@pytest.mark.parametrize(
    ("prompt", "thinking"),
    [
        ([5, THINK.open, 6], Thinking(budget=9, close=THINK.close, open=THINK.open, begun=True)),
        ([5, 6], Thinking(budget=9, close=THINK.close, open=THINK.open, begun=False)),
        ([THINK.open, 5, THINK.close, 6], None),
        ([THINK.open, 5, THINK.close, THINK.open], Thinking(budget=9, close=THINK.close, open=THINK.open, begun=True)),
    ],
)
def test_a_limit_of_reasoning(shared: Server, prompt: list[int], thinking: Thinking | None) -> None:
    assert sent(shared, COMPLETIONS, prompt=prompt, thinking_token_budget=9)[0].sampling.thinking == thinking
    assert sent(shared, COMPLETIONS, prompt=prompt, thinking_token_budget=-1)[0].sampling.thinking is None
    assert sent(shared, COMPLETIONS, prompt=prompt)[0].sampling.thinking is None


def test_a_limit_of_reasoning_in_a_chat(shared: Server) -> None:
    begun = Thinking(budget=0, close=THINK.close, open=THINK.open, begun=True)
    assert sent(shared, CHAT, thinking_token_budget=0, reasoning_effort="high")[0].sampling.thinking == begun
    assert sent(shared, CHAT, thinking_token_budget=0)[0].sampling.thinking is None
    each = sent(shared, COMPLETIONS, prompt=[[THINK.open], [THINK.close]], thinking_token_budget=0)
    assert [request.sampling.thinking for request in each] == [begun, None]


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize(
    ("asked", "rule"),
    [
        (None, None),
        ({}, None),
        ({"max_pattern_size": 0}, None),
        ({"max_pattern_size": 4, "min_count": 3}, Repetition(shortest=1, longest=4, count=3)),
        ({"max_pattern_size": 4, "min_pattern_size": 0, "min_count": 2}, Repetition(shortest=1, longest=4, count=2)),
        ({"max_pattern_size": 1024, "min_pattern_size": 1024, "min_count": 1024}, Repetition(shortest=1024, longest=1024, count=1024)),
    ],
)
def test_repetition_detection(shared: Server, path: str, asked: Any, rule: Repetition | None) -> None:
    assert sent(shared, path, repetition_detection=asked)[0].repetition == rule


def test_answers_that_repeat_themselves(serve: Callable[..., Server]) -> None:
    server = serve(ScriptEngine(byte_tokens("abab"), finish="repetition"))
    for answer in (server.chat().json(), server.complete(n=2).json()):
        assert {choice["finish_reason"] for choice in answer["choices"]} == {"repetition"}
    assert '"finish_reason":"repetition"' in server.complete(stream=True).text


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_priorities(serve: Callable[..., Server], path: str) -> None:
    server = serve(ScriptEngine([END]), schedule={"policy": "priority"})
    for priority in (0, 1, -1, 2**31 - 1, -(2**31 - 1)):
        assert sent(server, path, priority=priority)[0].priority == priority
    assert sent(server, path)[0].priority == 0


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_salts(shared: Server, path: str) -> None:
    for salt in (" ", "é", "x" * 1024):
        assert sent(shared, path, cache_salt=salt)[0].cache_salt == salt
    assert sent(shared, path)[0].cache_salt == ""


def test_tenants(serve: Callable[..., Server]) -> None:
    server = serve(ScriptEngine([END]), keys=("first", "second", "zweiter-schlüssel"))

    def tenant(path: str, headers: dict[str, str]) -> str:
        raw = {name: value.encode() for name, value in headers.items()}
        assert server.client.post(path, json=body(path), headers=raw).status_code == 200  # type: ignore[arg-type]
        return server.engine.requests[-1].tenant

    for path in (CHAT, COMPLETIONS):
        first = tenant(path, {"authorization": "Bearer first"})
        assert first == tenant(path, {"x-api-key": "first"}) != ""
        second = tenant(path, {"x-api-key": "second"})
        third = tenant(path, {"authorization": "Bearer zweiter-schlüssel"})
        assert len({first, second, third}) == 3
        for name in (first, second, third):
            assert len(name) == 12
            assert "first" not in name
    assert sent(serve(ScriptEngine([END])), CHAT)[0].tenant == ""


LONG = list(range(100, 140))


@pytest.mark.parametrize(
    ("fields", "kept"),
    [
        ({"truncate_prompt_tokens": 10}, LONG[-10:]),
        ({"truncate_prompt_tokens": 10, "truncation_side": "left"}, LONG[-10:]),
        ({"truncate_prompt_tokens": 10, "truncation_side": "right"}, LONG[:10]),
        ({"truncate_prompt_tokens": 40}, LONG),
        ({"truncate_prompt_tokens": 2**31 - 1, "truncation_side": "right"}, LONG),
        ({"truncate_prompt_tokens": -1}, LONG),
        ({"truncation_side": "right"}, LONG),
    ],
)
def test_cut_prompts(shared: Server, fields: dict[str, Any], kept: list[int]) -> None:
    assert list(sent(shared, COMPLETIONS, prompt=LONG, **fields)[0].prompt) == kept
    assert shared.complete(prompt=LONG, **fields).json()["usage"]["prompt_tokens"] == len(kept)


def test_a_prompt_cut_to_what_leaves_room(shared: Server) -> None:
    limit = shared.engine.max_model_len
    prompt = [n % 500 for n in range(3 * limit)]
    for tokens in (1, 100, limit - 1):
        [request] = sent(shared, COMPLETIONS, prompt=prompt, max_tokens=tokens, truncate_prompt_tokens=-1)
        assert (list(request.prompt), request.max_tokens) == (prompt[tokens - limit :], tokens)
    [request] = sent(shared, COMPLETIONS, prompt=prompt, truncate_prompt_tokens=-1, truncation_side="right")
    assert (list(request.prompt), request.max_tokens) == (prompt[: limit - 16], 16)
    refused = shared.complete(prompt=prompt, max_tokens=limit, truncate_prompt_tokens=-1)
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "context_length_exceeded")
    wrong = shared.complete(prompt=[*prompt, SIZE], truncate_prompt_tokens=5)
    assert wrong.json()["error"]["param"] == f"prompt[{len(prompt)}]"


def test_text_of_any_length_may_be_cut(shared: Server) -> None:
    text = "x" * 100_000
    assert shared.complete(prompt=text).status_code == 400
    assert len(sent(shared, COMPLETIONS, prompt=text, truncate_prompt_tokens=20)[0].prompt) == 20
    messages = [{"role": "user", "content": text}]
    assert shared.chat(messages=messages).status_code == 400
    [request] = sent(shared, CHAT, messages=messages, truncate_prompt_tokens=20)
    assert tokenizer().decode(request.prompt).endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")
    assert len(request.prompt) == 20
    [whole] = sent(shared, CHAT, messages=messages, truncate_prompt_tokens=-1, max_tokens=5)
    assert len(whole.prompt) == shared.engine.max_model_len - 5


def test_boundaries(serve: Callable[..., Server]) -> None:
    server = serve(ScriptEngine([END], max_model_len=20_000))
    size = 2 * STRETCH + 10
    [request] = sent(server, COMPLETIONS, prompt=[5] * size)
    assert (request.boundaries, request.opening) == ((STRETCH, 2 * STRETCH, size), 0)
    messages = [{"role": role, "content": "some words"} for role in ("system", "user", "assistant", "user")]
    [request] = sent(server, CHAT, messages=messages)
    starts = [place for place, token in enumerate(request.prompt) if token == tokenizer().added["<|im_start|>"]]
    assert (request.boundaries, request.opening) == ((*starts[1:], len(request.prompt)), starts[1])
    for side, first in (("left", len(request.prompt) - 30), ("right", 0)):
        [cut] = sent(server, CHAT, messages=messages, truncate_prompt_tokens=30, truncation_side=side)
        assert cut.boundaries == (*(place - first for place in starts[1:] if first < place < first + 30), 30)
        assert cut.opening == (starts[1] if starts[1] <= 30 and side == "right" else 0)
    [bare] = sent(server, CHAT, messages=messages[1:], add_generation_prompt=False)
    starts = [place for place, token in enumerate(bare.prompt) if token == tokenizer().added["<|im_start|>"]]
    assert (bare.boundaries, bare.opening) == ((*starts[1:], len(bare.prompt)), 0)


def test_the_boundary_behind_tools(serve: Callable[..., Server]) -> None:
    server = serve(ScriptEngine([END], max_model_len=20_000))
    tools = [{"type": "function", "function": {"name": "f"}}]
    messages = [{"role": "user" if n % 2 == 0 else "assistant", "content": "some words"} for n in range(7)]
    for fields in ({}, {"tools": tools, "tool_choice": "none"}):
        [request] = sent(server, CHAT, messages=messages, **fields)
        starts = [place for place, token in enumerate(request.prompt) if token == tokenizer().added["<|im_start|>"]]
        assert request.boundaries == (*(starts[1:2] if fields else []), *starts[-5:], len(request.prompt))
        assert request.opening == (starts[1] if fields else 0)


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("stream", [False, True])
def test_greedy_choices_are_computed_once(serve: Callable[..., Server], path: str, stream: bool) -> None:
    server = serve(ScriptEngine([*byte_tokens("ok"), END], cached=1))
    fields: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
    response = server.post(path, body(path, n=3, temperature=0, **fields))
    assert len(server.engine.requests) == 1
    assert response.text.count('"finish_reason":"stop"') == 3
    for index in range(3):
        assert f'"index":{index}' in response.text
    if not stream:
        answer = response.json()
        assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
        assert {choice.get("text", choice.get("message", {}).get("content")) for choice in answer["choices"]} == {"ok"}
    assert '"completion_tokens":9' in response.text
    assert '"cached_tokens":1' in response.text
    metrics = server.client.get("/metrics").text
    assert 'revolta:request_success_total{finished_reason="stop",model_name="tiny"} 3.0' in metrics
    assert 'revolta:prompt_tokens_cached_total{model_name="tiny"} 1.0' in metrics


def test_greedy_prompts_keep_their_choices(serve: Callable[..., Server]) -> None:
    server = serve(ScriptEngine(lambda request: [*request.prompt, END]), schedule={"max_queue": 2, "max_num_seqs": 1})
    answer = server.complete(prompt=[[5], [6], [7]], n=2, temperature=0, return_token_ids=True).json()
    assert [choice["token_ids"][0] for choice in answer["choices"]] == [5, 5, 6, 6, 7, 7]
    assert answer["usage"]["completion_tokens"] == 12
    assert server.complete(prompt=[[5]] * 3, n=2, temperature=1).status_code == 400, "six answers that differ never fit the queue"
    assert server.complete(prompt=[[5]] * 4, n=2, temperature=0).status_code == 400


def test_drawn_choices_differ(shared: Server) -> None:
    requests = sent(shared, COMPLETIONS, n=3, temperature=1, seed=5)
    assert [request.sampling.seed for request in requests] == [choice_seed(5, n) for n in range(3)]


def test_all_choices_end_with_a_stop_string(serve: Callable[..., Server]) -> None:
    server = serve(ScriptEngine(byte_tokens("abSTOPcd"), endless=True, delay=0.001, max_model_len=100_000))
    answer = server.complete(n=2, temperature=0, stop="STOP", max_tokens=50_000).json()
    assert [(choice["text"], choice["stop_reason"]) for choice in answer["choices"]] == [("ab", "STOP")] * 2
    wait_for(lambda: list(server.engine.ended_as.values()) == ["stop"])
    wait_for(lambda: "revolta:request_queue_time_seconds_count" in server.client.get("/metrics").text)
    sample = 'revolta:request_queue_time_seconds_count{model_name="tiny"} 1.0'
    wait_for(lambda: sample in server.client.get("/metrics").text.splitlines())


def test_records_are_counted_however_a_request_ends(serve: Callable[..., Server]) -> None:
    server = serve(ScriptEngine(byte_tokens("ab"), endless=True, delay=0.001, max_model_len=100_000))
    with server.client.stream("POST", COMPLETIONS, json={"prompt": "x", "stream": True, "max_tokens": 50_000}) as response:
        next(response.iter_raw())
    server.complete(max_tokens=3)
    sample = 'revolta:request_queue_time_seconds_count{model_name="tiny"} 2.0'
    wait_for(lambda: sample in server.client.get("/metrics").text.splitlines())


def test_stop_strings_wait_for_min_tokens(serve: Callable[..., Server]) -> None:
    server = serve(ScriptEngine([*byte_tokens("STOP STOP"), END]))
    for path in (CHAT, COMPLETIONS):
        answer = server.post(path, body(path, stop="STOP", min_tokens=3, max_tokens=20)).json()["choices"][0]
        assert answer.get("text", answer.get("message", {}).get("content")) == "STOP "
        assert answer["stop_reason"] == "STOP"

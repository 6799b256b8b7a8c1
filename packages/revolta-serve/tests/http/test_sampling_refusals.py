"""What the sampling fields refuse: a 400 that names the field, on both routes, streamed or not, before anything is computed."""

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from support.refusals import CHAT, COMPLETIONS, SIZE, Case, body, check, check_all
from support.script_engine import ScriptEngine, Server, serving
from support.text import byte_tokens, defaults, tokenizer

HUGE = 10**20
NO_NUMBER: list[Any] = ["1", True, False, [], {}]


def not_numbers(name: str, *more: Any) -> list[Case]:
    """Values that are no number at all, and others."""
    return [(name, value, name) for value in (*NO_NUMBER, *more)]


BOTH: list[Case] = [
    *not_numbers("presence_penalty", -2.01, 2.01, 99, -HUGE),
    *not_numbers("frequency_penalty", -2.01, 2.01, 99, 10**400),
    *not_numbers("repetition_penalty", 0, -1, 0.001, 10.5, 99, HUGE),
    ("logit_bias", [], "logit_bias"),
    ("logit_bias", "x", "logit_bias"),
    ("logit_bias", {"x": 1}, "logit_bias.x"),
    ("logit_bias", {"": 1}, "logit_bias."),
    ("logit_bias", {"-1": 1}, "logit_bias.-1"),
    ("logit_bias", {"1.0": 1}, "logit_bias.1.0"),
    ("logit_bias", {"01": 1}, "logit_bias.01"),
    ("logit_bias", {"²": 1}, "logit_bias.²"),
    ("logit_bias", {"5": 1, str(SIZE): 1}, f"logit_bias.{SIZE}"),
    ("logit_bias", {"99999999": 1}, "logit_bias.99999999"),
    ("logit_bias", {"9" * 5000: 1}, "logit_bias." + "9" * 200),
    ("logit_bias", {"1": True}, "logit_bias.1"),
    ("logit_bias", {"1": "1"}, "logit_bias.1"),
    ("logit_bias", {"1": None}, "logit_bias.1"),
    ("allowed_token_ids", [], "allowed_token_ids"),
    ("allowed_token_ids", 5, "allowed_token_ids"),
    ("allowed_token_ids", [1, -1], "allowed_token_ids[1]"),
    ("allowed_token_ids", [SIZE], "allowed_token_ids[0]"),
    ("allowed_token_ids", [1, 2, HUGE], "allowed_token_ids[2]"),
    ("allowed_token_ids", [True], "allowed_token_ids[0]"),
    ("allowed_token_ids", ["1"], "allowed_token_ids[0]"),
    ("allowed_token_ids", [1] * 1025, "allowed_token_ids"),
    ("bad_words", "word", "bad_words"),
    ("bad_words", [""], "bad_words[0]"),
    ("bad_words", ["a", 5], "bad_words[1]"),
    ("bad_words", ["a", None], "bad_words[1]"),
    ("bad_words", [["a"]], "bad_words[0]"),
    ("bad_words", ["a", "x" * 1025], "bad_words[1]"),
    ("bad_words", ["a"] * 129, "bad_words"),
    ("bad_words", [f"w{n}" for n in range(65)], "bad_words"),
    ("bad_words", ["é🙂" * 300], "bad_words"),
    *not_numbers("min_tokens", -1, 1.5, HUGE, 513, 10**12),
    *not_numbers("thinking_token_budget", -2, 1.5, HUGE),
    *not_numbers("prompt_logprobs", -2, -1, 1.5, 21, 50, HUGE),
    *not_numbers("priority", 1, -1, 1.5, 2**31, HUGE),
    ("cache_salt", "", "cache_salt"),
    ("cache_salt", 5, "cache_salt"),
    ("cache_salt", "x" * 1025, "cache_salt"),
    *not_numbers("truncate_prompt_tokens", 0, -2, 1.5, HUGE),
    ("truncation_side", "middle", "truncation_side"),
    ("truncation_side", 5, "truncation_side"),
    ("repetition_detection", 5, "repetition_detection"),
    ("repetition_detection", [], "repetition_detection"),
    ("repetition_detection", {"max_pattern_size": -1}, "repetition_detection.max_pattern_size"),
    ("repetition_detection", {"max_pattern_size": True}, "repetition_detection.max_pattern_size"),
    ("repetition_detection", {"max_pattern_size": 1025, "min_count": 2}, "repetition_detection.max_pattern_size"),
    ("repetition_detection", {"max_pattern_size": 4}, "repetition_detection.min_count"),
    ("repetition_detection", {"max_pattern_size": 4, "min_count": 1}, "repetition_detection.min_count"),
    ("repetition_detection", {"max_pattern_size": 4, "min_count": 2.0}, "repetition_detection.min_count"),
    ("repetition_detection", {"max_pattern_size": 4, "min_count": HUGE}, "repetition_detection.min_count"),
    ("repetition_detection", {"max_pattern_size": 4, "min_count": 2, "min_pattern_size": 5}, "repetition_detection.min_pattern_size"),
    ("repetition_detection", {"min_pattern_size": 1}, "repetition_detection.min_pattern_size"),
    ("use_beam_search", True, "use_beam_search"),
    ("spaces_between_special_tokens", "no", "spaces_between_special_tokens"),
    ("return_tokens_as_token_ids", 1, "return_tokens_as_token_ids"),
    ("n", HUGE, "n"),
    ("seed", HUGE, "seed"),
    ("seed", -HUGE, "seed"),
]
ONLY_CHAT: list[Case] = [
    *[("logprobs", value, "logprobs") for value in (1, 0, "true", [])],
    *not_numbers("top_logprobs", 50, 21, -1, -2, 1.5, HUGE),
    ("top_logprobs", 5, "top_logprobs"),
]
ONLY_COMPLETIONS: list[Case] = [
    *not_numbers("logprobs", -1, -2, 21, 1.5, HUGE),
    ("echo", 1, "echo"),
    ("echo", "x", "echo"),
]


@pytest.mark.parametrize(("path", "cases"), [(CHAT, BOTH + ONLY_CHAT), (COMPLETIONS, BOTH + ONLY_COMPLETIONS)])
def test_wrong_values(shared: Server, path: str, cases: list[Case]) -> None:
    check_all(shared, path, cases)
    assert shared.chat().json()["choices"][0]["message"]["content"] == "ok"


REPORTED: list[tuple[str, str]] = [
    *[("temperature", value) for value in ("NaN", "Infinity", "-1", '"hot"')],
    *[("top_p", value) for value in ("0", "1.5", "NaN")],
    ("top_k", "-2"),
    ("min_p", "2"),
    *[(name, value) for name in ("presence_penalty", "frequency_penalty", "repetition_penalty") for value in ("NaN", "99")],
    *[("seed", value) for value in (str(2**63), '"7"', "1.5")],
    *[("max_tokens", value) for value in ("-1", "1.5", "true", str(10**12))],
    *[("stop_token_ids", value) for value in ("[-1]", f"[{10**20}]")],
    *[("logit_bias", value) for value in ('{"x":1}', '{"99999999":1}', '{"1":NaN}')],
    ("bad_words", '[""]'),
]
"""Values that are known to have broken servers, as they stand in a body."""


@pytest.mark.parametrize(("field", "value"), REPORTED)
def test_reported_values(shared: Server, field: str, value: str) -> None:
    for path in (CHAT, COMPLETIONS):
        for stream in (False, True):
            inside = json.dumps(body(path, stream=stream))[1:-1]
            response = shared.client.post(path, content=f'{{{inside}, "{field}": {value}}}', headers={"content-type": "application/json"})
            error = response.json()["error"]
            assert response.status_code == 400
            assert error["param"].partition("[")[0].partition(".")[0] == field
            assert field in error["message"]
    assert shared.complete().status_code == 200


def test_reported_values_of_one_route(shared: Server) -> None:
    check(shared, CHAT, json.dumps(body(CHAT, logprobs=True, top_logprobs=50)).encode(), "top_logprobs")
    check(shared, CHAT, json.dumps(body(CHAT, top_logprobs=2)).encode(), "top_logprobs")
    refused = shared.post("/detokenize", {"tokens": [-1]})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "tokens[0]")
    for path in (CHAT, COMPLETIONS, "/tokenize", "/detokenize"):
        for raw in (b"[]", b"{", b"[" * 10_000 + b"]" * 10_000):
            check(shared, path, raw, None)


def test_a_stream_has_no_place_for_prompt_logprobs(shared: Server) -> None:
    for path in (CHAT, COMPLETIONS):
        error = check(shared, path, json.dumps(body(path, stream=True, prompt_logprobs=0)).encode(), "prompt_logprobs")
        assert "stream" in error["message"]
        assert shared.post(path, body(path, prompt_logprobs=0)).status_code == 200


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_min_tokens_beyond_the_answer(shared: Server, path: str) -> None:
    for fields in ({"max_tokens": 5, "min_tokens": 6}, {"min_tokens": 511}):
        error = check(shared, path, json.dumps(body(path, **fields)).encode(), "min_tokens")
        assert str(fields["min_tokens"]) in error["message"]
    assert shared.post(path, body(path, max_tokens=5, min_tokens=5)).status_code == 200


def test_too_many_ids_that_min_tokens_would_hold_back(shared: Server) -> None:
    ids = list(range(130))
    most = 128 - len(defaults().stop_ids)
    for path in (CHAT, COMPLETIONS):
        for fields in ({"stop_token_ids": ids[: most + 1]}, {"stop_token_ids": ids[:129], "ignore_eos": True}):
            error = check(shared, path, json.dumps(body(path, max_tokens=5, min_tokens=1, **fields)).encode(), "stop_token_ids")
            assert "129" in error["message"]
            assert shared.post(path, body(path, max_tokens=5, **fields)).status_code == 200
        for fields in ({"stop_token_ids": ids[:most]}, {"stop_token_ids": ids[:128], "ignore_eos": True}):
            assert shared.post(path, body(path, max_tokens=5, min_tokens=1, **fields)).status_code == 200


def test_nothing_left_to_draw(shared: Server) -> None:
    token = byte_tokens("z")[0]
    ends = list(defaults().stop_ids)
    for path in (CHAT, COMPLETIONS):
        for fields in (
            {"allowed_token_ids": [token], "bad_words": ["z"]},
            {"allowed_token_ids": ends, "min_tokens": 1},
            {"allowed_token_ids": [token], "stop_token_ids": [token], "min_tokens": 1},
            {"allowed_token_ids": [*ends, token], "bad_words": ["z"], "min_tokens": 2},
        ):
            check(shared, path, json.dumps(body(path, max_tokens=5, **fields)).encode(), "allowed_token_ids")
        for fields in ({"allowed_token_ids": ends}, {"allowed_token_ids": [token], "bad_words": ["zz"]}):
            assert shared.post(path, body(path, max_tokens=5, **fields)).status_code == 200


def test_prompt_logprobs_are_bounded(serve: Callable[..., Server]) -> None:
    """(n - 1) (12 (1 + k) + 8) bytes, of all prompts together, and of every choice where each tells of them."""
    server = serve(ScriptEngine(byte_tokens("ok"), max_model_len=10**6), max_logprobs=-1)
    size = 12 * (1 + SIZE) + 8
    most = (64 << 20) // size
    for prompt, k in (([5] * (most + 2), SIZE), ([5] * (most + 2), -1), ([[5] * (most // 2 + 2)] * 2, -1)):
        error = check(server, COMPLETIONS, json.dumps(body(COMPLETIONS, prompt=prompt, prompt_logprobs=k)).encode(), "prompt_logprobs")
        assert str(64 << 20) in error["message"]
    long = [5] * ((64 << 20) // 260 + 2)
    check(server, COMPLETIONS, json.dumps(body(COMPLETIONS, prompt=long, prompt_logprobs=20)).encode(), "prompt_logprobs")
    echoed = {"prompt": long, "logprobs": 20, "echo": True}
    check(server, COMPLETIONS, json.dumps(body(COMPLETIONS, **echoed)).encode(), "logprobs")
    several = {"prompt": long[: len(long) // 2 + 2], "logprobs": 20, "echo": True, "n": 2, "stream": True}
    check(server, COMPLETIONS, json.dumps(body(COMPLETIONS, **several)).encode(), "logprobs")


def test_limits_that_the_server_sets(serve: Callable[..., Server]) -> None:
    server = serve(ScriptEngine(byte_tokens("ok")), max_logprobs=3)
    for path, fields, param in (
        (CHAT, {"logprobs": True, "top_logprobs": 4}, "top_logprobs"),
        (COMPLETIONS, {"logprobs": 4}, "logprobs"),
        (COMPLETIONS, {"prompt_logprobs": 4}, "prompt_logprobs"),
        (CHAT, {"prompt_logprobs": -1}, "prompt_logprobs"),
    ):
        error = check(server, path, json.dumps(body(path, **fields)).encode(), param)
        assert "between 0 and 3 (api.max_logprobs)" in error["message"]
    everything = serve(ScriptEngine(byte_tokens("ok")), max_logprobs=-1)
    for fields in ({"logprobs": True, "top_logprobs": -1}, {"prompt_logprobs": -1}, {"prompt_logprobs": SIZE}):
        assert everything.chat(**fields).status_code == 200
    check(everything, CHAT, json.dumps(body(CHAT, prompt_logprobs=SIZE + 1)).encode(), "prompt_logprobs")


@pytest.fixture(scope="module")
def odd_checkpoint() -> Iterator[Server]:
    """A checkpoint with many ids that end an answer."""
    many = replace(defaults(), stop_ids=tuple(range(129)))
    with serving(ScriptEngine([*byte_tokens("ok"), tokenizer().added["<|im_end|>"]]), defaults=many) as server:
        yield server


def test_a_checkpoint_with_many_ends(odd_checkpoint: Server) -> None:
    check(odd_checkpoint, CHAT, json.dumps(body(CHAT, max_tokens=5, min_tokens=1)).encode(), "stop_token_ids")
    assert odd_checkpoint.chat(max_tokens=5, min_tokens=1, ignore_eos=True).status_code == 200

"""Every malformed body is a 400 that names the field, before anything is computed, and the next request is served."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from support.refusals import CHAT, COMPLETIONS, SIZE, USER, Case, body, check, check_all
from support.script_engine import ScriptEngine, Server
from support.text import byte_tokens

TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}

BOTH: list[Case] = [
    ("temperature", -1, "temperature"),
    ("temperature", "hot", "temperature"),
    ("temperature", True, "temperature"),
    ("temperature", [1], "temperature"),
    ("top_p", 0, "top_p"),
    ("top_p", 1.5, "top_p"),
    ("top_k", -2, "top_k"),
    ("top_k", 1.5, "top_k"),
    ("top_k", 10**20, "top_k"),
    ("min_p", 2, "min_p"),
    ("seed", 2**63, "seed"),
    ("seed", "7", "seed"),
    ("seed", 1.5, "seed"),
    ("seed", True, "seed"),
    ("n", 0, "n"),
    ("n", 129, "n"),
    ("n", "2", "n"),
    ("max_tokens", 0, "max_tokens"),
    ("max_tokens", -1, "max_tokens"),
    ("max_tokens", 1.5, "max_tokens"),
    ("max_tokens", True, "max_tokens"),
    ("max_tokens", 10**12, "max_tokens"),
    ("max_tokens", 10**40, "max_tokens"),
    ("stop", "", "stop"),
    ("stop", [""], "stop[0]"),
    ("stop", ["a", 1], "stop[1]"),
    ("stop", ["a"] * 20, "stop"),
    ("stop", "x" * 1025, "stop"),
    ("stop", {"a": 1}, "stop"),
    ("stop_token_ids", [-1], "stop_token_ids[0]"),
    ("stop_token_ids", [0, 10**20], "stop_token_ids[1]"),
    ("stop_token_ids", [True], "stop_token_ids[0]"),
    ("stop_token_ids", 5, "stop_token_ids"),
    ("stop_token_ids", [SIZE], "stop_token_ids[0]"),
    ("stream", "yes", "stream"),
    ("stream", 1, "stream"),
    ("stream_options", {"include_usage": True}, "stream_options"),
    ("ignore_eos", 1, "ignore_eos"),
    ("return_token_ids", "x", "return_token_ids"),
    ("model", 5, "model"),
    ("request_id", "with space", "request_id"),
    ("request_id", 5, "request_id"),
    ("length_penalty", 2, "length_penalty"),
    ("typical_p", 0.5, "typical_p"),
    ("grammar", "root ::= x", "grammar"),
    ("logits_processors", ["x"], "logits_processors"),
    ("response_format", {"type": "json_object"}, "response_format"),
    ("structured_outputs", {"regex": "a"}, "structured_outputs"),
    ("guided_json", {}, "guided_json"),
    ("guided_regex", "a", "guided_regex"),
    ("guided_choice", ["a"], "guided_choice"),
    ("guided_grammar", "x", "guided_grammar"),
    ("return_prompt_text", 1, "return_prompt_text"),
    ("kv_transfer_params", 5, "kv_transfer_params"),
    ("vllm_xargs", [], "vllm_xargs"),
    ("use_beam_search", True, "use_beam_search"),
]

ONLY_CHAT: list[Case] = [
    ("enable_thinking", True, "enable_thinking"),
    ("thinking", {"type": "enabled"}, "thinking"),
    ("best_of", 3, "best_of"),
    ("messages", None, "messages"),
    ("messages", [], "messages"),
    ("messages", "hi", "messages"),
    ("messages", {"role": "user"}, "messages"),
    ("messages", ["hi"], "messages[0]"),
    ("messages", [{"content": "hi"}], "messages[0].role"),
    ("messages", [{"role": "robot", "content": "hi"}], "messages[0].role"),
    ("messages", [{"role": "user", "content": 5}], "messages[0].content"),
    ("messages", [*USER, {"role": "user", "content": ["x"]}], "messages[1].content[0]"),
    ("messages", [{"role": "user", "content": [{"type": "poem"}]}], "messages[0].content[0].type"),
    ("messages", [{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text"),
    ("messages", [{"role": "user", "content": [{"type": "text", "text": 5}]}], "messages[0].content[0].text"),
    ("messages", [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}], "messages[0].content[0].type"),
    ("messages", [{"role": "assistant", "tool_calls": [{"function": {}}]}], "messages[0].tool_calls[0].function.name"),
    *(("messages", [*USER, {"role": "assistant", "content": value}], "messages[1].content") for value in (0, 0.0, False, {}, True, 1)),
    ("messages", [{"role": "assistant", "tool_calls": "x"}], "messages[0].tool_calls"),
    ("messages", [{"role": "assistant", "reasoning": 5}], "messages[0].reasoning"),
    ("messages", [{"role": "assistant", "function_call": {"name": "f"}}], "messages[0].function_call"),
    ("max_completion_tokens", 0, "max_completion_tokens"),
    ("tools", [], "tools"),
    ("tools", [{"type": "web_search"}], "tools[0].type"),
    ("tools", [{"type": "function", "function": {"name": 5}}], "tools[0].function.name"),
    ("tools", [{"type": "function", "function": {"name": "f", "parameters": []}}], "tools[0].function.parameters"),
    ("tools", [TOOL], "tools"),
    ("tool_choice", "auto", "tool_choice"),
    ("functions", [{"name": "f"}], "functions"),
    ("modalities", ["text", "audio"], "modalities"),
    ("audio", {"voice": "x"}, "audio"),
    ("prediction", {"type": "content", "content": "x"}, "prediction"),
    ("reasoning_effort", "x", "reasoning_effort"),
    ("reasoning_effort", 5, "reasoning_effort"),
    ("include_reasoning", "x", "include_reasoning"),
    ("chat_template", "{{ 1 }}", "chat_template"),
    ("chat_template_kwargs", [], "chat_template_kwargs"),
    ("chat_template_kwargs", {"enable_thinking": "no"}, "chat_template_kwargs.enable_thinking"),
    ("chat_template_kwargs", {"messages": []}, "chat_template_kwargs.messages"),
    ("continue_final_message", True, "continue_final_message"),
    ("documents", [{"text": "x"}], "documents"),
    ("echo", True, "echo"),
]

ONLY_COMPLETIONS: list[Case] = [
    ("prompt", None, "prompt"),
    ("prompt", "", "prompt"),
    ("prompt", [], "prompt"),
    ("prompt", [[]], "prompt[0]"),
    ("prompt", ["a", ""], "prompt[1]"),
    ("prompt", ["a", 1], "prompt[1]"),
    ("prompt", [1, "a"], "prompt[1]"),
    ("prompt", [[1], "a"], "prompt[1]"),
    ("prompt", [1.0], "prompt[0]"),
    ("prompt", [True], "prompt[0]"),
    ("prompt", [[1, -1]], "prompt[0][1]"),
    ("prompt", [SIZE], "prompt[0]"),
    ("prompt", {"a": 1}, "prompt"),
    ("prompt", ["a"] * 1025, "prompt"),
    ("suffix", "x", "suffix"),
    ("best_of", 2, "best_of"),
]


@pytest.mark.parametrize(("path", "cases"), [(CHAT, BOTH + ONLY_CHAT), (COMPLETIONS, BOTH + ONLY_COMPLETIONS)])
def test_wrong_values(shared: Server, path: str, cases: list[Case]) -> None:
    check_all(shared, path, cases)
    assert shared.chat().json()["choices"][0]["message"]["content"] == "ok"


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize(
    ("text", "param"),
    [
        ('{"temperature": NaN}', "temperature"),
        ('{"temperature": Infinity}', "temperature"),
        ('{"top_p": -Infinity}', "top_p"),
        ('{"logit_bias": {"1": NaN}}', "logit_bias.1"),
        ('{"stop_token_ids": [1, 1e999]}', "stop_token_ids[1]"),
        ('{"seed": ' + "9" * 3000 + "}", "seed"),
        ('{"seed": ' + "9" * 30000 + "}", None),
        ('{"messages": [{"role": "user", "content": "\\ud800"}]}', "messages[0].content"),
        ('{"prompt": "\\udc00 x"}', "prompt"),
        ('{"\\ud800": NaN}', "\\ud800"),
        ('{"\\ud800": 1}', "\\ud800"),
        ('{"a": {"\\ud800": "\\ud801"}}', "a.\\ud800"),
        ('{"a": [{"é\\udfffé": [NaN]}]}', "a[0].é\\udfffé"),
        ('{"' + "k" * 3000 + '": {"l": NaN}}', "k" * 200 + "..."),
        ('{"": NaN}', None),
        ("NaN", None),
        ("[]", None),
        ("{", None),
        ("", None),
        ("null", None),
        ('"x"', None),
        ("{}{}", None),
        ("[" * 10_000 + "]" * 10_000, None),
        ('{"tools": ' + "[" * 120 + "]" * 120 + "}", None),
        ('{"messages": "' + "x" * 3_000_000, None),
    ],
)
def test_wrong_json(shared: Server, path: str, text: str, param: str | None) -> None:
    check(shared, path, text.encode(), param)


def test_wrong_utf8(shared: Server) -> None:
    check(shared, CHAT, b'{"messages": [{"role": "user", "content": "\xff"}]}', None)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", None),
        ("temperature", 0),
        ("top_p", 1),
        ("top_k", -1),
        ("seed", -1),
        ("seed", -(2**63)),
        ("stop", None),
        ("stop", []),
        ("frequency_penalty", 0),
        ("repetition_penalty", 1.0),
        ("presence_penalty", None),
        ("allowed_token_ids", None),
        ("bad_words", []),
        ("repetition_detection", None),
        ("use_beam_search", False),
        ("kv_transfer_params", {"a": 1}),
        ("vllm_xargs", {"a": "b"}),
        ("logit_bias", {}),
        ("logprobs", None),
        ("response_format", {"type": "text"}),
        ("user", "someone"),
        ("metadata", {"a": "b"}),
        ("no_such_field", {"a": [1]}),
        ("model", ""),
        ("model", None),
        ("model", "other"),
        ("stream_options", None),
        ("ignore_eos", True),
    ],
)
def test_neutral_values(shared: Server, field: str, value: Any) -> None:
    for path in (CHAT, COMPLETIONS):
        response = shared.post(path, body(path, max_tokens=2, **{field: value}))
        assert response.status_code == 200, response.text
        assert response.json()["model"] == "tiny"


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": [TOOL], "tool_choice": "none"},
        {"tools": None, "tool_choice": "none"},
        {"logprobs": False, "top_logprobs": 0},
        {"reasoning_effort": "max", "chat_template_kwargs": {"enable_thinking": False, "extra": ["<|im_end|>"]}},
        {"max_tokens": 5, "max_completion_tokens": 5},
        {"parallel_tool_calls": True, "store": False, "service_tier": "auto"},
    ],
)
def test_neutral_values_of_chat(shared: Server, fields: dict[str, Any]) -> None:
    assert shared.chat(**fields).status_code == 200


KINDS: list[Any] = [0, 0.0, False, "", [], {}]
"""The empty value of every JSON type: what `if value` passes over."""

TAKEN: dict[str, Any] = {
    "string": ("",),
    "list": ([],),
    "object": ({},),
    "boolean": (False,),
    "number": (0, 0.0),
    "integer": (0,),
    "none": (),
}
"""Which of them a field of a type may hold."""

FIELDS_BY_TYPE: dict[str, str] = {
    "string": "model",
    "boolean": """
        stream ignore_eos return_token_ids skip_special_tokens include_stop_str_in_output use_beam_search logprobs
        include_reasoning continue_final_message add_generation_prompt echo return_tokens_as_token_ids
        spaces_between_special_tokens return_prompt_text
        """,
    "none": """
        n top_p max_tokens stream_options request_id repetition_penalty response_format messages max_completion_tokens tools
        tool_choice reasoning_effort allowed_token_ids cache_salt truncate_prompt_tokens truncation_side
        """,
    "list": "stop stop_token_ids bad_words functions",
    "number": "temperature min_p frequency_penalty presence_penalty",
    "integer": "seed min_tokens top_logprobs prompt_logprobs priority thinking_token_budget",
    "object": "logit_bias chat_template_kwargs repetition_detection kv_transfer_params vllm_xargs",
}
EMPTY = {name: kind for kind, names in FIELDS_BY_TYPE.items() for name in names.split()}

OF_A_MESSAGE: list[tuple[str, str, str]] = [
    ("user", "content", "string"),
    ("system", "content", "string"),
    ("tool", "content", "string"),
    ("assistant", "content", "string list"),
    ("assistant", "reasoning", "string"),
    ("assistant", "reasoning_content", "string"),
    ("assistant", "tool_calls", "list"),
    ("tool", "tool_call_id", "string"),
    ("user", "role", "none"),
]


def test_an_empty_value_of_the_wrong_type_is_not_taken_for_nothing(shared: Server) -> None:
    bodies = [(body(CHAT, **{name: value}), kinds, value, name) for name, kinds in EMPTY.items() for value in KINDS]
    for role, name, kinds in OF_A_MESSAGE:
        for value in KINDS:
            message = {"role": role, "content": "x", name: value}
            bodies.append((body(CHAT, messages=[*USER, message, *USER]), kinds, value, f"messages[1].{name}"))
    for fields, kinds, value, path in bodies:
        legal = [item for kind in kinds.split() for item in TAKEN[kind]]
        if any(value == item and type(value) is type(item) for item in legal):
            assert shared.post(CHAT, {"max_tokens": 1, **fields}).status_code == 200, (path, value)
        else:
            check(shared, CHAT, json.dumps(fields).encode(), path)


def test_more_answers_than_can_ever_be_queued(serve: Callable[..., Server]) -> None:
    server = serve(ScriptEngine(byte_tokens("ok")), schedule={"max_queue": 6, "max_num_seqs": 2})
    assert len(server.complete(prompt=["a", "b"], n=4, max_tokens=1).json()["choices"]) == 8
    for path, fields, param in (
        (COMPLETIONS, {"prompt": ["a", "b", "c"], "n": 3}, "prompt"),
        (COMPLETIONS, {"prompt": [[1]] * 9}, "prompt"),
        (COMPLETIONS, {"prompt": "a", "n": 9}, "n"),
        (COMPLETIONS, {"prompt": [1, 2, 3], "n": 9}, "n"),
        (CHAT, {"n": 9}, "n"),
    ):
        error = check(server, path, json.dumps(body(path, **fields)).encode(), param)
        for number in ("9 answers", "at most 8", "max_queue 6", "max_num_seqs 2"):
            assert number in error["message"]


def test_contradicting_lengths(shared: Server) -> None:
    error = check(shared, CHAT, json.dumps(body(CHAT, max_tokens=5, max_completion_tokens=6)).encode(), "max_completion_tokens")
    assert "5" in error["message"]
    assert "6" in error["message"]

"""Whatever JSON a client sends, a request is either understood or refused with an error about a field; nothing else is raised."""

import json
import re
import subprocess
import sys
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from revolta_serve.api import chat, completions, json_bounds
from revolta_serve.api.context import Api
from revolta_serve.api.errors import error_body
from revolta_serve.api.fields import parse_body, shown
from revolta_serve.api.generation import Generation
from revolta_serve.api.json_bounds import MAX_DEPTH
from revolta_serve.errors import RequestError
from revolta_serve.metrics import Metrics
from revolta_serve.text.reasoning import ThinkTokens
from revolta_serve.types import GenerateRequest
from support.script_engine import ScriptEngine, config
from support.text import defaults, template, tokenizer

ENGINE = ScriptEngine()
SIZE = tokenizer().size
API = Api(config(), ENGINE, tokenizer(), template(), defaults(), ThinkTokens(tokenizer()), Metrics("tiny", ENGINE.status, {}, ()))
NAMES = re.findall(
    r"\w+",
    """
messages model stream stream_options n stop stop_token_ids temperature top_p top_k min_p seed max_tokens max_completion_tokens
ignore_eos tools tool_choice response_format logprobs top_logprobs logit_bias chat_template_kwargs reasoning_effort continue_final_message
add_generation_prompt include_reasoning prompt echo suffix best_of bad_words role content tool_calls function name arguments type text
reasoning reasoning_content parameters enable_thinking include_usage""",
)
SAMPLING = re.findall(
    r"\w+",
    """
frequency_penalty presence_penalty repetition_penalty logit_bias allowed_token_ids bad_words min_tokens max_tokens seed n ignore_eos
stop_token_ids logprobs top_logprobs prompt_logprobs echo thinking_token_budget repetition_detection priority cache_salt
truncate_prompt_tokens truncation_side return_tokens_as_token_ids return_prompt_text spaces_between_special_tokens kv_transfer_params
vllm_xargs use_beam_search temperature top_p top_k min_p stream""",
)
NAMES += SAMPLING
INSIDE = ["max_pattern_size", "min_pattern_size", "min_count", "0", "1", "599", "600", "-1", "01"]
"""Names in the objects of sampling fields."""
ROLES = ["system", "developer", "user", "assistant", "tool"]

scalars = st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=6)
known = st.sampled_from([*NAMES, *ROLES, "text", "function", "none", "auto", "<|im_end|>", "</think>", 0, 1, 1.0, -1])
values = st.recursive(
    scalars | known,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(NAMES) | st.text(max_size=4), inner, max_size=5),
    max_leaves=12,
)
contents = (
    st.text(max_size=5) | st.lists(st.fixed_dictionaries({"type": st.just("text"), "text": st.text(max_size=5)}), max_size=3) | values
)
calls = st.lists(st.fixed_dictionaries({"function": st.fixed_dictionaries({"name": st.text(max_size=4), "arguments": values})}), max_size=2)
messages = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(ROLES), "content": contents},
        optional={"tool_calls": calls | values, "reasoning": st.text(max_size=4) | values},
    ),
    min_size=1,
    max_size=4,
)
extras = st.dictionaries(st.sampled_from(NAMES), values, max_size=3)


small = st.integers(-3, 700) | st.sampled_from([2**31, 2**63, 10**20, -(10**20)])
numbers_and_more = small | st.floats(allow_nan=False, allow_infinity=False) | st.booleans() | st.text(max_size=3) | st.none()
sampled = st.dictionaries(
    st.sampled_from(SAMPLING),
    numbers_and_more
    | st.lists(numbers_and_more, max_size=4)
    | st.dictionaries(st.sampled_from(INSIDE), numbers_and_more, max_size=3)
    | st.lists(st.text(max_size=4), max_size=3),
    max_size=4,
)


def legal(request: GenerateRequest) -> None:
    """What the engine may rely on."""
    sampling = request.sampling
    assert msgspec.convert(msgspec.to_builtins(request), GenerateRequest) == request
    assert all(0 <= token < SIZE for token, _ in sampling.logit_bias)
    assert all(-100 <= value <= 100 for _, value in sampling.logit_bias)
    assert all(0 <= token < SIZE for word in (sampling.allowed_tokens, sampling.ending_tokens, *sampling.bad_words) for token in word)
    assert all(sampling.bad_words), "no empty sequence"
    assert 0 <= sampling.min_tokens <= request.max_tokens
    assert len(sampling.ending_tokens) <= 128
    assert -1 <= sampling.logprobs <= 20
    assert -1 <= sampling.prompt_logprobs <= 20
    assert 0 <= sampling.seed < 2**63
    assert 0.01 <= sampling.repetition_penalty <= 10
    assert max(abs(sampling.presence_penalty), abs(sampling.frequency_penalty)) <= 2
    assert list(request.boundaries) == sorted(set(request.boundaries))
    assert request.boundaries[-1] == len(request.prompt)
    assert request.boundaries[0] > 0
    assert request.opening in (0, *request.boundaries)
    assert request.priority == 0
    if request.repetition is not None:
        assert 1 <= request.repetition.shortest <= request.repetition.longest
        assert request.repetition.count >= 2


def understood_or_refused(reader: Any, body: dict[str, Any]) -> None:
    fields = parse_body(msgspec.json.encode(body))
    refusal: RequestError | None = None
    try:
        plan = reader(API, fields)
    except RequestError as error:
        refusal = error
    if refusal is not None:
        assert refusal.param
        assert 400 <= refusal.status < 500
        assert 0 < len(msgspec.json.encode(error_body(refusal))) < 4000
        return
    assert all(0 < len(prompt.ids) < ENGINE.max_model_len for prompt in plan.prompts)
    assert all(1 <= prompt.max_tokens <= ENGINE.max_model_len - len(prompt.ids) for prompt in plan.prompts)
    for request in Generation(API, "r", plan.prompts, plan.options, None).requests:
        legal(request)


@settings(deadline=None, max_examples=300)
@given(messages, extras)
def test_chat(turns: list[Any], fields: dict[str, Any]) -> None:
    understood_or_refused(chat.read_chat, {"messages": turns, **fields})


@settings(deadline=None, max_examples=200)
@given(st.text(max_size=8) | st.lists(st.integers(0, 600) | st.text(max_size=3), max_size=4) | values, extras)
def test_completions(prompt: Any, fields: dict[str, Any]) -> None:
    understood_or_refused(completions.read_completion, {"prompt": prompt, **fields})


@settings(deadline=None, max_examples=400)
@given(sampled, st.booleans())
def test_sampling_fields(fields: dict[str, Any], chatting: bool) -> None:
    if chatting:
        understood_or_refused(chat.read_chat, {"messages": [{"role": "user", "content": "hi"}], **fields})
    else:
        understood_or_refused(completions.read_completion, {"prompt": "hi", **fields})


def an_object_or_an_error(raw: bytes) -> None:
    """Whatever it is: a body is read as any other reader of JSON reads it, or refused with an error that can be sent."""
    try:
        fields = parse_body(raw)
    except RequestError as error:
        sent = json.loads(msgspec.json.encode(error_body(error)))["error"]
        assert 0 < len(sent["message"]) < 600
        assert sent["param"] is None or (sent["param"] and sent["message"].startswith(f"{sent['param']}: "))
        return
    assert isinstance(fields.raw, dict)
    assert fields.raw == json.loads(raw)


@settings(deadline=None)
@given(st.binary(max_size=40))
def test_any_bytes(raw: bytes) -> None:
    an_object_or_an_error(raw)


pieces = st.sampled_from(
    [*"aé🙂,:[]{}\x7f\ud800\n", r"\ud800", r"\udfff", r"\uDFFF\ud800", r"\ud83d\ude42", r"\u0000", r"\"", r"\\", r"\/", r"\n", "k" * 70]
)
texts = st.lists(pieces, max_size=4).map(lambda parts: f'"{"".join(parts)}"')
numbers = st.sampled_from(
    [
        *["0", "-0", "1.5", "1e5", "NaN", "Infinity", "-Infinity", "1e999", "-1e999", "1e-999", "01", "+1"],
        *[".5", "1.", "0x1", "nan", "--1"],
        *("9" * 30, "-" + "9" * 50, "9" * 5000, "0." + "1" * 400),
    ]
)
json_texts = st.recursive(
    texts | numbers | st.sampled_from(["true", "false", "null", "", "True"]),
    lambda inner: (
        st.lists(inner, max_size=3).map(lambda items: f"[{','.join(items)}]")
        | st.lists(st.tuples(texts | st.sampled_from([f'"{name}"' for name in NAMES]), inner), max_size=3).map(
            lambda items: "{" + ",".join(f"{key}: {value}" for key, value in items) + "}"
        )
    ),
    max_leaves=8,
)


@settings(deadline=None, max_examples=500)
@given(st.lists(st.tuples(texts | st.just('"prompt"'), json_texts), max_size=4))
def test_any_json_text(items: list[tuple[str, str]]) -> None:
    """JSON with the names, texts and numbers that readers disagree on, and what is nearly JSON."""
    text = "{" + ",".join(f"{key}:{value}" for key, value in items) + "}"
    an_object_or_an_error(text.encode("utf-8", "surrogatepass"))


def depth_of(value: Any) -> int:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else None
    return 0 if inner is None else 1 + max(map(depth_of, inner), default=0)


@settings(deadline=None, max_examples=200)
@given(values, st.integers(2, 40))
def test_bounds_are_counted_as_a_decoder_would_count(value: Any, size: int) -> None:
    """Whatever texts contain and wherever the pieces are cut: here they are a few bytes."""
    raw = msgspec.json.encode(value)
    depth = depth_of(value)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_bounds, "PIECE", size)
        patch.setattr(json_bounds, "MAX_DEPTH", depth)
        json_bounds.check_bounds(raw)
        patch.setattr(json_bounds, "MAX_DEPTH", depth - 1)
        if depth:
            with pytest.raises(RequestError, match="too deeply"):
                json_bounds.check_bounds(raw)


def test_the_depth_limit() -> None:
    assert parse_body(b'{"a":' * (MAX_DEPTH - 1) + b"1" + b"}" * (MAX_DEPTH - 1))
    with pytest.raises(RequestError, match="too deeply"):
        parse_body(b'{"a":' * (MAX_DEPTH + 1) + b"1" + b"}" * (MAX_DEPTH + 1))


def test_values_in_messages_stay_short() -> None:
    for value in ("x" * 1000, list(range(1000)), {str(n): n for n in range(1000)}, 10**1000, ["x" * 1000], "é" * 70):
        assert len(shown(value)) <= 90


def test_text_and_api_do_without_torch() -> None:
    code = "import revolta_serve.api.app, revolta_serve.text.events, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0

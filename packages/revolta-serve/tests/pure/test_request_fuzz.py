"""Whatever JSON a client sends, a request is either understood or refused with an error about a field; nothing else is raised."""

import re
import subprocess
import sys
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from revolta_serve.api import chat, completions
from revolta_serve.api.context import Api
from revolta_serve.api.errors import error_body
from revolta_serve.api.fields import MAX_DEPTH, parse_body, shown
from revolta_serve.errors import RequestError
from revolta_serve.metrics import Metrics
from revolta_serve.text.reasoning import ThinkTokens
from support.script_engine import ScriptEngine, config
from support.text import defaults, template, tokenizer

ENGINE = ScriptEngine()
API = Api(config(), ENGINE, tokenizer(), template(), defaults(), ThinkTokens(tokenizer()), Metrics("tiny", ENGINE.status))
NAMES = re.findall(
    r"\w+",
    """
messages model stream stream_options n stop stop_token_ids temperature top_p top_k min_p seed max_tokens max_completion_tokens
ignore_eos tools tool_choice response_format logprobs top_logprobs logit_bias chat_template_kwargs reasoning_effort continue_final_message
add_generation_prompt include_reasoning prompt echo suffix best_of bad_words role content tool_calls function name arguments type text
reasoning reasoning_content parameters enable_thinking include_usage""",
)
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
    prompts = getattr(plan, "prompts", None) or [plan.prompt]
    assert all(0 < len(prompt.ids) < ENGINE.max_model_len for prompt in prompts)
    assert all(1 <= prompt.max_tokens <= ENGINE.max_model_len - len(prompt.ids) for prompt in prompts)


@settings(deadline=None, max_examples=300)
@given(messages, extras)
def test_chat(turns: list[Any], fields: dict[str, Any]) -> None:
    understood_or_refused(chat.read_chat, {"messages": turns, **fields})


@settings(deadline=None, max_examples=200)
@given(st.text(max_size=8) | st.lists(st.integers(0, 600) | st.text(max_size=3), max_size=4) | values, extras)
def test_completions(prompt: Any, fields: dict[str, Any]) -> None:
    understood_or_refused(completions.read_completion, {"prompt": prompt, **fields})


@settings(deadline=None)
@given(st.binary(max_size=40))
def test_any_bytes_are_an_object_or_an_error(raw: bytes) -> None:
    try:
        assert isinstance(parse_body(raw).raw, dict)
    except RequestError as error:
        msgspec.json.encode(error_body(error))


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

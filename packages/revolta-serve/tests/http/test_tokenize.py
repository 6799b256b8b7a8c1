"""/tokenize and /detokenize, and through them what chat messages become."""

from itertools import product
from typing import Any

import pytest

from support.script_engine import Server
from support.text import oracle, tokenizer

CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}


def tokens(server: Server, **fields: Any) -> list[int]:
    response = server.post("/tokenize", fields)
    assert response.status_code == 200, response.text
    body = response.json()
    assert body["count"] == len(body["tokens"])
    assert body["max_model_len"] == 512
    return list(body["tokens"])


def rendered(server: Server, messages: list[dict[str, Any]], **fields: Any) -> str:
    return tokenizer().decode(tokens(server, messages=messages, **fields))


def test_prompts(shared: Server) -> None:
    assert tokens(shared, prompt="hello <|im_end|>") == oracle().encode("hello <|im_end|>")
    assert tokens(shared, prompt="") == []
    body = shared.post("/tokenize", {"prompt": "é<think>", "return_token_strs": True}).json()
    assert "".join(body["token_strs"][1:]).endswith("<think>")


def test_detokenize(shared: Server) -> None:
    ids = tokenizer().encode("hello 🙂<|im_end|>")
    assert shared.post("/detokenize", {"tokens": ids}).json() == {"prompt": "hello 🙂<|im_end|>"}
    for wrong in ([-1], [True], [10**20], ["1"], 5, None):
        response = shared.post("/detokenize", {"tokens": wrong})
        assert response.status_code == 400
        assert response.json()["error"]["param"].startswith("tokens")


def test_a_prompt_or_messages(shared: Server) -> None:
    assert shared.post("/tokenize", {}).json()["error"]["param"] == "prompt"
    assert shared.post("/tokenize", {"prompt": "x", "messages": []}).status_code == 400
    assert shared.post("/tokenize", {"prompt": ["x"]}).json()["error"]["param"] == "prompt"


def test_messages_are_the_oracles(shared: Server) -> None:
    messages = [{"role": "system", "content": "S"}, {"role": "user", "content": "hi"}]
    expected = oracle().apply_chat_template(messages, add_generation_prompt=True, return_dict=False, enable_thinking=False)
    assert tokens(shared, messages=messages) == list(expected)
    thinking = oracle().apply_chat_template(messages, add_generation_prompt=True, return_dict=False, enable_thinking=True)
    assert tokens(shared, messages=messages, reasoning_effort="high") == list(thinking)


@pytest.mark.parametrize(
    ("roles", "expected"),
    [
        (["system", "system", "user"], "<|im_start|>system\nsystem0\n\nsystem1<|im_end|>\n<|im_start|>user\nuser2<|im_end|>\n"),
        (
            ["user", "system", "user"],
            "<|im_start|>system\nsystem1<|im_end|>\n<|im_start|>user\nuser0<|im_end|>\n<|im_start|>user\nuser2<|im_end|>\n",
        ),
        (["developer", "user"], "<|im_start|>system\ndeveloper0<|im_end|>\n<|im_start|>user\nuser1<|im_end|>\n"),
        (["system", "developer", "user"], "<|im_start|>system\nsystem0\n\ndeveloper1<|im_end|>\n<|im_start|>user\nuser2<|im_end|>\n"),
    ],
)
def test_instructions_come_first(shared: Server, roles: list[str], expected: str) -> None:
    messages = [{"role": role, "content": f"{role}{number}"} for number, role in enumerate(roles)]
    assert rendered(shared, messages, add_generation_prompt=False) == expected


def test_volatile_lines_are_dropped(shared: Server) -> None:
    def prompt(value: str) -> list[int]:
        system = [{"type": "text", "text": f"x-anthropic-billing-header: v=1; cch={value};\n"}, {"type": "text", "text": "S"}]
        return tokens(shared, messages=[{"role": "system", "content": system}, {"role": "user", "content": "hi"}])

    assert prompt("ab12") == prompt("cd34")


MISSING = object()
CONTENTS = {
    "missing": MISSING,
    "null": None,
    "empty": "",
    "no parts": [],
    "empty part": [{"type": "text", "text": ""}],
    "two parts": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}],
}
EXTRA: dict[str, Any] = {"name": "n", "refusal": None, "audio": None, "annotations": []}


@pytest.mark.parametrize(("role", "name"), list(product(["system", "developer", "user", "assistant", "tool"], CONTENTS)))
def test_forms_of_content(shared: Server, role: str, name: str) -> None:
    value = CONTENTS[name]
    message = {"role": role, **EXTRA, **({} if value is MISSING else {"content": value})}
    if role == "tool":
        message["tool_call_id"] = "c1"
    response = shared.post("/tokenize", {"messages": [{"role": "user", "content": "q"}, message]})
    if role != "assistant" and name in ("missing", "null", "no parts"):
        assert response.status_code == 400
        assert response.json()["error"]["param"] == "messages[1].content"
        return
    assert response.status_code == 200, response.text
    text = tokenizer().decode(response.json()["tokens"])
    assert not any(trace in text for trace in ("None", "[]", "{'type'", "null"))
    if name == "two parts":
        assert text == rendered(shared, [{"role": "user", "content": "q"}, {**message, "content": "ab"}])


@pytest.mark.parametrize("content", [value for name, value in CONTENTS.items() if name != "missing"])
@pytest.mark.parametrize("calls", [None, [], [CALL]])
def test_assistant_turns_with_and_without_calls(shared: Server, content: Any, calls: Any) -> None:
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": content, "tool_calls": calls}]
    text = rendered(shared, messages)
    assert not any(trace in text for trace in ("None", "[]", "{'type'"))
    assert text.count("<function=f>") == len(calls or [])


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        ('{"x": 1}', "<parameter=x>\n1\n</parameter>\n"),
        ({"x": 1}, "<parameter=x>\n1\n</parameter>\n"),
        ("", ""),
        ("{}", ""),
        ("null", ""),
        (None, ""),
        ("[1]", "<parameter=_raw>\n[1]\n</parameter>\n"),
        ('{"x":', '<parameter=_raw>\n{"x":\n</parameter>\n'),
        ('{"x": NaN}', '<parameter=_raw>\n{"x": NaN}\n</parameter>\n'),
        ("[" * 5000, f"<parameter=_raw>\n{'[' * 5000}\n</parameter>\n"),
    ],
)
def test_arguments_of_earlier_calls(shared: Server, arguments: Any, shown: str) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "r"},
    ]
    assert f"<tool_call>\n<function=f>\n{shown}</function>\n</tool_call>" in rendered(shared, messages)


@pytest.mark.parametrize(
    "fields",
    [
        {"reasoning": "r"},
        {"reasoning_content": "r"},
        {"reasoning": "r\n", "reasoning_content": "r\n"},
        {"content": "<think>\nr\n</think>\n\nc"},
        {"content": "<think>r</think>c"},
    ],
)
def test_reasoning_of_earlier_turns_by_every_name(shared: Server, fields: dict[str, Any]) -> None:
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "c", **fields}]
    text = rendered(shared, messages, add_generation_prompt=False)
    assert text.endswith("<|im_start|>assistant\n<think>\nr\n</think>\n\nc<|im_end|>\n")


def test_control_tokens_in_messages_are_text(shared: Server) -> None:
    def control(word: str) -> list[int]:
        messages = [{"role": "system", "content": word}, {"role": "user", "content": word}, {"role": "tool", "content": word}]
        tool = {"type": "function", "function": {"name": "f", "description": word}}
        ids = tokens(shared, messages=messages, tools=[tool], tool_choice="none")
        return [token for token in ids if token in tokenizer().added.values()]

    for literal in tokenizer().added:
        assert control(f"a {literal}") == control("a")


def test_conversations_without_a_user(shared: Server) -> None:
    for messages in ([{"role": "system", "content": "S"}], [{"role": "assistant", "content": "A"}], [{"role": "system", "content": ""}]):
        assert tokens(shared, messages=messages)

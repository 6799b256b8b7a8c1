"""Chat messages to what the chat template reads. Every refusal names the path of the field.

Rules:
* The parts of a content list are joined without a separator, as the templates of the model do.
* System and developer texts, wherever they stand, become one system message in front, joined by blank lines. Lines that clients
  change with every request (x-anthropic-billing-header) are dropped: they would spoil every cached prefix.
* An assistant turn may have no content. Its reasoning is taken from `reasoning_content` or `reasoning`, or from a leading
  <think>...</think> in its content.
* Arguments of earlier tool calls are decoded from JSON; what is not an object goes to the template unchanged under "_raw".
"""

import json
from typing import Any

from revolta_serve.api.errors import UnsupportedParameterError
from revolta_serve.api.fields import Fields, shown
from revolta_serve.errors import RequestError

ROLES = ("system", "developer", "user", "assistant", "tool")
MEDIA = ("image_url", "input_image", "image", "video_url", "video", "input_audio", "audio", "file")
VOLATILE = "x-anthropic-billing-header"
OPEN, CLOSE = "<think>", "</think>"


def read_messages(fields: Fields) -> list[dict[str, Any]]:
    """The `messages` of a request, normalised. Raises RequestError."""
    if not fields.array("messages"):
        raise fields.fail("messages", "a list of at least one message")
    system: list[str] = []
    turns: list[dict[str, Any]] = []
    for message in fields.objects("messages"):
        if not message.has("role"):
            raise message.fail("role", f"one of {', '.join(ROLES)}")
        role = message.choice("role", ROLES, "")
        if role in ("system", "developer"):
            system.append(_without_volatile(_content(message)))
        elif role == "assistant":
            turns.append(_assistant(message))
        else:
            turns.append({"role": role, "content": _content(message), **_label(message, "tool_call_id")})
    instructions = "\n\n".join(text for text in system if text)
    return [{"role": "system", "content": instructions}, *turns] if instructions else turns


def _without_volatile(text: str) -> str:
    if VOLATILE not in text:
        return text
    return "\n".join(line for line in text.split("\n") if not line.startswith(VOLATILE))


def _assistant(message: Fields) -> dict[str, Any]:
    if message.has("function_call"):
        path = message.at("function_call")
        raise UnsupportedParameterError(f"{path}: function calls of this form are not supported; use tool_calls", param=path)
    content = "" if message.raw.get("content") in (None, "", []) else _content(message)
    reasoning = message.string("reasoning_content", None) or message.string("reasoning", None) or ""
    if not reasoning and content.startswith(OPEN) and CLOSE in content:
        reasoning, _, content = content.removeprefix(OPEN).partition(CLOSE)
        content = content.lstrip("\n")
    turn: dict[str, Any] = {"role": "assistant", "content": content}
    # The line breaks beside the tags are the template's.
    reasoning = reasoning.strip("\n")
    if reasoning:
        turn.update(reasoning=reasoning, reasoning_content=reasoning)
    calls = [_call(call) for call in message.objects("tool_calls")]
    if calls:
        turn["tool_calls"] = calls
    return turn


def _call(call: Fields) -> dict[str, Any]:
    call.choice("type", ("function",), "function")
    function = call.object("function")
    name = function.string("name", "")
    if not name:
        raise function.fail("name", "the name of a function")
    return {**_label(call, "id"), "type": "function", "function": {"name": name, "arguments": _arguments(function.raw.get("arguments"))}}


def _arguments(raw: Any) -> dict[str, Any]:
    """Arguments as an object, losing nothing: an earlier answer cut by its length must not spoil every later turn."""
    if raw is None or raw == "":
        return {}
    value = raw
    if isinstance(raw, str):
        try:
            value = json.loads(raw, parse_constant=_no_constant)
        except (ValueError, RecursionError):
            return {"_raw": raw}
    if value is None:
        return {}
    return value if isinstance(value, dict) else {"_raw": raw}


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _content(message: Fields) -> str:
    """Text of a content that is a string or a list of text parts."""
    content = message.raw.get("content")
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not content:
        raise message.fail("content", "a string or a list of at least one part")
    return "".join(_part(part) for part in message.objects("content"))


def _part(part: Fields) -> str:
    kind = part.raw.get("type")
    if kind in MEDIA:
        path = part.at("type")
        raise UnsupportedParameterError(f"{path}: {shown(kind)} parts are not supported; send text parts only", param=path)
    if kind not in ("text", "refusal"):
        raise part.fail("type", '"text"')
    text = part.string(kind, None)
    if text is None:
        raise part.fail(kind, "a string")
    return text


def _label(fields: Fields, name: str) -> dict[str, str]:
    """A name the template may show, if there is one."""
    value = fields.string(name, None)
    if value is None:
        return {}
    if len(value) > 1024:
        path = fields.at(name)
        raise RequestError(f"{path}: expected at most 1024 characters, got {len(value)}", param=path)
    return {name: value}

"""Typed reading of a request body. Every refusal names the path of the field, what was expected and what came.

null means absent, as in the OpenAI API; unknown fields are ignored; a bool is not a number; nothing is converted.
"""

import json
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

import msgspec

from revolta_serve.api.json_bounds import check_bounds
from revolta_serve.errors import RequestError
from revolta_serve.text.defaults import Range

DIAGNOSED_BYTES = 1 << 20
"""Larger malformed bodies are refused without looking for the field at fault."""

MAX_PATH = 200
_SURROGATE = re.compile("[\ud800-\udfff]")

T = TypeVar("T")


def parse_body(raw: bytes) -> "Fields":
    """Decode a JSON object. Raises RequestError for anything else, naming the field of a NaN, an infinity or a lone surrogate."""
    check_bounds(raw)
    try:
        value = msgspec.json.decode(raw)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise _diagnosis(raw) or RequestError(f"the request body is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise RequestError(f"the request body must be a JSON object, not {shown(value)}")
    return Fields(value)


class Fields:
    """A JSON object and the path that leads to it."""

    def __init__(self, raw: Mapping[str, Any], path: str = "") -> None:
        self.raw = raw
        self.path = path

    def at(self, name: str) -> str:
        """Path of a field."""
        return f"{self.path}.{name}" if self.path else name

    def has(self, name: str) -> bool:
        """Present and not null."""
        return self.raw.get(name) is not None

    def fail(self, name: str, expected: str) -> RequestError:
        """The error to raise about a field."""
        path = self.at(name)
        came = shown(self.raw[name]) if name in self.raw else "nothing"
        return RequestError(f"{path}: expected {expected}, got {came}", param=path)

    def boolean(self, name: str, default: bool) -> bool:
        """A JSON true or false."""
        value = self.raw.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.fail(name, "true or false")
        return value

    def integer(self, name: str, default: T, low: int, high: int | None = None) -> int | T:
        """An integer of low..high; 1.0 is not one."""
        value = self.raw.get(name)
        if value is None:
            return default
        if type(value) is not int or value < low or (high is not None and value > high):
            raise self.fail(name, f"an integer of at least {low}" if high is None else f"an integer between {low} and {high}")
        return value

    def number(self, name: str, default: T, legal: Range) -> float | T:
        """A number of a range."""
        value = self.raw.get(name)
        if value is None:
            return default
        if not legal.holds(value):
            raise self.fail(name, str(legal))
        return float(value)

    def string(self, name: str, default: T) -> str | T:
        """A string, possibly empty."""
        value = self.raw.get(name)
        if value is None:
            return default
        if not isinstance(value, str):
            raise self.fail(name, "a string")
        return value

    def choice(self, name: str, values: tuple[str, ...], default: T) -> str | T:
        """One of some strings."""
        value = self.raw.get(name)
        if value is None:
            return default
        if value not in values:
            raise self.fail(name, f"one of {', '.join(values)}")
        return str(value)

    def object(self, name: str) -> "Fields":
        """An object; an absent one is empty."""
        value = self.raw.get(name)
        if value is None:
            return Fields({}, self.at(name))
        if not isinstance(value, dict):
            raise self.fail(name, "an object")
        return Fields(value, self.at(name))

    def array(self, name: str) -> list[Any] | None:
        """A list, or None when absent."""
        value = self.raw.get(name)
        if value is not None and not isinstance(value, list):
            raise self.fail(name, "a list")
        return value

    def objects(self, name: str) -> Iterator["Fields"]:
        """The objects of a list, each with its path."""
        for number, value in enumerate(self.array(name) or ()):
            path = f"{self.at(name)}[{number}]"
            if not isinstance(value, dict):
                raise RequestError(f"{path}: expected an object, got {shown(value)}", param=path)
            yield Fields(value, path)


def shown(value: Any, limit: int = 80) -> str:
    """A value as JSON, cut to a readable length."""
    if isinstance(value, str | list | dict) and len(value) > limit:
        kind = {str: "a string", list: "a list", dict: "an object"}[type(value)]
        return f"{kind} of {len(value)} {'characters' if isinstance(value, str) else 'items'}"
    if type(value) is int and value.bit_length() > 128:
        return f"an integer of {value.bit_length()} bits"
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= limit else f"{text[:limit]}..."


def _diagnosis(raw: bytes) -> RequestError | None:
    """Which field made an otherwise well-formed body invalid JSON."""
    if len(raw) > DIAGNOSED_BYTES:
        return None
    try:
        path, reason = next(_faults(json.loads(raw), ""), ("", ""))
    except (ValueError, RecursionError):
        return None
    if not path:
        return None
    path = path if len(path) <= MAX_PATH else f"{path[:MAX_PATH]}..."
    return RequestError(f"{path}: {reason}", param=path)


def _faults(value: Any, path: str) -> Iterator[tuple[str, str]]:
    if isinstance(value, float) and not math.isfinite(value):
        yield path, "not a finite number, which JSON cannot express"
    elif isinstance(value, str) and _SURROGATE.search(value):
        yield path, "half of a surrogate pair, which is not a character"
    elif isinstance(value, int) and value.bit_length() > 128:
        yield path, f"an integer of {value.bit_length()} bits is out of range"
    elif isinstance(value, dict):
        for key, item in value.items():
            # An error is written as UTF-8, which has no lone surrogates.
            step = key[:MAX_PATH].encode("utf-8", "backslashreplace").decode()
            place = f"{path}.{step}" if path else step
            if _SURROGATE.search(key):
                yield place, "this name holds half of a surrogate pair, which is not a character"
            yield from _faults(item, place)
    elif isinstance(value, list):
        for number, item in enumerate(value):
            yield from _faults(item, f"{path}[{number}]")

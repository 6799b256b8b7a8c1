"""Typed reading of a request body. Every refusal names the path of the field, what was expected and what came.

null means absent, as in the OpenAI API; unknown fields are ignored; a bool is not a number; nothing is converted.
"""

import json
import math
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

import msgspec

from revolta_serve.errors import RequestError

MAX_DEPTH = 100
"""Levels of nesting in a body; real tool schemas stay far below."""

DIAGNOSED_BYTES = 1 << 20
"""Larger malformed bodies are refused without looking for the field at fault."""

T = TypeVar("T")


def parse_body(raw: bytes) -> "Fields":
    """Decode a JSON object. Raises RequestError for anything else, naming the field of a NaN, an infinity or a lone surrogate."""
    try:
        value = msgspec.json.decode(raw)
    except RecursionError:
        raise RequestError(f"the request body is nested too deeply; at most {MAX_DEPTH} levels are read") from None
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise _diagnosis(raw) or RequestError(f"the request body is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise RequestError(f"the request body must be a JSON object, not {shown(value)}")
    _check_depth(value)
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

    def number(self, name: str, default: T, low: float, high: float, *, above: bool = False) -> float | T:
        """A number of low..high, or above low and up to high."""
        value = self.raw.get(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high or (above and value == low):
            raise self.fail(name, f"a number above {low:g} and at most {high:g}" if above else f"a number between {low:g} and {high:g}")
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


def _check_depth(value: Any) -> None:
    """Everything that walks a body later may recurse."""
    level: list[Any] = [value]
    for _ in range(MAX_DEPTH):
        level = [
            item
            for container in level
            for item in (container.values() if isinstance(container, dict) else container)
            if isinstance(item, dict | list)
        ]
        if not level:
            return
    raise RequestError(f"the request body is nested too deeply; at most {MAX_DEPTH} levels are read")


def _diagnosis(raw: bytes) -> RequestError | None:
    """Which field made an otherwise well-formed body invalid JSON."""
    if len(raw) > DIAGNOSED_BYTES:
        return None
    try:
        value = json.loads(raw)
        path, reason = next(_faults(value, ""), (None, ""))
    except (ValueError, RecursionError):
        return None
    return RequestError(f"{path}: {reason}", param=path) if path is not None else None


def _faults(value: Any, path: str) -> Iterator[tuple[str, str]]:
    if isinstance(value, float) and not math.isfinite(value):
        yield path, "not a finite number, which JSON cannot express"
    elif isinstance(value, str) and any("\ud800" <= char <= "\udfff" for char in value):
        yield path, "half of a surrogate pair, which is not a character"
    elif isinstance(value, int) and value.bit_length() > 128:
        yield path, f"an integer of {value.bit_length()} bits is out of range"
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _faults(item, f"{path}.{key}" if path else key)
    elif isinstance(value, list):
        for number, item in enumerate(value):
            yield from _faults(item, f"{path}[{number}]")

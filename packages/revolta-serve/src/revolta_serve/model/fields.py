"""Typed access to the fields of a checkpoint's JSON files: every complaint names file, field, value and what is legal."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from revolta_serve.errors import ConfigError


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in `path`; ConfigError when it is missing, not JSON, or not an object."""
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file; a checkpoint directory needs it") from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ConfigError(f"{path}: not readable as JSON ({error})") from None
    if not isinstance(raw, dict):
        raise ConfigError(f"{path}: holds a JSON {type(raw).__name__}; must be an object")
    return raw


@dataclass(frozen=True, slots=True)
class Fields:
    """The fields of one JSON object. A field that is null counts as absent; a default of None makes a field optional."""

    raw: Mapping[str, Any]
    file: str = "config.json"
    path: str = ""
    """Where the object lies in the file, with a trailing dot: `text_config.`."""

    def error(self, name: str, legal: str) -> ConfigError:
        """The complaint about field `name`: its value, and what is legal."""
        value = self.raw.get(name)
        state = "missing" if value is None else f"is {json.dumps(value, default=repr)}"
        return ConfigError(f"{self.file}: {self.path}{name} {state}; must be {legal}", param=f"{self.path}{name}")

    def has(self, name: str) -> bool:
        """True when the field is present and not null."""
        return self.raw.get(name) is not None

    def below(self, name: str) -> "Fields":
        """The object in field `name`; an empty one when absent."""
        value = self.raw.get(name)
        if value is None:
            value = {}
        if not isinstance(value, dict):
            raise self.error(name, "an object")
        return Fields(value, self.file, f"{self.path}{name}.")

    def integer(self, name: str, *, low: int = 1, high: int | None = None, default: int | None = None) -> int:
        """An integer in [low, high]; ConfigError when absent without a default, of another type or outside."""
        value = self.raw.get(name)
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, int) or value < low or (high is not None and value > high):
            raise self.error(name, f"an integer >= {low}" if high is None else f"an integer in [{low}, {high}]")
        return value

    def number(self, name: str, legal: str, *, low: float, high: float = math.inf, default: float | None = None) -> float:
        """A finite number in [low, high]; `legal` words the range for the complaint."""
        value = self.raw.get(name)
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or not low <= value <= high:
            raise self.error(name, legal)
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        """A boolean."""
        value = self.raw.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.error(name, "true or false")
        return value

    def choice(self, name: str, legal: Sequence[str], default: str | None = None) -> str:
        """One of the strings in `legal`."""
        value = self.raw.get(name)
        if value is None and default is not None:
            return default
        if value not in legal:
            raise self.error(name, "one of " + ", ".join(f'"{word}"' for word in legal))
        return str(value)

    def integers(self, name: str, *, low: int = 0, high: int | None = None, default: Sequence[int] | None = None) -> tuple[int, ...]:
        """An integer or a list of integers in [low, high], as a tuple in the order of the file."""
        value = self.raw.get(name)
        if value is None and default is not None:
            return tuple(default)
        values = value if isinstance(value, list) else [value]
        for item in values:
            if isinstance(item, bool) or not isinstance(item, int) or item < low or (high is not None and item > high):
                span = f">= {low}" if high is None else f"in [{low}, {high}]"
                raise self.error(name, f"an integer {span}, or a list of such")
        return tuple(values)

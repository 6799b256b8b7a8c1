"""The dimensions of a tiny checkpoint: typed, with a range for each, so that a wrong one is refused by name before anything is made."""

import difflib
import math
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from types import NoneType
from typing import Any, Literal, get_args, get_origin, get_type_hints

from revolta_serve.errors import ConfigError

LARGEST_ID = 2**63 - 1


def _dim(default: Any, low: float = 1, high: float = 4096) -> Any:
    """A number, or numbers, between `low` and `high` inclusive."""
    return field(default=default, metadata={"low": low, "high": high})


@dataclass(frozen=True, slots=True, kw_only=True)
class TinyShape:
    """Every dimension of a tiny checkpoint. The defaults make one of about 6 MB in float32.

    Raises ConfigError naming the field, its value and what is legal when a value is of another type or out of range. What the
    architecture demands of fields together is checked by ModelConfig.
    """

    hidden: int = _dim(64)
    layers: int = _dim(8, high=256)
    interval: int = _dim(4, high=256)
    """Layer i is sparse attention when i mod interval = interval - 1."""
    layer_types: tuple[str, ...] | None = None
    """Overrides `interval`: names as config.json spells them."""
    heads: int = _dim(4, high=256)
    kv_heads: int = _dim(2, high=256)
    head_dim: int = _dim(32, high=512)
    rotary: float = _dim(0.5, low=1e-9, high=1)
    theta: float = _dim(10_000.0, low=1.001, high=1e12)
    yarn: float | None = _dim(None, low=1, high=1024)
    """YaRN factor; the original length is then max_positions / yarn."""
    index_heads: int = _dim(4, high=256)
    index_dim: int = _dim(32, high=512)
    budget: int = _dim(32, high=65_536)
    ratio: int = _dim(4, high=64)
    gdn_key_heads: int = _dim(2, high=256)
    gdn_value_heads: int = _dim(4, high=256)
    gdn_key_dim: int = _dim(16, high=512)
    gdn_value_dim: int = _dim(16, high=512)
    conv_width: int = _dim(4, low=2, high=64)
    output_gate: Literal["sigmoid", "silu"] | None = "sigmoid"
    """None leaves the field out: the model then uses hidden_act."""
    streams: int = _dim(4, low=2, high=64)
    rank: int = _dim(16)
    experts: int = _dim(16, high=1024)
    experts_per_token: int = _dim(4, high=1024)
    expert_width: int = _dim(32)
    shared_width: int = _dim(32)
    ple_layers: tuple[int, ...] = _dim((2,), high=256)
    """Counted from 1, as config.json counts."""
    ple_dim: int | None = _dim(None)
    """None leaves the field out: the model then uses hidden."""
    ple_conv_width: int = _dim(4, low=2, high=64)
    ngram: int = _dim(3, low=2, high=8)
    ngram_heads: int = _dim(4, high=64)
    ngram_base: int = _dim(997, low=2, high=2**24)
    ngram_divisor: int = _dim(128, high=65_536)
    ngram_shards: int = _dim(4, high=4096)
    hash_seed: int | None = _dim(None, low=0, high=LARGEST_ID)
    """None leaves the field out: the model then uses 1234."""
    tokens: int = _dim(1024, low=2, high=65_536)
    """Ids of the tokenizer."""
    extra_tokens: tuple[str, ...] = ()
    """Some of them, in the byte-level alphabet, that encoding never yields but decoding knows."""
    vocab: int | None = _dim(None, low=2, high=2**20)
    """Rows of the embedding, at least `tokens`; None for as many as the tokenizer has ids."""
    max_positions: int = _dim(8192, high=2**20)
    eos_list: bool = False
    """Write eos_token_id as a list whose first id is the n-gram mark."""

    def __post_init__(self) -> None:
        kinds = get_type_hints(type(self))
        for item in fields(self):
            value, kind = getattr(self, item.name), kinds[item.name]
            low, high = item.metadata.get("low", -math.inf), item.metadata.get("high", math.inf)
            if not _is(kind, value) or not all(low <= number <= high for number in _numbers(value)):
                raise ConfigError(f"{item.name} is {_shown(value)}; must be {_legal(kind, low, high)}", param=item.name)
        if self.vocab is not None and self.vocab < self.tokens:
            raise ConfigError(f"vocab is {self.vocab}; must be at least tokens = {self.tokens}, so that every id has a row", param="vocab")

    @classmethod
    def read(cls, sets: Sequence[str]) -> dict[str, Any]:
        """Return the keyword arguments that `FIELD=VALUE` texts stand for, values as in TOML, lists as tuples, `none` as None.

        Raises ConfigError for a text of another form, and naming the nearest field for an unknown one. Types are checked by the class.
        """
        known = {item.name: item for item in fields(cls)}
        values: dict[str, Any] = {}
        for text in sets:
            name, equals, raw = text.partition("=")
            if not equals:
                raise ConfigError(f"--set {text}: write FIELD=VALUE, such as layers=4")
            if name not in known:
                near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
                raise ConfigError(f"--set {text}: there is no field {name!r}{f'; did you mean {near[0]}?' if near else ''}")
            values[name] = None if raw == "none" else _toml(raw)
        return values


def _toml(raw: str) -> Any:
    """The value of a TOML expression; a text that is none stands for itself."""
    try:
        value = tomllib.loads(f"value = {raw}")["value"]
    except (tomllib.TOMLDecodeError, ValueError, RecursionError):
        return raw
    return tuple(value) if isinstance(value, list) else value


def _is(kind: Any, value: Any) -> bool:
    """Whether a value is of an annotated type; an int passes for a float, a bool not for an int, and only finite floats count."""
    if NoneType in get_args(kind):
        return any(_is(part, value) for part in get_args(kind))
    if get_origin(kind) is Literal:
        return value in get_args(kind)
    if get_origin(kind) is tuple:
        return isinstance(value, tuple) and all(_is(get_args(kind)[0], item) for item in value)
    if kind is float:
        return type(value) in (int, float) and math.isfinite(value)
    return type(value) is kind


def _numbers(value: Any) -> list[float]:
    items = value if isinstance(value, tuple) else (value,)
    return [item for item in items if type(item) in (int, float)]


def _legal(kind: Any, low: float, high: float) -> str:
    """What a field accepts, in words."""
    words = []
    for part in get_args(kind) if NoneType in get_args(kind) else (kind,):
        span = f" in [{low:.12g}, {high:.20g}]" if high < math.inf else ""
        if get_origin(part) is Literal:
            words += [f'"{word}"' for word in get_args(part)]
        elif get_origin(part) is tuple:
            words.append("a list of strings" if get_args(part)[0] is str else f"a list of integers{span}")
        else:
            words.append({int: f"an integer{span}", float: f"a number{span}", bool: "true or false", NoneType: "none"}[part])
    return " or ".join(words)


def _shown(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return str(value).lower()
    text = repr(list(value) if isinstance(value, tuple) else value)
    return text if len(text) <= 60 else f"{text[:57]}..."

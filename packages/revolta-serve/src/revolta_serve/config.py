"""ServeConfig: every choice a server can be given, as one frozen tree, with every rule about it in one place.

Precedence is default < profile < flags and --set (profile.py). A value is always a value: nothing means "maybe". Where 0 or an empty
list asks for a derived number, `resolve` replaces it with that number before anything is loaded, and only resolved configurations
reach the engine.
"""

import hashlib
import os.path
from collections.abc import Iterator
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal

import msgspec

from revolta_serve.errors import ConfigError
from revolta_serve.model.model_config import GRID, ModelConfig


def option(default: Any, help: str, *, flag: str = "", low: float | None = None, high: float | None = None, secret: bool = False) -> Any:
    """Declare one field: its default, one line of help, its flag if it has one, and the inclusive range of a number."""
    metadata = {"help": help, "flag": flag, "low": low, "high": high, "secret": secret}
    return field(default=default, metadata=metadata, repr=not secret)


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSource:
    """Which checkpoint is served, under which names, computed in which type."""

    path: str = option("", "directory of the checkpoint")
    served_name: tuple[str, ...] = option(
        (), "name of the model in the API, repeatable; none: the directory's name", flag="--served-model-name"
    )
    dtype: Literal["float32", "float16"] = option("float32", "type of activations and dense weights", flag="--dtype")


@dataclass(frozen=True, kw_only=True, slots=True)
class ParallelConfig:
    """How many processes share the model."""

    tensor: int = option(1, "processes that share the weights", flag="--tensor-parallel-size", low=1, high=64)
    decode_context: int = option(
        1, "processes of those that share keys and values by token", flag="--decode-context-parallel-size", low=1, high=64
    )
    threads: int = option(1, "CPU threads of each process; a tiny model is fastest with one", flag="--threads", low=1, high=256)
    rendezvous: str = option("", "file through which the processes find each other; the server makes one")


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheConfig:
    """How large the two pools of a process are: token blocks and state slots."""

    memory_bytes: int = option(
        0,
        "bytes for both pools in each process; 0: room for one request of max_model_len and for 8,192 tokens of each other",
        flag="--kv-cache-memory-bytes",
        low=0,
    )
    num_blocks: int = option(0, "token blocks of 64; 0: what the bytes allow", low=0)
    num_slots: int = option(0, "state slots; 0: twice max_num_seqs plus what fits in 15% of the bytes", low=0)


@dataclass(frozen=True, kw_only=True, slots=True)
class ScheduleConfig:
    """How much work a step takes and how many requests share it."""

    max_num_seqs: int = option(8, "requests that run at the same time", flag="--max-num-seqs", low=1, high=256)
    max_num_batched_tokens: int = option(
        2048, "tokens of one step; at least 64 more than max_num_seqs", flag="--max-num-batched-tokens", low=1
    )
    prefill_while_decoding: int = option(
        1664, "prompt tokens of a step in which another request decodes, rounded up to 64", flag="--prefill-while-decoding", low=1
    )
    max_model_len: int = option(0, "tokens of prompt and answer together; 0: the checkpoint's limit", flag="--max-model-len", low=0)
    max_queue: int = option(256, "waiting requests before the next one is refused with 429", flag="--max-queue", low=1)

    @property
    def prefill_cap(self) -> int:
        """prefill_while_decoding rounded up to the grid."""
        return -(-self.prefill_while_decoding // GRID) * GRID


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineConfig:
    """How long the parts of a server wait for each other before one counts as dead. Seconds."""

    start_timeout: float = option(1800.0, "seconds to load the weights", low=1)
    step_timeout: float = option(120.0, "seconds of one step before the engine counts as stuck", low=0.1)
    heartbeat_interval: float = option(0.5, "seconds between two signs of life of the engine", low=0.05, high=60)
    heartbeat_timeout: float = option(10.0, "seconds without a sign of life before the engine counts as dead", low=0.2)


@dataclass(frozen=True, kw_only=True, slots=True)
class ApiConfig:
    """The HTTP side."""

    host: str = option("127.0.0.1", "address to listen on; 0.0.0.0 for all", flag="--host")
    port: int = option(8000, "port to listen on; 0: a free one", flag="--port", low=0, high=65535)
    keys: tuple[str, ...] = option((), "key a client must present, repeatable; also REVOLTA_API_KEY", flag="--api-key", secret=True)
    max_request_bytes: int = option(16 << 20, "bytes of the largest request body", flag="--max-request-bytes", low=1024)
    sse_keep_alive: float = option(
        15.0, "seconds of silence before a stream sends a comment; 0: never", flag="--sse-keep-alive-interval", low=0
    )
    shutdown_timeout: float = option(
        0.0, "seconds that running requests may go on after SIGTERM; then they are aborted", flag="--shutdown-timeout", low=0
    )
    log_level: Literal["debug", "info", "warning", "error"] = option("info", "least severe message that is logged", flag="--log-level")


@dataclass(frozen=True, kw_only=True, slots=True)
class ServeConfig:
    """The whole configuration. Frozen; compared and hashed by value."""

    model: ModelSource = field(default_factory=ModelSource)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    api: ApiConfig = field(default_factory=ApiConfig)

    @property
    def served_names(self) -> tuple[str, ...]:
        """The names clients may use, the first one being the answer's."""
        return self.model.served_name or (os.path.basename(os.path.abspath(self.model.path)),)

    def digest(self) -> str:
        """16 hex digits that differ when any field but a secret differs: for logs and records."""
        public = replace(self, api=replace(self.api, keys=()))
        return hashlib.sha256(msgspec.json.encode(public)).hexdigest()[:16]

    def validate(self) -> None:
        """Check every rule that needs no checkpoint. Raises ConfigError with the first broken one."""
        for entry in options():
            _check_range(entry, get(self, entry.path))
        schedule, cache, parallel, engine = self.schedule, self.cache, self.parallel, self.engine
        least = GRID + schedule.max_num_seqs
        if schedule.max_num_batched_tokens < least:
            raise ConfigError(
                f"schedule.max_num_batched_tokens={schedule.max_num_batched_tokens} leaves no prompt chunk of {GRID} beside "
                f"max_num_seqs={schedule.max_num_seqs} decoding requests; use at least {least}"
            )
        if parallel.tensor % parallel.decode_context:
            raise ConfigError(
                f"parallel.decode_context={parallel.decode_context} does not divide parallel.tensor={parallel.tensor}; choose a divisor"
            )
        if cache.memory_bytes and cache.num_blocks:
            raise ConfigError(f"cache.memory_bytes={cache.memory_bytes} and num_blocks={cache.num_blocks} exclude each other; set one")
        if 0 < cache.num_slots < schedule.max_num_seqs:
            raise ConfigError(
                f"cache.num_slots={cache.num_slots} cannot hold the states of schedule.max_num_seqs={schedule.max_num_seqs} requests; "
                f"use at least {schedule.max_num_seqs} or lower max_num_seqs"
            )
        if schedule.max_model_len == 1:
            raise ConfigError("schedule.max_model_len=1 has no room for an answer after one prompt token; use at least 2")
        if engine.heartbeat_timeout < 2 * engine.heartbeat_interval:
            raise ConfigError(
                f"engine.heartbeat_timeout={engine.heartbeat_timeout} is less than two intervals of {engine.heartbeat_interval} s; "
                f"use at least {2 * engine.heartbeat_interval}"
            )
        for name, values in (("model.served_name", self.model.served_name), ("api.keys", self.api.keys)):
            if any(not value.strip() for value in values):
                raise ConfigError(f"{name} contains an empty string; remove it")
        if len(set(self.model.served_name)) < len(self.model.served_name):
            raise ConfigError(f"model.served_name={list(self.model.served_name)} names a model twice; remove one")

    def resolve(self, model: ModelConfig) -> "ServeConfig":
        """Check the rules that need the checkpoint's dimensions and replace derived numbers.

        Returns a configuration whose max_model_len is positive. Raises ConfigError.
        """
        self.validate()
        limit = model.max_positions
        length = self.schedule.max_model_len or limit
        if length > limit:
            raise ConfigError(f"schedule.max_model_len={length} is more than the checkpoint's {limit} positions; use at most {limit}")
        tensor, context = self.parallel.tensor, self.parallel.decode_context
        model.check_tensor_parallel(tensor)
        if context > 1 and tensor % (context * model.kv_heads):
            raise ConfigError(
                f"parallel.decode_context={context} processes must hold the same KV heads, but parallel.tensor={tensor} spreads "
                f"{model.kv_heads} over them; use decode_context={max(1, tensor // model.kv_heads)} or less"
            )
        return replace(self, schedule=replace(self.schedule, max_model_len=length))


@dataclass(frozen=True, slots=True)
class Entry:
    """One field of the tree, flattened: what flags, profiles and documentation are made from."""

    path: str
    """section.key"""
    kind: Any
    default: Any
    help: str
    flag: str
    low: float | None
    high: float | None
    secret: bool


def options() -> Iterator[Entry]:
    """Every field, section by section."""
    default = ServeConfig()
    for section in fields(default):
        for item in fields(getattr(default, section.name)):
            yield Entry(f"{section.name}.{item.name}", item.type, item.default, **item.metadata)


def get(config: ServeConfig, path: str) -> Any:
    """The value of `section.key`."""
    section, key = path.split(".")
    return getattr(getattr(config, section), key)


def with_value(config: ServeConfig, path: str, value: Any) -> ServeConfig:
    """A copy of config with one field changed; the value must already have the field's type."""
    section, key = path.split(".")
    return replace(config, **{section: replace(getattr(config, section), **{key: value})})


def _check_range(entry: Entry, value: Any) -> None:
    if entry.low is not None and value < entry.low:
        raise ConfigError(f"{entry.path}={value} is too small; use at least {entry.low:g}")
    if entry.high is not None and value > entry.high:
        raise ConfigError(f"{entry.path}={value} is too large; use at most {entry.high:g}")

"""ServeConfig: every choice a server can be given, as one frozen tree, with every rule about it in one place.

Precedence is default < profile < flags and --set (profile.py). A value is always a value: nothing means "maybe". Where 0 or an empty
list asks for a derived number, `resolve` replaces it with that number before anything is loaded, and only resolved configurations
reach the engine.
"""

import hashlib
import math
import os.path
from collections.abc import Iterator
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal

import msgspec

from revolta_serve.errors import ConfigError
from revolta_serve.model.model_config import GRID, ModelConfig

MOST_ROWS = 64
"""Rows of one verify step: the decode kernels' limit."""


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
    ngram_tables: Literal["device", "host"] = option("device", "where n-gram tables lie: with the other weights, or in pinned host memory")
    vision: bool = option(False, "load the vision tower")


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
    """How large the two pools of a process are, token blocks and state slots, and what they hold."""

    memory_bytes: int = option(
        0,
        "bytes for both pools in each process; 0: what device_bytes leaves, or room for one request of max_model_len and for 8,192 "
        "tokens of each other",
        flag="--kv-cache-memory-bytes",
        low=0,
    )
    device_bytes: int = option(0, "memory of the device of each process; 0: none is planned with", low=0)
    utilization: float = option(
        0.95, "part of device_bytes that is planned; the rest is for the driver and its libraries", flag="--gpu-memory-utilization",
        low=0.01, high=1,
    )  # fmt: skip
    reserve_bytes: int = option(0, "bytes of the device kept for CUDA graphs", low=0)
    num_blocks: int = option(0, "token blocks of 64; 0: what the bytes allow", low=0)
    num_slots: int = option(0, "state slots; 0: twice max_num_seqs plus what fits in 15% of the bytes", low=0)
    kv_format: Literal["auto", "float16", "fp8_e4m3", "int8"] = option(
        "auto", "storage of keys and values; auto: the type of activations", flag="--kv-cache-dtype"
    )
    index_ranks: int = option(
        1, "processes that share the pooled index keys of every block; the others of the tensor group repeat them", low=1, high=64
    )
    prefix: bool = option(True, "reuse what earlier requests computed for the same beginning of a prompt", flag="--prefix-caching")
    generated: bool = option(
        True, "reuse states over generated text too; their last bits differ from those of a prompt", flag="--reuse-generated"
    )
    block_times: bool = option(
        False, "show in /metrics how long cached blocks live and how long nobody wants them", flag="--kv-cache-metrics"
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class ScheduleConfig:
    """How much work a step takes and how many requests share it."""

    max_num_seqs: int = option(8, "requests that run at the same time", flag="--max-num-seqs", low=1, high=256)
    max_num_batched_tokens: int = option(
        2048, "tokens of one step; at least 64 more than max_num_seqs", flag="--max-num-batched-tokens", low=1, high=8192
    )
    prefill_while_decoding: int = option(
        1664, "prompt tokens of a step in which another request decodes, rounded up to 64", flag="--prefill-while-decoding", low=1
    )
    max_model_len: int = option(0, "tokens of prompt and answer together; 0: the checkpoint's limit", flag="--max-model-len", low=0)
    max_queue: int = option(256, "waiting requests before the next one is refused with 429", flag="--max-queue", low=1)
    policy: Literal["fcfs", "priority"] = option(
        "fcfs", "order of waiting requests and of preemption: arrival, or the requests' priority (low first), then arrival",
        flag="--scheduling-policy",
    )
    long_prefill_tokens: int = option(
        1024, "prompt tokens of one request in a step that others want a part of; 0: no limit", flag="--long-prefill-token-threshold", low=0
    )
    bypass_limit: int = option(4, "smaller requests that may overtake one that waits for blocks", low=0)
    bypass_seconds: float = option(60.0, "seconds of waiting after which nobody overtakes a request", low=0)
    admission_window_ms: float = option(2.0, "milliseconds an idle engine waits for requests that arrive together", low=0, high=1000)
    stall_steps: int = option(500, "steps a running request may be left out of: it is preempted then, the second time ended", low=2)
    audit_steps: int = option(1000, "steps between two checks that every block and slot is accounted for; 0: when idle only", low=0)

    @property
    def prefill_cap(self) -> int:
        """prefill_while_decoding rounded up to the grid."""
        return -(-self.prefill_while_decoding // GRID) * GRID


@dataclass(frozen=True, kw_only=True, slots=True)
class SpeculateConfig:
    """How tokens are guessed before the model judges them."""

    method: Literal["none", "mtp", "dflash"] = option(
        "none", "drafter: none, the checkpoint's own draft head, or a block drafter", flag="--speculation"
    )
    drafts: int = option(4, "tokens guessed in a step; a block drafter always fills its block", low=1, high=7)
    drafter: str = option("", "directory of a drafter; empty: the draft head of the checkpoint")

    @property
    def width(self) -> int:
        """Rows of a request in one decode step."""
        return 1 if self.method == "none" else self.drafts + 1


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
    keys: tuple[str, ...] = option((), "key a client must present, repeatable; without any, REVOLTA_API_KEY", flag="--api-key", secret=True)
    max_request_bytes: int = option(16 << 20, "bytes of the largest request body", flag="--max-request-bytes", low=1024)
    sse_keep_alive: float = option(
        15.0, "seconds of silence before a stream sends a comment; 0: never", flag="--sse-keep-alive-interval", low=0
    )
    shutdown_timeout: float = option(
        0.0, "seconds that running requests may go on after SIGTERM; then they are aborted", flag="--shutdown-timeout", low=0
    )
    log_level: Literal["debug", "info", "warning", "error"] = option("info", "least severe message that is logged", flag="--log-level")
    log_format: Literal["text", "json"] = option("text", "form of log lines", flag="--log-format")
    log_requests: bool = option(False, "log one line for every ended request", flag="--enable-log-requests")
    log_stats_interval: float = option(10.0, "seconds between two lines about a busy engine; 0: never", flag="--log-stats-interval", low=0)
    max_logprobs: int = option(20, "most likely tokens a request may ask for; -1: the whole vocabulary", flag="--max-logprobs", low=-1)
    logprobs_mode: Literal["raw", "processed"] = option(
        "raw", "logprobs of the model's own distribution, or of the one that is drawn from", flag="--logprobs-mode"
    )
    operator_routes: bool = option(
        False, "serve /pause, /resume, /is_paused, /reset_prefix_cache and /server_info", flag="--operator-routes"
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class ServeConfig:
    """The whole configuration. Frozen; compared and hashed by value."""

    model: ModelSource = field(default_factory=ModelSource)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    speculate: SpeculateConfig = field(default_factory=SpeculateConfig)
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
        least = GRID + schedule.max_num_seqs * self.speculate.width
        if schedule.max_num_batched_tokens < least:
            rows = f" of {self.speculate.width} rows" if self.speculate.width > 1 else ""
            raise ConfigError(
                f"schedule.max_num_batched_tokens={schedule.max_num_batched_tokens} leaves no prompt chunk of {GRID} beside "
                f"schedule.max_num_seqs={schedule.max_num_seqs} decoding requests{rows}; use at least {least}"
            )
        self._validate_speculation()
        if parallel.tensor % parallel.decode_context:
            raise ConfigError(
                f"parallel.decode_context={parallel.decode_context} does not divide parallel.tensor={parallel.tensor}; choose a divisor"
            )
        if cache.memory_bytes and cache.num_blocks:
            raise ConfigError(
                f"cache.memory_bytes={cache.memory_bytes} and cache.num_blocks={cache.num_blocks} exclude each other; set one"
            )
        if 0 < cache.num_slots < schedule.max_num_seqs:
            raise ConfigError(
                f"cache.num_slots={cache.num_slots} cannot hold the states of schedule.max_num_seqs={schedule.max_num_seqs} requests; "
                f"use at least {schedule.max_num_seqs} or lower max_num_seqs"
            )
        if schedule.max_model_len == 1:
            raise ConfigError("schedule.max_model_len=1 has no room for an answer after one prompt token; use at least 2")
        if engine.heartbeat_timeout < 2 * engine.heartbeat_interval:
            raise ConfigError(
                f"engine.heartbeat_timeout={engine.heartbeat_timeout} is less than two times "
                f"engine.heartbeat_interval={engine.heartbeat_interval}; use at least {2 * engine.heartbeat_interval}"
            )
        for name, values in (("model.served_name", self.model.served_name), ("api.keys", self.api.keys)):
            if any(not value.strip() for value in values):
                raise ConfigError(f"{name} contains an empty string; remove it")
        if len(set(self.model.served_name)) < len(self.model.served_name):
            raise ConfigError(f"model.served_name={list(self.model.served_name)} names a model twice; remove one")

    def _validate_speculation(self) -> None:
        speculate, seqs = self.speculate, self.schedule.max_num_seqs
        if speculate.method != "none" and seqs * speculate.width > MOST_ROWS:
            raise ConfigError(
                f"schedule.max_num_seqs={seqs} requests of {speculate.width} rows are {seqs * speculate.width} rows, more than the "
                f"{MOST_ROWS} of a verify step; use --max-num-seqs {MOST_ROWS // speculate.width} or fewer drafts"
            )
        if speculate.method == "none" and speculate.drafter:
            raise ConfigError(
                f"speculate.drafter={speculate.drafter!r} would not be used with speculate.method=none; say --speculation mtp or dflash"
            )
        if speculate.method == "dflash" and not speculate.drafter:
            raise ConfigError("speculate.method=dflash needs the directory of the drafter; give it with --set speculate.drafter=DIR")

    def resolve(self, model: ModelConfig) -> "ServeConfig":
        """Check the rules that need the checkpoint's dimensions and replace derived numbers.

        Returns a configuration whose max_model_len is positive. Raises ConfigError.
        """
        self.validate()
        limit = positions(model)
        length = self.schedule.max_model_len or limit
        if length > limit:
            raise ConfigError(
                f"schedule.max_model_len={length} is more than the checkpoint's {limit} positions; use at most {limit} "
                f"(--max-model-len), or a config.json whose rope_parameters extend the context (YaRN)"
            )
        tensor, context = self.parallel.tensor, self.parallel.decode_context
        model.check_tensor_parallel(tensor)
        if context > 1 and tensor % (context * model.kv_heads):
            raise ConfigError(
                f"parallel.decode_context={context} processes must hold the same KV heads, but parallel.tensor={tensor} spreads "
                f"{model.kv_heads} over them; use decode_context={max(1, tensor // model.kv_heads)} or less"
            )
        index, entries = self.cache.index_ranks, GRID // model.index_ratio
        if tensor % index or entries % index:
            raise ConfigError(
                f"cache.index_ranks={index} must divide parallel.tensor={tensor} and the {entries} index keys of a block; "
                f"use a common divisor, such as {math.gcd(tensor, entries)}"
            )
        return replace(self, schedule=replace(self.schedule, max_model_len=length))


def positions(model: ModelConfig) -> int:
    """Positions a checkpoint can address: what it states, or what YaRN makes of the trained ones where that is more."""
    return max(model.max_positions, math.floor(model.rope.original * model.rope.factor))


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

"""The nouns that pass between processes: what the api asks of the engine, what the engine asks of its workers, and the answers.

Everything here is a frozen msgspec Struct: it crosses a channel as MessagePack and nothing else does.
"""

from typing import Literal

from msgspec import Struct

FinishReason = Literal["stop", "length", "abort", "error"]
SliceKind = Literal["prefill", "decode"]


class SamplingParams(Struct, frozen=True, kw_only=True):
    """How one request's tokens are drawn. temperature 0 means greedy; top_k 0 and top_p 1.0 and min_p 0.0 mean off."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    """Already combined with the choice index: 63 bits, the key of this request's noise."""


class GenerateRequest(Struct, frozen=True, kw_only=True):
    """One choice of one prompt, tokenised and validated: what the api submits to the engine."""

    id: str
    prompt: tuple[int, ...]
    max_tokens: int
    sampling: SamplingParams
    stop_token_ids: tuple[int, ...] = ()
    """Every id that ends the answer, the checkpoint's own included unless ignored."""


class Output(Struct, frozen=True, kw_only=True):
    """New tokens of one request. The last one carries `finish`."""

    id: str
    tokens: tuple[int, ...] = ()
    finish: FinishReason | None = None
    stop_token: int | None = None
    cached_tokens: int = 0
    error: str | None = None


class EngineStatus(Struct, frozen=True, kw_only=True):
    """A look at the engine: counts for /metrics and /health."""

    running: int = 0
    waiting: int = 0
    stalled: int = 0
    """Running requests that were left out of the last step because their next block was not free for them."""
    blocks_used: int = 0
    blocks_total: int = 0
    slots_used: int = 0
    slots_total: int = 0
    steps: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0


class Slice(Struct, frozen=True, kw_only=True):
    """The rows of one request in one step: tokens at positions start, start+1, ..."""

    request: int
    """The engine's number of the request, never reused while a worker knows it."""
    kind: SliceKind
    slot: int
    """Running state slot."""
    start: int
    tokens: tuple[int, ...]
    before: tuple[int, ...]
    """Raw ids at start-1, start-2, ... (the n-gram mark where the request has none), newest first: ngram_size - 1 of them."""
    blocks: tuple[int, ...] = ()
    """Block ids to append to the request's block table before this step."""
    fresh: bool = False
    """The first slice of the request: its state slot starts from zero."""
    sample: bool = True
    """False for a prefill slice that does not reach the end of the prompt."""
    sampling: SamplingParams | None = None
    """On first sight of the request only."""
    rope_delta: int = 0
    """Added to the token index on all rotary axes (multimodal prompts)."""


class StepPlan(Struct, frozen=True, kw_only=True):
    """One step for every worker. Slices are in row order: decode first, then prefill."""

    step: int
    slices: tuple[Slice, ...]
    forget: tuple[int, ...] = ()
    """Requests whose block tables and sampling state the workers drop before this step."""


class SliceResult(Struct, frozen=True):
    """What one slice produced: no token for an unfinished prefill or a corrupt slice, else one."""

    request: int
    tokens: tuple[int, ...] = ()
    corrupt: bool = False
    """The logits were not finite: the request fails, its neighbours go on."""


class StepResult(Struct, frozen=True, kw_only=True):
    """What rank 0 answers to a StepPlan, in slice order."""

    step: int
    slices: tuple[SliceResult, ...]
    decode_rows: int = 0
    prefill_rows: int = 0
    seconds: float = 0.0


class StartupReport(Struct, frozen=True, kw_only=True):
    """What a worker says once its weights are loaded and its pools exist."""

    rank: int
    weight_bytes: int
    kv_bytes: int
    state_bytes: int
    num_blocks: int
    num_slots: int
    load_seconds: float
    fingerprint: str
    """Of the checkpoint's files as this rank saw them; the ranks must agree."""

"""The nouns that pass between processes: what the api asks of the engine, what the engine asks of its workers, and the answers.

Everything here is a frozen msgspec Struct: it crosses a channel as MessagePack and nothing else does.
"""

from typing import Literal

from msgspec import Struct

FinishReason = Literal["stop", "length", "repetition", "abort", "error"]
SliceKind = Literal["prefill", "decode"]
PauseMode = Literal["abort", "wait", "keep"]
"""What happens to the requests that run when an engine is paused: they end, they may finish, they are frozen."""

MissReason = Literal["none", "short", "disabled", "cold", "evicted", "no_snapshot", "generated_off"]
"""Why a prompt did not resume as far as it might have: nothing was missed; shorter than a block; the request asks for every row; no
block of it is known; blocks of it were known and were evicted; blocks are known, but no state at their end; only states over generated
text, which the configuration does not use."""


class Thinking(Struct, frozen=True, kw_only=True):
    """A limit on the tokens of the reasoning part."""

    budget: int
    """Reasoning tokens after which the closing token is forced."""
    close: int
    """Id of the closing token."""
    open: int
    """Id of the opening token: reasoning may begin in the answer."""
    begun: bool
    """The prompt ends inside a reasoning part."""


class SamplingParams(Struct, frozen=True, kw_only=True):
    """How one request's tokens are drawn. temperature 0 means greedy; top_k 0 and top_p 1.0 and min_p 0.0 mean off."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    """Already combined with the choice index: 63 bits, the key of this request's noise."""
    repetition_penalty: float = 1.0
    """Divides positive and multiplies negative logits of ids in prompt and answer."""
    presence_penalty: float = 0.0
    """Subtracted from the logits of ids in the answer."""
    frequency_penalty: float = 0.0
    """Subtracted from a logit once for every occurrence of the id in the answer."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_tokens: tuple[int, ...] = ()
    """The only ids that may be drawn; empty: all."""
    bad_words: tuple[tuple[int, ...], ...] = ()
    """Id sequences whose last id may not follow the others."""
    min_tokens: int = 0
    ending_tokens: tuple[int, ...] = ()
    """Ids that are not drawn before the answer has min_tokens."""
    thinking: Thinking | None = None
    logprobs: int = -1
    """Most likely ids to report beside every drawn token; 0: the drawn one only; -1: no logprobs."""
    prompt_logprobs: int = -1
    """The same for the tokens of the prompt."""
    processed_logprobs: bool = False
    """Report the distribution that is drawn from, not the model's own."""

    @property
    def needs_history(self) -> bool:
        """Whether the next token depends on the ids before it, beyond what the model sees."""
        penalties = (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1.0, 0.0, 0.0)
        return penalties or bool(self.bad_words) or self.min_tokens > 0 or self.thinking is not None


class Repetition(Struct, frozen=True, kw_only=True):
    """When an answer counts as caught in a loop: its tail is `count` times one pattern of shortest .. longest ids."""

    shortest: int
    longest: int
    count: int


class GenerateRequest(Struct, frozen=True, kw_only=True):
    """One choice of one prompt, tokenised and validated: what the api submits to the engine."""

    id: str
    prompt: tuple[int, ...]
    max_tokens: int
    sampling: SamplingParams
    stop_token_ids: tuple[int, ...] = ()
    """Every id that ends the answer, the checkpoint's own included unless ignored."""
    boundaries: tuple[int, ...] = ()
    """Token positions where another prompt is likely to part from this one, ascending (text.boundaries)."""
    opening: int = 0
    """The one of them that ends the system text and tools, with which many prompts begin; 0: there are none."""
    cache_salt: str = ""
    """Prompts share cached work only with prompts of the same salt."""
    priority: int = 0
    """Lower goes first, where the scheduler looks at it."""
    tenant: str = ""
    """Whose request it is: those of one tenant take turns with those of others."""
    repetition: Repetition | None = None


class TokenLogprobs(Struct, frozen=True, array_like=True):
    """Natural-log probabilities at one position, from float32 logits; a probability of zero is LOGPROB_FLOOR."""

    token: int
    logprob: float
    rank: int
    """1 + the number of ids that are more likely."""
    top: tuple[tuple[int, float], ...] = ()
    """The most likely ids with their logprobs, by (logprob descending, id ascending)."""


LOGPROB_FLOOR = -9999.0
"""Stands for the logarithm of zero, which JSON cannot express."""


class RequestRecord(Struct, frozen=True, kw_only=True):
    """What one request cost; comes with its last output. Seconds."""

    prompt_tokens: int
    generated_tokens: int
    cached_tokens: int
    """Prompt tokens whose computation was reused when the request first started."""
    seamless: bool
    """Everything reused was computed as a prompt: the answer is bit for bit that of a cold start."""
    miss: MissReason
    queue_seconds: float
    prefill_seconds: float
    decode_seconds: float
    preemptions: int
    slices: int
    """Prompt slices computed, those after preemptions included."""


class Output(Struct, frozen=True, kw_only=True):
    """New tokens of one request. The last one carries `finish`."""

    id: str
    tokens: tuple[int, ...] = ()
    finish: FinishReason | None = None
    stop_token: int | None = None
    cached_tokens: int = 0
    error: str | None = None
    logprobs: tuple[TokenLogprobs, ...] = ()
    """One for each of `tokens`, where the request asks for them."""
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    """The next tokens of the prompt, the first of all being the one at position 1. May come in messages without tokens."""
    record: RequestRecord | None = None
    """With the last output of a request that ran."""


BLOCK_AGES = (0.1, 0.5, 1, 5, 10, 30, 60, 300, 600, 1800, 3600, 7200, 21600, 86400)
"""Upper bounds in seconds of the counts of BlockAges."""


class BlockAges(Struct, frozen=True, kw_only=True):
    """How often something took how long."""

    counts: tuple[int, ...]
    """Up to each of BLOCK_AGES and above the one before it; the last count is of those above all."""
    seconds: float
    """Of all together."""


class EngineStatus(Struct, frozen=True, kw_only=True):
    """A look at the engine: gauges of now and counts since its start, for /metrics and /health."""

    running: int = 0
    waiting: int = 0
    waiting_for_prefix: int = 0
    """Of the waiting ones, those held back until a running request has computed what they share with it."""
    stalled: int = 0
    """Running requests that have been left out of many steps in a row."""
    paused: bool = False
    blocks_used: int = 0
    """Token blocks that running requests hold."""
    blocks_cached: int = 0
    """Token blocks nobody holds whose content can be reused; they make room when needed."""
    blocks_total: int = 0
    slots_used: int = 0
    """State slots of running requests, their rolling snapshots included."""
    slots_cached: int = 0
    """State slots that hold snapshots."""
    slots_total: int = 0
    rss_bytes: int = 0
    """Resident memory of the engine's process."""
    steps: int = 0
    step_seconds: float = 0.0
    """In the model."""
    host_seconds: float = 0.0
    """Between steps: planning and accounting."""
    prompt_tokens: int = 0
    """Prompt rows computed, recomputation included."""
    generated_tokens: int = 0
    replayed_tokens: int = 0
    """Rows computed again after a preemption, their tokens being known."""
    prefix_queries: int = 0
    """Prompt tokens of started requests that looked for reusable work."""
    prefix_hits: int = 0
    """Of those, the tokens that were reused."""
    generated_hits: int = 0
    """Requests that reused states over generated text."""
    misses: dict[MissReason, int] = {}
    """Started requests by what they missed."""
    preemptions: int = 0
    preemptions_in_prefill: int = 0
    rolling_lost: int = 0
    """Preempted requests that resumed without their rolling snapshot, which had been evicted."""
    snapshots_stored: int = 0
    snapshots_skipped: int = 0
    """Snapshots that found no slot."""
    snapshots_evicted: int = 0
    blocks_evicted: int = 0
    blocks_deduplicated: int = 0
    block_ages: dict[str, BlockAges] = {}
    """How long blocks lived and waited (cache.block_times), where that is wanted."""
    corrupted: int = 0
    """Requests that ended because no token could be drawn."""


class CacheReset(Struct, frozen=True, kw_only=True):
    """What a reset of the prefix cache did."""

    blocks_freed: int
    snapshots_freed: int
    blocks_in_use: int
    """Blocks that running requests hold: these stay, and so does what they computed."""


class History(Struct, frozen=True, kw_only=True):
    """The ids of a request, for parameters that depend on them."""

    prompt: tuple[int, ...]
    answer: tuple[int, ...]


class Slice(Struct, frozen=True, kw_only=True):
    """The rows of one request in one step: tokens at positions start, start+1, ...

    Prefill rows are prompt rows in chunk form. Decode rows are those of an answer, sequential: one for an ordinary step; several where
    the tokens are known, or guessed, beforehand.
    """

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
    swaps: tuple[tuple[int, int], ...] = ()
    """(index in the block table, block id) to overwrite before this step: equal content is kept once."""
    fresh: bool = False
    """The state slot starts from zero."""
    restore: int = -1
    """Snapshot slot to copy into the running slot before this step; -1: none. All restores of a plan come first, in slice order."""
    snapshots: tuple[tuple[int, int], ...] = ()
    """(rows, slot), ascending: store the state after that many rows of this slice, a grid position, in that slot."""
    sample: bool = True
    """False for a slice that does not reach the end of what is known."""
    sampling: SamplingParams | None = None
    """On first sight of the request, which comes again after `forget`."""
    history: History | None = None
    """With `sampling`, where sampling.needs_history: all ids known now, those of this and later replayed slices included."""
    logprobs_from: int = -1
    """First row whose successor in the prompt wants logprobs; -1: none."""
    next_token: int = -1
    """With logprobs_from: the prompt token after the slice, -1 where the slice ends the prompt."""
    rope_delta: int = 0
    """Added to the token index on all rotary axes (multimodal prompts)."""


class StepPlan(Struct, frozen=True, kw_only=True):
    """One step for every worker. Slices are in row order: decode first, then prefill."""

    step: int
    slices: tuple[Slice, ...]
    forget: tuple[int, ...] = ()
    """Requests whose block tables and sampling state the workers drop before this step."""


class SliceResult(Struct, frozen=True):
    """What one slice produced: no token for a slice that does not sample or is corrupt, else one."""

    request: int
    tokens: tuple[int, ...] = ()
    corrupt: bool = False
    """No token can be drawn, as the logits are not finite or its rules leave nothing: the request fails, its neighbours go on."""
    logprobs: tuple[TokenLogprobs, ...] = ()
    """One for each of `tokens`, where the request asks for them."""
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    """Of the prompt tokens after rows logprobs_from, logprobs_from + 1, ... of the slice, up to the end of slice or prompt."""


class StepResult(Struct, frozen=True, kw_only=True):
    """What rank 0 answers to a StepPlan, in slice order."""

    step: int
    slices: tuple[SliceResult, ...]
    decode_rows: int = 0
    prefill_rows: int = 0


class StepCost(Struct, frozen=True, kw_only=True):
    """What one step took: for histograms, which the counts of EngineStatus cannot give."""

    decode_rows: int
    prefill_rows: int
    seconds: float
    """In the model."""
    host_seconds: float
    """Before it, since the step before it or, after a pause, since there was work: planning, accounting, messages."""


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

"""One request as the scheduler sees it: its tokens, how far they are computed, what it holds."""

from dataclasses import dataclass, field

from revolta_serve.cache.keys import Key
from revolta_serve.cache.layout import BLOCK, blocks_for
from revolta_serve.cache.prefix_index import Node
from revolta_serve.errors import ContextLengthError, RequestError
from revolta_serve.scheduler.limits import Limits
from revolta_serve.scheduler.repetition import repeats
from revolta_serve.types import FinishReason, GenerateRequest, MissReason, RequestRecord


@dataclass(slots=True, eq=False)
class Request:
    """A request between admission to the queue and its last output."""

    number: int
    """The engine's name of it; never used again. Numbers are the order of arrival."""
    source: GenerateRequest
    tokens: list[int]
    """Prompt and answer so far. The last token of an answer has no K, V or state yet."""
    prompt_length: int
    limit: int
    """Length at which the answer ends."""
    stops: frozenset[int]
    order: tuple[int, int]
    """Who goes first: (priority, number)."""
    arrived: float = 0.0
    queued: float = 0.0
    """Since when it has been waiting: its arrival, or its last preemption."""

    # What it holds while it runs (scheduler.storage).
    computed: int = 0
    """Tokens whose K, V and state are stored."""
    slot: int = -1
    """Running state slot; -1 while waiting."""
    settled: bool = False
    """The slot holds the state after `computed` tokens: not before the first step is done."""
    tip: Node | None = None
    """End of its path in the index: all whole blocks."""
    private: list[int] = field(default_factory=list)
    """Blocks after the tip, in order."""
    capacity: int = 0
    """Tokens that its blocks hold."""
    owed: int = 0
    """Blocks that were promised to it when it started and not handed out yet."""
    rolling: int = -1
    """Slot of its rolling snapshot, -1 for none."""
    rolling_at: int = 0
    """Tokens of the state in the rolling slot; 0: nothing is in it yet."""
    promised: tuple[tuple[int, int], ...] = ()
    """(rows, slot) of the snapshots of the step under way."""
    swaps: list[tuple[int, int]] = field(default_factory=list)
    """Block table entries the workers must still overwrite."""
    introduced: bool = False
    """The workers know it."""

    # What it knows of itself.
    keys: list[Key] = field(default_factory=list)
    base_forms: tuple[int, ...] = ()
    """Forms of the blocks it resumed from, where they are not those of a prompt."""
    marks: list[int] = field(default_factory=list)
    """Grid positions of the prompt still ahead where a snapshot is wanted, descending."""
    required: frozenset[int] = frozenset()
    """Those of the marks that are worth another conversation's snapshot."""
    opened: list[Node] = field(default_factory=list)
    """Where it has stored a snapshot because other prompts are likely to part from it there: the last to go for its own next ones."""
    coming: dict[int, Key] = field(default_factory=dict)
    """Keys at those of the marks that it has announced to whoever might wait for them."""
    waits_for: Key | None = None
    """While waiting: what a running request is about to compute for it."""
    looked: int = -1
    """While waiting: how many announcements there had been when it looked for that."""
    wanted: tuple[int, int] = (-1, 0)
    """While waiting for blocks: the cache's version when it looked, and the blocks that it needed then."""
    reached: int = 0
    """Tokens that were computed before a preemption."""
    expected: int = 0
    """Tokens of the rolling snapshot that it left behind then."""
    told: int = 0
    """Prompt logprobs that have been delivered."""

    # What happened to it.
    started: float = -1.0
    answered: float = -1.0
    """When it started, and when its first token came."""
    cached: int = 0
    seamless: bool = True
    miss: MissReason = "none"
    preemptions: int = 0
    slices: int = 0
    bypassed: int = 0
    skipped: int = 0
    """Steps in a row that left it out while it ran."""
    stalls: int = 0

    @property
    def decoding(self) -> bool:
        """Whether the whole prompt is computed."""
        return self.computed >= self.prompt_length

    @property
    def stored_at_most(self) -> int:
        """Tokens that will ever be stored: the last token of an answer is never fed back."""
        return self.limit - 1

    def form(self, block: int) -> int:
        """Leading tokens of a block that this request computes as a prompt (cache.prefix_index)."""
        if block < len(self.base_forms):
            return self.base_forms[block]
        return min(BLOCK, max(0, self.prompt_length - block * BLOCK))

    def append(self, token: int) -> FinishReason | None:
        """Add one produced token and say whether it ends the answer: a stop id before a length before a repetition."""
        self.tokens.append(token)
        if token in self.stops:
            return "stop"
        if len(self.tokens) >= self.limit:
            return "length"
        rule = self.source.repetition
        return "repetition" if rule is not None and repeats(self.tokens, self.prompt_length, rule) else None

    def record(self, now: float) -> RequestRecord:
        """What it has cost until now."""
        first = self.answered if self.answered >= 0 else now
        started = self.started if self.started >= 0 else now
        return RequestRecord(
            prompt_tokens=self.prompt_length,
            generated_tokens=len(self.tokens) - self.prompt_length,
            cached_tokens=self.cached,
            seamless=self.seamless,
            miss=self.miss,
            queue_seconds=started - self.arrived,
            prefill_seconds=first - started,
            decode_seconds=now - first,
            preemptions=self.preemptions,
            slices=self.slices,
        )


def checked(number: int, source: GenerateRequest, limits: Limits, now: float) -> Request:
    """The record of a request that can run. Raises RequestError if it is malformed, ContextLengthError if it can never fit."""
    length = len(source.prompt)
    if not length or source.max_tokens < 1:
        raise RequestError(f"a request needs a prompt and max_tokens of at least 1, got {length} and {source.max_tokens}")
    if length >= limits.max_model_len:
        raise ContextLengthError(
            f"the prompt has {length} tokens, but the maximum context length is {limits.max_model_len} with one token of answer"
        )
    limit = min(length + source.max_tokens, limits.max_model_len)
    order = (source.priority if limits.policy == "priority" else 0, number)
    request = Request(number, source, list(source.prompt), length, limit, frozenset(source.stop_token_ids), order, now, now)
    needed = blocks_for(request.stored_at_most)
    if needed > limits.num_blocks:
        raise ContextLengthError(
            f"prompt and answer of {limit} tokens need {needed} blocks of the {limits.num_blocks} in the cache; "
            "lower max_tokens or raise cache.memory_bytes"
        )
    return request

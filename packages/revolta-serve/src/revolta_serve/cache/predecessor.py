"""The pool of the server this one replaces, computed from its rules: what `plan --layout predecessor` compares with.

One pool of equal blocks serves every kind of layer. A block covers a span of tokens of the attention layers, or one recurrent state, or
the ring of raw index keys; the span is chosen so that the pages of an attention layer are as large as a recurrent state. A request
takes blocks of every group, and the published number of tokens is the number of longest requests times their length, so it changes
with that length. `block`, `slot` and `state` here are that server's, not this one's.
"""

import math
from dataclasses import dataclass

from revolta_serve.cache.layout import ELEMENT_BYTES, SCALE_BYTES, Format, Window, heads_of
from revolta_serve.model.model_config import ModelConfig

ALIGNED = 16
"""Tokens of a kernel page: a span holds whole ones on every rank that shares it."""

HALF = 2
"""Bytes of an activation, an index key, a value of a convolution window: float16 always."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """A configuration as far as it shapes that pool."""

    tensor: int
    context: int
    kv: Format
    drafts: int = 0
    """Drafts a step; the convolution windows are wider by as many columns."""
    head: Format | None = None
    """Storage of the draft head's keys and values, when it drafts."""
    window: Window | None = None
    """The block drafter's context, when it drafts."""
    replay: bool = False
    """Recurrent states are computed again after acceptance, instead of being kept after every row."""
    ngram_states: bool = False
    """The n-gram history, too, is kept after every row."""
    step_tokens: int = 8192
    """Tokens of one step: a window keeps them beside what it reaches."""


@dataclass(frozen=True, slots=True)
class PredecessorCapacity:
    """What a budget gives with that layout, on each rank."""

    span: int
    """Tokens of an attention block."""
    page: int
    """Bytes of the attention layers that share a page, or of a recurrent state with its padding."""
    block_bytes: int
    groups: dict[str, int]
    """Blocks of a request of max_model_len in every group."""
    num_blocks: int
    max_model_len: int

    @property
    def blocks_per_request(self) -> int:
        """Blocks of a request of max_model_len."""
        return sum(self.groups.values())

    @property
    def concurrency(self) -> float:
        """Requests of max_model_len tokens at the same time."""
        return self.num_blocks / self.blocks_per_request

    @property
    def tokens(self) -> int:
        """The figure that server reports: concurrency times max_model_len, rounded down."""
        return self.num_blocks * self.max_model_len // self.blocks_per_request

    def beside(self, requests: int) -> int:
        """Tokens of attention blocks left when so many requests run, each with its states: what this server calls tokens."""
        states = self.blocks_per_request - self.groups["attention"]
        return max(0, self.num_blocks - requests * states) * self.span


def predecessor(model: ModelConfig, setup: Setup, *, max_model_len: int, memory_bytes: int) -> PredecessorCapacity:
    """Divide memory_bytes of a rank by that server's rules.

    Attention layers share a page in groups of `context` (their tokens are split over as many ranks); the draft head and all index keys
    are on every rank. Recurrent layers are dealt to as many groups as fill the pages of one block.
    """
    token = _token_bytes(model, setup, setup.kv)
    values = token - SCALE_BYTES[setup.kv] * 2 * heads_of(model, setup.tensor)
    qsa, gdn = model.layer_types.count("qsa"), model.layer_types.count("gdn")
    owners = math.ceil(qsa / setup.context)
    step = ALIGNED * setup.context
    # A page of `context` layers with 1 / context of the span each holds span · bytes of a token; scales do not count for the span.
    span = math.ceil(_state_bytes(model, setup) / values / step) * step
    page, index = span * token, span // model.index_ratio * model.index_dim * HALF
    head = 0 if setup.head is None else span * _token_bytes(model, setup, setup.head) + index
    kept = 2 + (0 if setup.replay else setup.drafts)
    groups = {
        "attention": math.ceil(math.ceil(max_model_len / setup.context) / (span // setup.context)),
        "recurrent": math.ceil(gdn / owners) * kept,
        "index ring": 1,
        "n-gram": (2 + (setup.drafts if setup.ngram_states else 0)) if model.ple_layers else 0,
        "drafter": 0 if setup.window is None else _window_blocks(setup, setup.window, span, page),
    }
    block = owners * page + qsa * index + head
    return PredecessorCapacity(span, page, block, groups, memory_bytes // block, max_model_len)


def _token_bytes(model: ModelConfig, setup: Setup, kv: Format) -> int:
    """Bytes of a token's K and V in one layer on a rank, scales included."""
    return 2 * heads_of(model, setup.tensor) * (model.head_dim * ELEMENT_BYTES[kv] + SCALE_BYTES[kv])


def _state_bytes(model: ModelConfig, setup: Setup) -> int:
    """Bytes of one recurrent layer's state on a rank: float32 state, float16 convolution window with a column for each draft."""
    state = model.gdn_value_heads // setup.tensor * model.gdn_value_dim * model.gdn_key_dim * 4
    return state + model.gdn_channels // setup.tensor * (model.conv_width - 1 + setup.drafts) * HALF


def _window_blocks(setup: Setup, window: Window, span: int, page: int) -> int:
    """Blocks of a drafter's window: its block is the largest aligned divisor of the span that fits a page in float16; the window keeps
    one block more than it reaches, and a step's tokens."""
    token = 2 * max(1, window.kv_heads // setup.tensor) * window.head_dim * HALF
    block = max(n for n in range(ALIGNED, span + 1, ALIGNED) if span % n == 0 and n * token <= page)
    return math.ceil((window.reach + block - 1 + setup.step_tokens) / block) + 1

"""The bytes of the two pools: what one token block and one state slot hold on one rank.

The model allocates its pools in these shapes and capacity.py counts them, so the plan that is printed is the memory that is used.
"""

import math
from dataclasses import dataclass
from typing import Literal

from revolta_serve.model.model_config import GRID, ModelConfig

BLOCK = GRID
"""Tokens of a block. It equals the recurrent chunk, so that every block boundary is a place where a state may be kept."""


def blocks_for(tokens: int) -> int:
    """Token blocks that hold this many tokens."""
    return -(-tokens // BLOCK)


WIDEST = 8
"""Rows a request may have in one decode step: a token and 7 drafts."""

Format = Literal["float32", "float16", "fp8_e4m3", "int8"]

ELEMENT_BYTES: dict[Format, int] = {"float32": 4, "float16": 2, "fp8_e4m3": 1, "int8": 1}

SCALE_BYTES: dict[Format, int] = {"float32": 0, "float16": 0, "fp8_e4m3": 0, "int8": 4}
"""Per token and KV head, for K and for V: INT8 carries a float32 scale; E4M3 has one constant per layer."""


@dataclass(frozen=True, slots=True)
class Plane:
    """One tensor of a pool, as one block or slot of one layer sees it."""

    name: str
    layers: int
    shape: tuple[int, ...]
    element: int
    """Bytes of an element."""

    @property
    def bytes(self) -> int:
        """Bytes in all layers."""
        return self.layers * math.prod(self.shape) * self.element


@dataclass(frozen=True, slots=True)
class Layout:
    """Planes of a token block and of a state slot on one rank."""

    block: tuple[Plane, ...]
    slot: tuple[Plane, ...]

    @property
    def block_bytes(self) -> int:
        """Bytes of one token block on this rank."""
        return sum(plane.bytes for plane in self.block)

    @property
    def slot_bytes(self) -> int:
        """Bytes of one state slot on this rank."""
        return sum(plane.bytes for plane in self.slot)


@dataclass(frozen=True, slots=True)
class Window:
    """The context a block drafter attends to: keys and values of the last tokens, in a ring of every state slot."""

    layers: int
    reach: int
    """Tokens back that a row sees, itself included."""
    rows: int
    """Rows of the block it drafts in; they lie in the ring behind the context."""
    kv_heads: int
    head_dim: int


def heads_of(model: ModelConfig, tensor: int) -> int:
    """KV heads of a rank: its share, or one that several ranks repeat."""
    return max(1, model.kv_heads // tensor)


def ring_rows(ratio: int) -> int:
    """Rows of the ring of raw index keys: the open index block of `ratio` tokens and the widest step, in whole blocks."""
    return math.ceil((ratio - 1 + WIDEST) / ratio) * ratio


def layout(
    model: ModelConfig,
    *,
    tensor: int,
    context: int,
    dtype: Format,
    kv: Format,
    index: int = 1,
    mtp: Format | None = None,
    window: Window | None = None,
) -> Layout:
    """The planes of a rank among `tensor` ranks, `context` of which share keys and values by token.

    dtype is the activation type (index keys and histories are kept in it), kv the storage of keys and values. GDN states are float32
    in every configuration. `index` ranks share the pooled index keys of a block, each holding every index-th; it divides the index
    blocks of a token block. mtp: storage of the draft head's keys and values when it runs; they are shared by token like the
    model's. window: of a block drafter, if one runs.
    """
    qsa, gdn, ple = model.layer_types.count("qsa"), model.layer_types.count("gdn"), len(model.ple_layers)
    act = ELEMENT_BYTES[dtype]
    key_heads, value_heads = model.gdn_key_heads // tensor, model.gdn_value_heads // tensor
    channels = 2 * key_heads * model.gdn_key_dim + value_heads * model.gdn_value_dim
    raw, pooled = (ring_rows(model.index_ratio), model.index_dim), (BLOCK // model.index_ratio // index, model.index_dim)

    def attended(prefix: str, layers: int, storage: Format) -> list[Plane]:
        tokens, heads = BLOCK // context, heads_of(model, tensor)
        planes = [Plane(f"{prefix}{name}", layers, (tokens, heads, model.head_dim), ELEMENT_BYTES[storage]) for name in "kv"]
        planes.append(Plane(f"{prefix}keys", layers, pooled, act))
        if SCALE_BYTES[storage]:
            planes += [Plane(f"{prefix}{name}_scale", layers, (tokens, heads), SCALE_BYTES[storage]) for name in "kv"]
        return planes

    block = attended("", qsa, kv)
    slot = [
        Plane("gdn", gdn, (value_heads, model.gdn_value_dim, model.gdn_key_dim), 4),
        Plane("conv", gdn, (model.conv_width - 1, channels), act),
        Plane("ple", ple, (model.ple_history, model.streams * model.hidden), act),
        Plane("ring", qsa, raw, act),
    ]
    if mtp is not None:
        block += attended("mtp_", 1, mtp)
        slot += [Plane("mtp_ring", 1, raw, act), Plane("mtp_hidden", 1, (model.streams, model.hidden), act)]
    if window is not None:
        shape = (window.reach - 1 + window.rows, max(1, window.kv_heads // tensor), window.head_dim)
        slot += [Plane(f"window_{name}", window.layers, shape, act) for name in "kv"]
    return Layout(tuple(block), tuple(slot))

"""A block drafter's dimensions, from the config.json of its directory, and its bytes on a rank."""

import math
from dataclasses import dataclass
from pathlib import Path

from revolta_serve.cache.layout import Window
from revolta_serve.config import ServeConfig
from revolta_serve.errors import ConfigError
from revolta_serve.model.fields import Fields, read_json
from revolta_serve.model.model_config import ModelConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Drafter:
    """A stack of sliding-window layers over features of the model, with a selector that walks two vocabulary codebooks."""

    hidden: int
    inner: int
    heads: int
    features: int
    """Layers of the model whose streams are its context."""
    conv_width: int
    conv_group: int
    """Channels that share the dynamic part of a convolution kernel."""
    rank: int
    """Width of the codebooks."""
    window: Window


def read(config: ServeConfig, model: ModelConfig) -> Drafter:
    """Read speculate.drafter/config.json; fields may stand in dflash_config or beside it.

    Raises ConfigError naming file and field for what is missing, of another width than the model, a layer without a window (its keys
    and values would grow with the context), or a block of another length than the drafts and the token before them.
    """
    path = Path(config.speculate.drafter) / "config.json"
    top = Fields(read_json(path), str(path))
    below = top.below("dflash_config")

    def number(name: str) -> int:
        return (below if below.has(name) else top).integer(name)

    layers = top.integer("num_hidden_layers")
    types = top.raw.get("layer_types") or ["sliding_attention"] * layers
    if not isinstance(types, list) or len(types) != layers or set(types) != {"sliding_attention"}:
        raise top.error("layer_types", f"{layers} times sliding_attention: only windows are kept for a drafter")
    if top.integer("hidden_size") != model.hidden:
        raise top.error("hidden_size", f"{model.hidden}, the model's, whose embedding and lm_head the drafter uses")
    rows = number("block_size")
    if rows != config.speculate.width:
        raise ConfigError(
            f"speculate.drafts={config.speculate.drafts} and the token before them are {config.speculate.width} rows, but {path} has "
            f"block_size {rows}; use --set speculate.drafts={rows - 1}"
        )
    reach = number("swa_window_size" if below.has("swa_window_size") else "sliding_window")
    window = Window(layers, reach, rows, top.integer("num_key_value_heads"), top.integer("head_dim"))
    taps = (below if below.has("target_layer_ids") else top).integers("target_layer_ids", high=model.layers - 1)
    return Drafter(
        hidden=model.hidden, inner=top.integer("intermediate_size"), heads=top.integer("num_attention_heads"), features=len(taps),
        conv_width=number("conv_kernel_size"), conv_group=number("conv_group_size"), rank=number("selector_rank"), window=window,
    )  # fmt: skip


def drafter_bytes(d: Drafter, model: ModelConfig, ranks: int, act: int) -> int:
    """Bytes of a drafter on a rank: heads, inner width and vocabulary rows are cut, the rest is on every rank."""
    e, dim, heads, kv = d.hidden, d.window.head_dim, math.ceil(d.heads / ranks), max(1, d.window.kv_heads // ranks)
    attention = 2 * heads * dim * e + 2 * kv * dim * e + 2 * dim
    conv = 2 * d.conv_width * (e + e // d.conv_group * e)
    layer = attention + 3 * math.ceil(d.inner / ranks) * e + 2 * conv + 2 * e
    selector = 2 * -(-model.vocab // ranks) * d.rank + d.rank * e
    return (d.window.layers * layer + d.features * e * e + 2 * e + selector) * act

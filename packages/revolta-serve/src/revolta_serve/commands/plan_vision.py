"""The vision tower's dimensions and bytes, as model.visual.* of the published checkpoints lays it out."""

from dataclasses import dataclass
from typing import Any

from revolta_serve.errors import ConfigError
from revolta_serve.model.fields import Fields
from revolta_serve.model.model_config import ModelConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionShape:
    """Dimensions of the tower; fields that config.json leaves out have the architecture's defaults."""

    depth: int
    hidden: int
    heads: int
    inner: int
    out: int
    patch: int
    """Values of a patch: channels · frames · height · width."""
    merge: int
    """Patches that become one token."""
    positions: int


def read(raw: dict[str, Any], model: ModelConfig, file: str) -> VisionShape:
    """The vision_config of a config.json. Raises ConfigError when the model has none."""
    if not model.has_vision:
        raise ConfigError(f"model.vision is on, but {file} has no vision_config; leave it off (--set model.vision=false)")
    vision = Fields(raw, file).below("vision_config")
    channels, frames = vision.integer("in_channels", default=3), vision.integer("temporal_patch_size", default=2)
    side, merge = vision.integer("patch_size", default=16), vision.integer("spatial_merge_size", default=2)
    return VisionShape(
        depth=vision.integer("depth", default=27), hidden=vision.integer("hidden_size", default=1152),
        heads=vision.integer("num_heads", default=16), inner=vision.integer("intermediate_size", default=4304),
        out=vision.integer("out_hidden_size", default=model.hidden), patch=channels * frames * side * side, merge=merge * merge,
        positions=vision.integer("num_position_embeddings", default=2304),
    )  # fmt: skip


def vision_bytes(v: VisionShape, ranks: int, act: int) -> int:
    """Bytes of a rank's tower: matrices cut over heads and inner width, where both divide; norms, patches and positions on each rank."""
    cut = ranks if v.heads % ranks == 0 and v.inner % ranks == 0 and v.merge * v.hidden % ranks == 0 else 1
    h, wide, merged = v.hidden, v.inner, v.merge * v.hidden
    block = (3 * h * (h + 1) + h * h + wide * (h + 1) + h * wide) // cut + 2 * h + 4 * h
    merger = (merged * (merged + 1) + v.out * merged) // cut + v.out + 2 * h
    return (v.depth * block + merger + h * (v.patch + 1) + v.positions * h) * act

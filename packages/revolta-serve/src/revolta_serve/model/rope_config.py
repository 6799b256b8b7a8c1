"""Rotary embedding as the checkpoint states it: theta, the rotated dims, their split over three axes, and YaRN."""

import math
import struct
from dataclasses import dataclass
from typing import Any, Literal

from revolta_serve.model.fields import Fields

REFERENCE_SECTIONS = (11, 11, 10)
"""Sections the reference implementation assumes when a config has none; cut to the pairs that exist."""


def _f32(value: float) -> float:
    """`value` rounded to float32: frequencies are float32 numbers in the reference, at every step."""
    return float(struct.unpack("f", struct.pack("f", value))[0])


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary parameters of the text model; the indexer and the draft head use the same."""

    theta: float
    dims: int
    """Rotated dims of a head: head_dim · partial_rotary_factor; pair i is dims i and i + dims/2."""
    sections: tuple[int, int, int]
    """Pairs that follow time, height, width; they interleave (time, height, width, time, ...), see `axes`."""
    kind: Literal["default", "yarn"]
    factor: float
    """Context extension; 1.0 without YaRN."""
    original: int
    """Positions the model was trained on, the length in YaRN's correction range."""
    attention_factor: float
    """Multiplies cos and sin of the rotated dims: 0.1·ln(factor) + 1 under YaRN, else 1."""
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True

    @classmethod
    def read(cls, text: Fields, head_dim: int, max_positions: int) -> "RopeConfig":
        """Read `rope_parameters`, overridden field by field by `rope_scaling` where both exist (text config `text`).

        Older spellings are understood: rope_theta and partial_rotary_factor beside the objects, `type` for `rope_type`.
        Raises ConfigError for an unknown kind, sections that do not add up, or contiguous sections.
        """
        merged: dict[str, Any] = {}
        for name in ("rope_theta", "partial_rotary_factor", "original_max_position_embeddings"):
            if text.has(name):
                merged[name] = text.raw[name]
        where = "rope_parameters"
        for name in ("rope_parameters", "rope_scaling"):
            found = {key: value for key, value in text.below(name).raw.items() if value is not None}
            if "type" in found:
                found.setdefault("rope_type", found["type"])
            if found:
                where = name
            merged |= found
        rope = Fields(merged, text.file, f"{text.path}{where}.")

        kind = rope.choice("rope_type", ("default", "yarn"), "default")
        partial = rope.number("partial_rotary_factor", "a number in (0, 1]", low=1e-9, high=1.0, default=1.0)
        dims = int(head_dim * partial)
        if dims < 2 or dims % 2:
            raise rope.error("partial_rotary_factor", f"such that head_dim {head_dim} times it is an even number of dims, not {dims}")
        if not rope.flag("mrope_interleaved", True):
            raise rope.error("mrope_interleaved", "true (axes interleave pair by pair in this architecture)")
        theta = rope.number("rope_theta", "a number > 1", low=1.0 + 1e-9, default=10_000.0)
        sections = _sections(rope, dims // 2)
        if kind == "default":
            return cls(theta, dims, sections, "default", 1.0, max_positions, 1.0)
        return cls._read_yarn(rope, theta, dims, sections, max_positions)

    @classmethod
    def _read_yarn(cls, rope: Fields, theta: float, dims: int, sections: tuple[int, int, int], max_positions: int) -> "RopeConfig":
        original = rope.integer("original_max_position_embeddings", default=max_positions)
        factor = rope.number("factor", "a number >= 1", low=1.0, default=max(1.0, max_positions / original))

        def scale(weight: float) -> float:
            return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

        mscale = rope.number("mscale", "a number >= 0", low=0.0, default=0.0)
        mscale_all = rope.number("mscale_all_dim", "a number >= 0", low=0.0, default=0.0)
        inferred = scale(mscale) / scale(mscale_all) if mscale and mscale_all else scale(1.0)
        return cls(
            theta, dims, sections, "yarn", factor, original,
            attention_factor=rope.number("attention_factor", "a number > 0", low=1e-9, default=inferred),
            beta_fast=rope.number("beta_fast", "a number > 0", low=1e-9, default=32.0),
            beta_slow=rope.number("beta_slow", "a number > 0", low=1e-9, default=1.0),
            truncate=rope.flag("truncate", True),
        )  # fmt: skip

    def inverse_frequencies(self) -> tuple[float, ...]:
        """Radians a position turns each pair by, float32 numbers [dims/2]; rounded where the reference rounds.

        θ^(-2i/dims); under YaRN blended with that over `factor`, by a ramp between the pairs that make beta_fast and
        beta_slow turns in the original context (Peng et al. 2023, arXiv 2309.00071, with the reference's integer bounds).
        """
        frequencies = [_f32(self.theta ** _f32(2 * i / self.dims)) for i in range(self.dims // 2)]
        plain = [_f32(1.0 / f) for f in frequencies]
        if self.kind == "default":
            return tuple(plain)
        low, high = self._correction(self.beta_fast), self._correction(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, self.dims - 1)
        if low == high:
            high += 0.001
        blended = []
        for i, (frequency, extrapolated) in enumerate(zip(frequencies, plain, strict=True)):
            interpolated = _f32(1.0 / _f32(self.factor * frequency))
            keep = _f32(1 - min(max(_f32(_f32(i - low) / _f32(high - low)), 0.0), 1.0))
            blended.append(_f32(_f32(interpolated * _f32(1 - keep)) + _f32(extrapolated * keep)))
        return tuple(blended)

    def _correction(self, turns: float) -> float:
        """The (fractional) pair that makes `turns` turns over the original context."""
        return self.dims * math.log(self.original / (turns * 2 * math.pi)) / (2 * math.log(self.theta))

    def axes(self) -> tuple[int, ...]:
        """The axis each pair follows: 0 time, 1 height, 2 width; height where i mod 3 = 1 and i < 3·sections[1], width alike."""
        _, height, width = self.sections
        return tuple(1 if i % 3 == 1 and i < 3 * height else 2 if i % 3 == 2 and i < 3 * width else 0 for i in range(self.dims // 2))


def _sections(rope: Fields, pairs: int) -> tuple[int, int, int]:
    if not rope.has("mrope_section"):
        height = min(REFERENCE_SECTIONS[1], (pairs + 1) // 3)
        width = min(REFERENCE_SECTIONS[2], pairs // 3)
        return pairs - height - width, height, width
    given = rope.integers("mrope_section")
    if len(given) != 3 or sum(given) != pairs:
        raise rope.error("mrope_section", f"three integers that add up to {pairs}, the number of rotary pairs")
    time, height, width = given
    if (height and 3 * height - 2 >= pairs) or (width and 3 * width - 1 >= pairs):
        raise rope.error("mrope_section", f"such that interleaved height and width pairs fit into {pairs} pairs")
    return time, height, width

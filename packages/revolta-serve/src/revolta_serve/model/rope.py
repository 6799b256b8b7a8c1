"""Rotary factors: interleaved multi-axis positions, plain or YaRN frequencies."""

import torch
from torch import Tensor

from revolta_serve.model.model_config import ModelConfig
from sm70kernels import rows


class Rotary:
    """cos and sin of every rotary pair at given positions.

    Pair i turns by position · inv_freq[i]; of the three position axes (time, height, width) pair i follows height if i mod 3 = 1
    and i < 3·sections[1], width if i mod 3 = 2 and i < 3·sections[2], else time. Text has equal axes.
    """

    def __init__(self, config: ModelConfig, dtype: torch.dtype) -> None:
        rope = config.rope
        self.dtype = dtype
        self.inv_freq = torch.tensor(rope.inverse_frequencies(), dtype=torch.float32)
        self.factor = rope.attention_factor
        self.axis = torch.tensor(rope.axes(), dtype=torch.long)
        """i64[RH] the axis each pair follows."""

    def __call__(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """positions i64[3, M] -> cos, sin act[M, RH], computed in float32, times the attention factor, then rounded."""
        angle = positions.float().index_select(0, self.axis).t().contiguous() * self.inv_freq
        cos = rows.elementwise(torch.cos, angle) * self.factor
        sin = rows.elementwise(torch.sin, angle) * self.factor
        return cos.to(self.dtype), sin.to(self.dtype)

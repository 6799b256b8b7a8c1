"""Rotary factors: interleaved multi-axis positions, plain or YaRN frequencies."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from revolta_serve.model.model_config import ModelConfig


class Rotary:
    """cos and sin of every rotary pair at given positions.

    Pair i turns by position · inv_freq[i]; of the three position axes (time, height, width) pair i follows height if i mod 3 = 1
    and i < 3·sections[1], width if i mod 3 = 2 and i < 3·sections[2], else time. Text has equal axes.
    """

    def __init__(self, config: ModelConfig, dtype: torch.dtype) -> None:
        rope = config.rope
        self.dtype = dtype
        self.inv_freq = np.array(rope.inverse_frequencies(), np.float32)
        self.factor = np.float32(rope.attention_factor)
        self.axis = np.array(rope.axes(), np.int64)
        """[RH] the axis each pair follows."""

    def __call__(self, positions: NDArray[np.int64]) -> tuple[Tensor, Tensor]:
        """positions [3, M] -> cos, sin act[M, RH], computed in float32, times the attention factor, then rounded.

        numpy treats every angle alike, wherever it stands in the array.
        """
        angle = positions.take(self.axis, 0).T.astype(np.float32, order="C")
        angle *= self.inv_freq
        cos, sin = (torch.from_numpy(turn(angle) * self.factor) for turn in (np.cos, np.sin))
        return cos.to(self.dtype), sin.to(self.dtype)

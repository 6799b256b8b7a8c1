"""The two pools of a rank: token blocks (K, V, pooled index keys) and state slots (everything recurrent)."""

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from revolta_serve.cache.layout import Format, Plane, layout
from revolta_serve.model.model_config import ModelConfig


class Views(NamedTuple):
    """The tensors of :class:`Pools` by layer: layers take theirs in every step, and making a view costs as much as a small product."""

    k: tuple[Tensor, ...]
    v: tuple[Tensor, ...]
    keys: tuple[Tensor, ...]
    gdn: tuple[Tensor, ...]
    conv: tuple[Tensor, ...]
    ple: tuple[Tensor, ...]
    ring: tuple[Tensor, ...]


@dataclass(frozen=True)
class Pools:
    """Tensors of all layers, the layer first; layers address them by their rank among layers of the same type.

    L is the number of layers of the type, B blocks, P tokens a rank holds of a block (64 / context ranks), SL slots.
    """

    k: Tensor
    v: Tensor
    """act[L, B, P, HK, D] rotated keys and values."""
    keys: Tensor
    """act[L, B, 64 / ratio, DI] pooled, normalised, rotated index keys."""
    gdn: Tensor
    """f32[L, SL, HV, V, K] delta-rule state."""
    conv: Tensor
    """act[L, SL, KW-1, C] inputs of the short convolution, oldest first."""
    ple: Tensor
    """act[L, SL, (KW-1)·ngram, S·E] normalised n-gram values awaiting their dilated taps, oldest first."""
    ring: Tensor
    """act[L, SL, RR, DI] raw index keys of the open block, at position mod RR."""

    @cached_property
    def layers(self) -> Views:
        """Every tensor as a tuple of its layers."""
        return Views(*(tensor.unbind(0) for tensor in (self.k, self.v, self.keys, self.gdn, self.conv, self.ple, self.ring)))

    @cached_property
    def states(self) -> tuple[Tensor, ...]:
        """What a snapshot holds, u8[L, SL, bytes] over the same memory: states, windows and histories, of the layers that there are.

        The ring is not among them: snapshots are taken on the position grid, where no index block is open.
        """
        return tuple(tensor.view(*tensor.shape[:2], -1).view(torch.uint8) for tensor in (self.gdn, self.conv, self.ple) if tensor.numel())

    @property
    def kv_bytes(self) -> int:
        """Bytes of the token blocks."""
        return sum(t.numel() * t.element_size() for t in (self.k, self.v, self.keys))

    @property
    def state_bytes(self) -> int:
        """Bytes of the state slots."""
        return sum(t.numel() * t.element_size() for t in (self.gdn, self.conv, self.ple, self.ring))


def allocate(config: ModelConfig, *, blocks: int, slots: int, tensor: int, context: int, dtype: torch.dtype) -> Pools:
    """Allocate the pools of one rank, zeroed, in the shapes that cache.layout plans with.

    tensor and context are the sizes of the rank's groups.
    """
    name: Format = "float16" if dtype == torch.float16 else "float32"
    shape = layout(config, tensor=tensor, context=context, dtype=name, kv=name)

    def plane(p: Plane, count: int) -> Tensor:
        return torch.zeros(p.layers, count, *p.shape, dtype=torch.float32 if p.name == "gdn" else dtype)

    return Pools(**{p.name: plane(p, blocks) for p in shape.block}, **{p.name: plane(p, slots) for p in shape.slot})

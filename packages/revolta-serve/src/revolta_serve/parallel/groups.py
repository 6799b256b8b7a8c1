"""Process groups and the collectives the model uses, each with a fixed order of summation.

A reduction library may add ranks in an order that depends on where an element lies in the buffer; then a row's bits depend on its
place in the batch. Here every rank receives all parts and adds them in rank order, so an all-reduce is a pure function of the parts.
"""

from collections import Counter
from dataclasses import dataclass, field
from datetime import timedelta

import torch.distributed as dist
from torch import Tensor

from revolta_serve.errors import ConfigError


@dataclass(slots=True)
class Group:
    """Some ranks that work together. `handle` is None for a group of one, whose collectives are the identity."""

    rank: int = 0
    size: int = 1
    handle: dist.ProcessGroup | None = None
    calls: Counter[str] = field(default_factory=Counter)
    """Collectives issued so far, by name."""

    def gather(self, x: Tensor) -> Tensor:
        """Return the parts of all ranks stacked in rank order: x [...] -> [size, ...], same dtype on every rank."""
        if self.handle is None:
            return x.unsqueeze(0)
        self.calls["gather"] += 1
        parts = x.new_empty((self.size, *x.shape))
        dist.all_gather(list(parts.unbind(0)), x.contiguous(), group=self.handle)
        return parts

    def sum(self, x: Tensor) -> Tensor:
        """Return the sum of x [...] over ranks, added in rank order in float32 and rounded once to x's dtype."""
        if self.handle is None:
            return x
        self.calls["sum"] += 1
        parts = x.new_empty((self.size, *x.shape))
        dist.all_gather(list(parts.unbind(0)), x.contiguous(), group=self.handle)
        total = parts[0].float()
        for part in parts[1:]:
            total = total + part.float()
        return total.to(x.dtype)


@dataclass(frozen=True, slots=True)
class Groups:
    """The groups a rank belongs to: `tensor` shards weights, `context` (a part of it that shares KV heads) shards K and V by token."""

    tensor: Group = field(default_factory=Group)
    context: Group = field(default_factory=Group)


def create_groups(rank: int, tensor: int, context: int, rendezvous: str | None) -> Groups:
    """Join the process groups of this rank (gloo on CPU).

    `rendezvous` is a file that all ranks can reach, needed when tensor > 1. Raises ConfigError when context does not divide tensor.
    """
    if tensor % context:
        raise ConfigError(f"parallel.decode_context={context} does not divide parallel.tensor={tensor}; choose a divisor")
    if tensor == 1:
        return Groups()
    if rendezvous is None:
        raise ConfigError(f"parallel.tensor={tensor} needs a rendezvous file shared by its ranks, got none")
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=tensor, timeout=timedelta(minutes=10))
    shared = Group()
    # Every rank must take part in the creation of every group, its own or not.
    for first in range(0, tensor, context):
        members = list(range(first, first + context))
        handle = dist.new_group(members) if context > 1 else None
        if rank in members and context > 1:
            shared = Group(rank - first, context, handle)
    return Groups(Group(rank, tensor, dist.group.WORLD), shared)

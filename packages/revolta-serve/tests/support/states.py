"""What a runner's pools hold for one request, copied out so that two runs can be compared bit for bit."""

import torch
from torch import Tensor

from revolta_serve.runner.runner import Runner
from support.drive import BLOCK, Request

TRAVELLING = ("gdn", "conv", "ple")
"""Planes of a slot that a snapshot holds."""


def poison(runner: Runner) -> None:
    """Fill every pool with NaN: whatever is read before it is written shows."""
    for name in ("k", "v", "keys", "gdn", "conv", "ple", "ring"):
        getattr(runner.pools, name).fill_(torch.nan)


def slot_of(runner: Runner, slot: int) -> dict[str, Tensor]:
    """The planes of a slot, without the ring."""
    return {name: getattr(runner.pools, name)[:, slot].clone() for name in TRAVELLING}


def contents(request: Request) -> dict[str, Tensor]:
    """The request's blocks as far as it is computed and its running slot, the ring of raw index keys included."""
    runner, first = request.runner, request.first_block
    blocks = slice(first, first + -(-request.done // BLOCK))
    stored = {name: getattr(runner.pools, name)[:, blocks].clone() for name in ("k", "v", "keys")}
    return stored | slot_of(runner, request.slot) | {"ring": runner.pools.ring[:, request.slot].clone()}


def differing(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> list[str]:
    """Names of planes that differ in a bit; NaN equals the same NaN."""
    assert ours.keys() == theirs.keys()
    return [name for name in ours if not torch.equal(ours[name].view(torch.uint8), theirs[name].view(torch.uint8))]

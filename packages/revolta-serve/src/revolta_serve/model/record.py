"""What a verify pass leaves behind: the inputs of every recurrent state, so that one commit can advance the states afterwards.

Which of a request's rows stand is known when their tokens have been judged. K, V and index keys are addressed by position, and a later
row at the same position overwrites them; a recurrent state cannot be taken back. So the pass reads the states, records what would have
changed them, and the replay ops repeat exactly that over the rows that stand.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(slots=True)
class Record:
    """One tensor a layer, in the order of the layers of that type; M = N·T rows, request after request."""

    conv: list[Tensor] = field(default_factory=list)
    """act[M, C] inputs of the short convolution."""
    qkv: list[Tensor] = field(default_factory=list)
    """act[M, C] its outputs: inputs of the delta rule."""
    a: list[Tensor] = field(default_factory=list)
    b: list[Tensor] = field(default_factory=list)
    """act[M, HV] raw decay and write strength."""
    ple: list[Tensor] = field(default_factory=list)
    """act[M, S·E] rows that the n-gram history takes in."""


def by_request(rows: Sequence[Tensor], requests: int) -> Tensor:
    """Layers of rows [N·T, X] as one tensor [L, N, T, X], the form the replay ops take."""
    stacked: Tensor = torch.stack(tuple(rows)).unflatten(1, (requests, -1))
    return stacked

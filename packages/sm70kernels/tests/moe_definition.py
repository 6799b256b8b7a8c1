"""What the experts compute, from the formulas alone: route by route, and an expert at a time for sizes where loops take too long.

Both take what the reference of moe_qpn takes, and `h`, the rounding to the activation dtype.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from .packed_codes import weights as weights_of

Rounding = Callable[[Tensor], Tensor]


def silu(x: Tensor) -> Tensor:
    return torch.where(x == -math.inf, 0.0, x / (1 + (-x).exp()))


def _expert(
    e: int,
    hidden: int,
    dense: tuple[Tensor | None, Tensor | None],
    packed: tuple[Tensor | None, Tensor | None],
    format: str | None,
    width: int | None,
    phase: int | None,
) -> tuple[Tensor, Tensor]:
    """Both matrices of an expert: gate rows before up rows [2I, E], and [E, I]."""
    if dense[0] is not None and dense[1] is not None:
        return dense[0][e], dense[1][:, e]
    assert packed[0] is not None
    assert packed[1] is not None
    assert width is not None
    both = weights_of(packed[0][e], str(format), 2 * width, hidden, 0)
    down = weights_of(packed[1][e], str(format), hidden, width, phase or 0)
    return torch.stack([both[2 * j + half] for half in (0, 1) for j in range(width)]), down


def naive(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    w13: Tensor | None,
    w2: Tensor | None,
    shared13: Tensor | None,
    shared2: Tensor | None,
    shared_gate: Tensor | None,
    format: str | None,
    width: int | None,
    phase: int | None,
    packed13: Tensor | None,
    packed2: Tensor | None,
    h: Rounding = lambda x: x,
) -> Tensor:
    def expert(row: Tensor, both: Tensor, down: Tensor) -> Tensor:
        half = both.shape[0] // 2
        gate, up = h((both[:half] * row).sum(1)), h((both[half:] * row).sum(1))
        return h((down * h(h(silu(gate)) * up)).sum(1))

    out = torch.zeros_like(x)
    count = len(w13) if w13 is not None else len(packed13) if packed13 is not None else 0
    for m in range(x.shape[0]):
        for r, e in enumerate(ids[m].tolist()):
            if 0 <= e < count:
                both, down = _expert(e, x.shape[1], (w13, w2), (packed13, packed2), format, width, phase)
                out[m] += weights[m, r] * expert(x[m], both, down)
        out[m] = h(out[m])
        if shared13 is not None and shared2 is not None and shared_gate is not None:
            gate = 1 / (1 + (-h((shared_gate[0] * x[m]).sum())).exp())
            out[m] += h(expert(x[m], shared13, shared2) * gate)
    return out


def large(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    w13: Tensor | None,
    w2: Tensor | None,
    shared13: Tensor | None,
    shared2: Tensor | None,
    shared_gate: Tensor | None,
    format: str | None,
    width: int | None,
    phase: int | None,
    packed13: Tensor | None,
    packed2: Tensor | None,
    h: Rounding = lambda x: x,
) -> Tensor:
    def expert(rows: Tensor, both: Tensor, down: Tensor) -> Tensor:
        gate, up = h(rows @ both.T).chunk(2, dim=1)
        return h(h(h(silu(gate)) * up) @ down.T)

    bank = w13 if w13 is not None else packed13
    assert bank is not None
    y = x.new_zeros(*ids.shape, x.shape[1])
    valid = (ids >= 0) & (ids < len(bank))
    for e in ids[valid].unique().tolist():
        both, down = _expert(e, x.shape[1], (w13, w2), (packed13, packed2), format, width, phase)
        m, slot = (ids == e).nonzero(as_tuple=True)
        y[m, slot] = expert(x[m], both, down)
    out = h((torch.where(valid, weights, 0.0)[..., None] * y).sum(1))
    if shared13 is not None and shared2 is not None and shared_gate is not None:
        out += h(expert(x, shared13, shared2) / (1 + (-h(x @ shared_gate.T)).exp()))
    return out

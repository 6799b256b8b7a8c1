"""Sliding windows of per-request inputs: the last H rows a depthwise convolution has seen, oldest first, one window a state slot.

Everything here moves rows; nothing rounds. Windows are [L, SL, H, C] (L layers, SL slots); a call's rows are [L, N, T, C].
"""

from collections.abc import Sequence

import torch
from torch import Tensor


def joined(window: Tensor, x: Tensor, slot: Tensor, fresh: Tensor | None = None) -> Tensor:
    """Return [L, N, H + T, C]: each request's stored window, then its T new rows. Where fresh is 1 the window reads as zero.

    A request whose slot is -1 reads slot 0 and must not be stored.
    """
    history = window.index_select(1, slot.clamp(min=0) if min(slot.tolist()) < 0 else slot)
    if fresh is not None and any(fresh.tolist()):
        history.masked_fill_(fresh.bool()[:, None, None], 0.0)
    return torch.cat([history, x], 2)


def store(window: Tensor, sequence: Tensor, slot: Sequence[int], taken: Sequence[int]) -> None:
    """Write the window after taken[i] of request i's new rows into slot[i], in all layers; slot -1 stores nothing.

    `sequence` is what :func:`joined` returned: a copy, so a slot may be read and written by one call.
    """
    layers, _, length, channels = sequence.shape
    held = window.shape[2]
    active = [i for i, s in enumerate(slot) if s >= 0]
    if not active:
        return
    if len(active) == len(slot) and min(taken) == max(taken):
        latest = sequence.narrow(2, taken[0], held)
    else:
        index = [i * length + taken[i] + j for i in active for j in range(held)]
        latest = sequence.view(layers, -1, channels).index_select(1, torch.tensor(index)).view(layers, -1, held, channels)
    window.index_copy_(1, torch.tensor([slot[i] for i in active]), latest)


def replay(window: Tensor, x: Tensor, slot: Tensor, accepted: Tensor, snapshot_slot: Tensor, snapshot_at: Tensor) -> None:
    """Advance every window by its accepted rows, in place, and store the window after snapshot_at rows to snapshot_slot.

    Nothing is stored for a request with accepted 0 or slot -1; no snapshot when snapshot_slot is -1 or snapshot_at is outside
    1..accepted.
    """
    if slot.shape[0] == 0:
        return
    sequence = joined(window, x, slot)
    taken, at = accepted.tolist(), snapshot_at.tolist()
    running = [s if n > 0 else -1 for s, n in zip(slot.tolist(), taken, strict=True)]
    wanted = zip(running, taken, snapshot_slot.tolist(), at, strict=True)
    store(window, sequence, running, taken)
    store(window, sequence, [target if s >= 0 and 1 <= m <= n else -1 for s, n, target, m in wanted], at)

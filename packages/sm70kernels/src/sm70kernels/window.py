"""Sliding windows of per-request inputs: the last H rows a depthwise convolution has seen, oldest first, one window a state slot.

Everything here moves rows; nothing rounds. Windows are [L, SL, H, C] (L layers, SL slots); a call's rows are [L, N, T, C]. numpy
works on the tensors' memory because its indexing costs a third of torch's.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from sm70kernels.snapshots import Kept

Array = NDArray[Any]


def joined(window: Array, x: Array, slot: Sequence[int], fresh: Sequence[int] = ()) -> Array:
    """Return [L, N, H + T, C]: each request's stored window, then its T new rows. Where fresh is 1 the window reads as zero.

    A request whose slot is -1 reads slot 0 and must not be stored.
    """
    history = window.take([max(s, 0) for s in slot], 1)
    if any(fresh):
        history[:, np.flatnonzero(fresh)] = 0
    return np.concatenate([history, x], 2)


def store(window: Array, sequence: Array, slot: Sequence[int], taken: Sequence[int]) -> None:
    """Write the window after taken[i] of request i's new rows into slot[i], in all layers; slot -1 stores nothing.

    `sequence` is what :func:`joined` returned: a copy, so a slot may be read and written by one call.
    """
    held = window.shape[2]
    active = [i for i, s in enumerate(slot) if s >= 0]
    if not active:
        return
    if len(active) == len(slot) and min(taken) == max(taken):
        window[:, slot] = sequence[:, :, taken[0] : taken[0] + held]
        return
    for i in active:
        window[:, slot[i]] = sequence[:, i, taken[i] : taken[i] + held]


def keep(pool: Array, sequence: Array, kept: Sequence[Kept]) -> None:
    """Write each kept window to its slot of one layer's pool [SL, H, C]; sequence [N, H + T, C] is one of :func:`joined`."""
    held = pool.shape[1]
    for i, at, slot in kept:
        pool[slot] = sequence[i, at : at + held]


def replay(window: Tensor, x: Tensor, slot: Tensor, accepted: Tensor, snapshot_slot: Tensor, snapshot_at: Tensor) -> None:
    """Advance every window by its accepted rows, in place, and store the window after snapshot_at rows to snapshot_slot.

    Nothing is stored for a request with accepted 0 or slot -1; no snapshot when snapshot_slot is -1 or snapshot_at is outside
    1..accepted. Raises ValueError when a request with a slot accepts more rows than there are.
    """
    if slot.shape[0] == 0:
        return
    pool, taken, at = window.numpy(), accepted.tolist(), snapshot_at.tolist()
    running = [s if n > 0 else -1 for s, n in zip(slot.tolist(), taken, strict=True)]
    most = max((n for s, n in zip(running, taken, strict=True) if s >= 0), default=0)
    if most > x.shape[2]:
        raise ValueError(f"accepted {most} of T={x.shape[2]} recorded rows; a step accepts at most the rows it verified")
    sequence = joined(pool, x.numpy(), running)
    wanted = zip(running, taken, snapshot_slot.tolist(), at, strict=True)
    store(pool, sequence, running, taken)
    store(pool, sequence, [target if s >= 0 and 1 <= m <= n else -1 for s, n, target, m in wanted], at)

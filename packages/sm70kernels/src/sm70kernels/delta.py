"""The gated delta rule on CPU: gates, normalised heads, one recurrent token. gdn_step and gdn_replay share it bit for bit.

Notation: HK key heads, HV value heads, R = HV / HK value heads a key head (value head j reads key head j // R), K and V the head
widths. A state is S [.., V, K] with K contiguous, the transpose of the M of the papers. Per token:

    S <- exp(g) S;   u = beta (v - S k);   S <- S + u k^T;   o = S q

Element-wise products and sums over the last axis only: a request's bits do not depend on which requests share the call.
Source: Gated Delta Networks (Yang, Kautz, Hatamizadeh 2024), equation 10, with the l2-normalised q and k of Qwen3-Next.
"""

import math
from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from sm70kernels import rows

L2_EPS = 1e-6
"""Added to the sum (not the mean) of squares of a q or k head, inside the root."""


def gates(a: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
    """Return (g, beta), float32 [.., HV] like a and b: the log decay (<= 0) and the write strength (0..1) of each head.

    g = -exp(A_log) softplus(a + dt_bias), where softplus is the identity above 20; beta = sigmoid(b). A_log and dt_bias are [HV], or
    [L, HV] for a and b [L, .., HV].
    """
    # A few weights: Python's exp rounds them correctly and knows no neighbours. Above 89 the float32 result is inf.
    rate = torch.tensor([-math.exp(min(x, 100.0)) for x in A_log.flatten().tolist()]).view(A_log.shape)
    if A_log.dim() > 1:
        by_layer = (A_log.shape[0], *(1,) * (a.dim() - 2), A_log.shape[1])
        rate, dt_bias = rate.view(by_layer), dt_bias.view(by_layer)
    return rows.softplus(a.float() + dt_bias) * rate, rows.sigmoid(b.float())


@lru_cache(maxsize=64)
def _scale(key_heads: int, key_dim: int) -> Tensor:
    """[2 HK, 1]: K^-1/2 for the q heads, 1 for the k heads."""
    return torch.cat([torch.full((key_heads, 1), key_dim**-0.5), torch.ones(key_heads, 1)])


def heads(qkv: Tensor, value_heads: int, value_dim: int, key_dim: int) -> tuple[Tensor, Tensor, Tensor]:
    """Split qkv [.., C], C = 2 HK K + HV V, into float32 q, k [.., HK, K] (both l2-normalised, q also times K^-1/2) and v [.., HV, V].

    Raises ValueError when C leaves no whole number of key heads that divides HV.
    """
    lead, channels, values = qkv.shape[:-1], qkv.shape[-1], value_heads * value_dim
    key_heads, rest = divmod(channels - values, 2 * key_dim)
    if rest or key_heads < 1 or value_heads % key_heads:
        raise ValueError(
            f"qkv axis -1: C={channels}, but C = 2*HK*K + HV*V with HV={value_heads}, V={value_dim}, K={key_dim} needs a whole HK "
            f"that divides HV; pass q, k and v side by side, unrepeated"
        )
    qk, v = torch.split_with_sizes(qkv.float(), [channels - values, values], -1)
    qk = qk.reshape(*lead, 2 * key_heads, key_dim)
    qk = (qk * torch.rsqrt(rows.row_sum(qk * qk) + L2_EPS)).mul_(_scale(key_heads, key_dim))
    q, k = torch.split_with_sizes(qk, [key_heads, key_heads], -2)
    return q, k, v.reshape(*lead, value_heads, value_dim)


class Rows:
    """The rows a call's B requests apply to their states, T each, in tiles of `size` requests.

    q, k [B, T, HK, K], v [B, T, HV, V], decay = exp(g) and beta [B, T, HV], all float32. The states of a tile are S [b, HV, V, K],
    contiguous float32, `scratch` is a tensor like them. A tile keeps its calls short enough for one thread.
    """

    def __init__(self, size: int, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor) -> None:
        batch, steps, key_heads, key_dim = k.shape
        value_heads, value_dim = v.shape[2:]
        group = value_heads // key_heads
        by_key, by_head = (batch, steps, key_heads, 1, 1, key_dim), (batch, steps, key_heads, group, 1, 1)
        by_value = (batch, steps, key_heads, group, value_dim, 1)
        views = (q.view(by_key), k.view(by_key), v.view(by_value), decay.view(by_head), beta.view(by_head))
        # [tensor][t][tile]
        parts = [[row.split(size) if batch > size else (row,) for row in view.unbind(1)] for view in views]
        self._q, self._k, self._v, self._decay, self._beta = parts

    def advance(self, tile: int, t: int, state: Tensor, scratch: Tensor) -> None:
        """Apply row t of a tile's requests to their states, in place."""
        k, v = self._k[t][tile], self._v[t][tile]
        grouped = (*v.shape[:3], v.shape[3], k.shape[-1])
        state, scratch = state.view(grouped), scratch.view(grouped)
        state.mul_(self._decay[t][tile])
        recalled = rows.row_sum(torch.mul(state, k, out=scratch))
        update = torch.sub(v, recalled, out=recalled).mul_(self._beta[t][tile])
        # A product and a sum, not addcmul: whether that one fuses into an FMA depends on where an element lies in the call.
        state.add_(torch.mul(update, k, out=scratch))

    def read(self, tile: int, t: int, state: Tensor, scratch: Tensor) -> Tensor:
        """Return o = S q of row t of a tile's requests, [b, HV, V]."""
        q, v = self._q[t][tile], self._v[t][tile]
        grouped = (*v.shape[:4], q.shape[-1])
        return rows.row_sum(torch.mul(state.view(grouped), q, out=scratch.view(grouped))).view(state.shape[:3])


def tile_size(state_elements: int) -> int:
    """Return how many requests make a tile: as many as keep an element-wise call within one thread's share."""
    return max(1, rows.ELEMENTS // max(1, state_elements))


def store(pool: Tensor, states: Tensor, slot: Sequence[int]) -> None:
    """Copy states[i] to pool[slot[i]] for every slot that is not -1."""
    active = [i for i, s in enumerate(slot) if s >= 0]
    # Through numpy: torch's index_copy_ and index_put_ take twice the time for whole states.
    if len(active) == len(slot):
        pool.numpy()[slot] = states.numpy()
    elif active:
        pool.numpy()[[slot[i] for i in active]] = states.numpy()[active]

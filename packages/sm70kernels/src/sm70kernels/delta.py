"""The gated delta rule on CPU: gates, normalised heads, one recurrent token. gdn_step and gdn_replay share it bit for bit.

Notation: HK key heads, HV value heads, R = HV / HK value heads a key head (value head j reads key head j // R), K and V the head
widths. A state is S [.., V, K] with K contiguous, the transpose of the M of the papers. Per token:

    S <- exp(g) S;   u = beta (v - S k);   S <- S + u k^T;   o = S q

Element-wise products and sums over the last axis only: a request's bits do not depend on which requests share the call. The work
is done in numpy on the tensors' memory: its calls cost a third of torch's, it has a product-and-sum without a temporary (vecdot), and
it does not fork a thread team for a few states. Call everything here under np.errstate(all="ignore"): infinities and NaN are data.
Source: Gated Delta Networks (Yang, Kautz, Hatamizadeh 2024), equation 10, with the l2-normalised q and k of Qwen3-Next.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from sm70kernels import rows

Array = NDArray[np.float32]

L2_EPS = 1e-6
"""Added to the sum (not the mean) of squares of a q or k head, inside the root."""


def gates(a: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor) -> tuple[Array, Array]:
    """Return (g, beta), float32 [.., HV] like a and b: the log decay (<= 0) and the write strength (0..1) of each head.

    g = -exp(A_log) softplus(a + dt_bias); beta = sigmoid(b). A_log and dt_bias are [HV], or [L, HV] for a and b [L, .., HV]. g is
    computed in float64 and rounded once: its error is multiplied by up to exp(A_log) before another exponential sees it. One below
    the range of float32 becomes -inf, whose exponential is the same 0.
    """
    raw, log_rate, bias = rows.floats(a), A_log.numpy(), dt_bias.numpy()
    if log_rate.ndim > 1:
        by_layer = (len(log_rate), *(1,) * (raw.ndim - 2), log_rate.shape[-1])
        log_rate, bias = log_rate.reshape(by_layer), bias.reshape(by_layer)
    g = np.logaddexp(0.0, raw.astype(np.float64) + bias)
    g *= np.exp(log_rate.astype(np.float64))
    return -g.astype(np.float32), rows.logistic(rows.floats(b))


def heads(qkv: Tensor, value_heads: int, value_dim: int, key_dim: int) -> tuple[Array, Array, Array]:
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
    wide = rows.floats(qkv)
    qk = wide[..., : channels - values].reshape(*lead, 2 * key_heads, key_dim)
    length = np.vecdot(qk, qk)[..., None]
    length += np.float32(L2_EPS)
    qk = qk / np.sqrt(length, out=length)
    q, k = qk[..., :key_heads, :] * np.float32(key_dim**-0.5), qk[..., key_heads:, :]
    return q, k, wide[..., channels - values :].reshape(*lead, value_heads, value_dim)


class Rows:
    """The T rows that each of B requests applies to its state; the states S are [B, HV, V, K], contiguous float32.

    q, k [B, T, HK, K], v [B, T, HV, V] from :func:`heads`, g and beta [B, T, HV] from :func:`gates`.
    """

    def __init__(self, q: Array, k: Array, v: Array, g: Array, beta: Array) -> None:
        batch, steps, key_heads, key_dim = k.shape
        value_heads, value_dim = v.shape[2:]
        grouped = (batch, steps, key_heads, value_heads // key_heads, value_dim)
        self._q, self._k, self._v = q, k, v.reshape(grouped)
        self._decay = np.exp(g)[..., None]
        self._beta = beta.reshape(grouped[:4])[..., None]
        self._flat = (batch, value_heads, value_dim * key_dim)
        self._grouped = (batch, *grouped[2:], key_dim)
        self._scratch = np.empty(self._grouped, np.float32)

    def advance(self, t: int, state: Array) -> None:
        """Apply row t of every request to its state, in place."""
        flat, grouped, k = state.reshape(self._flat), state.reshape(self._grouped), self._k[:, t]
        np.multiply(flat, self._decay[:, t], out=flat)
        recalled = np.vecdot(grouped, k[:, :, None, None])
        update = (self._v[:, t] - recalled) * self._beta[:, t]
        grouped += np.multiply(update[..., None], k[:, :, None, None, :], out=self._scratch)

    def read(self, t: int, state: Array) -> Array:
        """Return o = S q of row t of every request, [B, HK, HV / HK, V]."""
        o: Array = np.vecdot(state.reshape(self._grouped), self._q[:, t, :, None, None])
        return o


def store(pool: Array, states: Array, slot: Sequence[int]) -> None:
    """Copy states[i] to pool[slot[i]] for every slot that is not -1."""
    active = [i for i, s in enumerate(slot) if s >= 0]
    if len(active) == len(slot):
        pool[slot] = states
    elif active:
        pool[[slot[i] for i in active]] = states[active]

"""token_logprobs: log-probabilities of the chosen token of every row and of its k most likely ones, and the chosen one's rank.

    logprob_v = max(z_v - largest - log sum_u exp(z_u - largest), -9999)          float32

Tokens are ordered by logit descending, then id ascending; the first has rank 1. The floor stands for the -inf of a token that cannot
come, which JSON has no number for. Each row is worked on alone, so no other row can change its bits.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sm70kernels import inputs
from sm70kernels.op import INV, Dim, Op, Ratio
from sm70kernels.rows import Floats

FLOOR = np.float32(-9999.0)
"""The least log-probability that is reported."""


def _logprobs(z: Floats) -> Floats:
    """Return the log-probabilities of logits z [V] without NaN: all of the mass on the +inf where there are any."""
    largest = z.max()
    apart = z - largest if np.isfinite(largest) else np.where(z == np.inf, np.float32(0.0), np.float32(-np.inf))
    # fmax takes the floor where a row of -inf gives NaN.
    logprobs: Floats = np.fmax(apart - np.log(np.exp(apart).sum()), FLOOR)
    return logprobs


def _most_likely(z: Floats, k: int) -> NDArray[np.int64]:
    """Return the first k ids of the order, k >= 1."""
    # Only what reaches the k-th largest logit is sorted; ids ascend and the sort is stable, so ties keep their order.
    candidates = np.flatnonzero(z >= np.partition(z, len(z) - k)[len(z) - k])
    order: NDArray[np.int64] = candidates[np.argsort(-z[candidates], kind="stable")[:k]]
    return order


@np.errstate(all="ignore")  # infinities and NaN are data
def reference(logits: Tensor, chosen: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return (logprob f32 [M], rank i32 [M], ids i32 [M, K], values f32 [M, K]) from logits f32 [M, V], chosen i32 [M] and K = k.

    ids are the k most likely tokens in order and values their log-probabilities. NaN counts as -inf; in a row of -inf every value is
    the floor. Raises ValueError for a chosen token outside 0 .. V-1.
    """
    count, vocabulary = logits.shape
    logprob, rank = np.empty(count, np.float32), np.empty(count, np.int32)
    ids, values = np.empty((count, k), np.int32), np.empty((count, k), np.float32)
    for m, (row, token) in enumerate(zip(logits.numpy(), chosen.tolist(), strict=True)):
        if not 0 <= token < vocabulary:
            raise ValueError(f"token_logprobs: chosen {m}: token {token}, but logits has V={vocabulary}; pass 0 .. V-1")
        z = np.fmax(row, np.float32(-np.inf))  # the other number where one is NaN
        logprobs = _logprobs(z)
        logprob[m] = logprobs[token]
        rank[m] = 1 + np.count_nonzero(z > z[token]) + np.count_nonzero(z[:token] == z[token])
        if k:
            ids[m] = _most_likely(z, k)
            values[m] = logprobs[ids[m]]
    return torch.from_numpy(logprob), torch.from_numpy(rank), torch.from_numpy(ids), torch.from_numpy(values)


token_logprobs = Op(
    "token_logprobs",
    reference=reference,
    launch=None,
    determinism=INV,
    tolerance=Ratio(2.0),
    args=dict(
        logits="f32[M,V]",
        chosen="i32[M]",
        k="dim K",
        logprob="f32[M] out",
        rank="i32[M] out",
        ids="i32[M,K] out",
        values="f32[M,K] out",
    ),
    dims=dict(M=Dim(0, 8192, test=(0, 6)), V=Dim(1, 1 << 20, test=(1, 90)), K=Dim(0, "V")),
    inputs=dict(logits=inputs.normal(4.0), chosen=inputs.integers(0, "V-1")),
)

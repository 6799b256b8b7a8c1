"""Philox4x32-10 and the Gumbel noise of a token, a pure function of (seed, position, domain, token).

Source: Salmon, Moraes, Dror, Shaw, "Parallel Random Numbers: As Easy as 1, 2, 3" (2011); checked against the known answers of its
library, Random123. The counter is (position, token >> 2, domain, 0) and word token & 3 of the block is the token's; the key is the
64-bit seed, low word first. The domain sits in the counter because the seed alone fills the key: folded into it, two seeds could
share a stream.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sm70kernels import rows

Words = NDArray[np.uint64]

TARGET = 0
"""Domain of the noise that samples the target model's tokens."""

_ROUNDS = 10
_BLOCKS = 2048  # blocks worked on at a time: their words stay in the cache
_LOW = np.uint64(0xFFFFFFFF)
_SHIFT = np.uint64(32)
_MULTIPLIER = np.array([[0xD2511F53], [0xCD9E8D57]], np.uint64)
_WEYL = np.array([[0x9E3779B9], [0xBB67AE85]], np.uint64)


def philox4x32(counter: Words, key: Words) -> Words:
    """Return 32-bit words [4, n], held in uint64, of Philox4x32-10 for counter [4, n] and key [2, n] (32-bit words in uint64)."""
    words = np.empty_like(counter)
    for first in range(0, counter.shape[1], _BLOCKS):
        part = slice(first, first + _BLOCKS)
        words[0::2, part], words[1::2, part] = _rounds(counter[0::2, part].copy(), counter[1::2, part].copy(), key[:, part] & _LOW)
    return words


def _rounds(even: Words, odd: Words, key: Words) -> tuple[Words, Words]:
    """Words (0, 2) and (1, 3) of the blocks, each [2, n]; all three arguments are overwritten."""
    product = np.empty_like(even)
    for _ in range(_ROUNDS):
        np.multiply(even, _MULTIPLIER, out=product)
        # Word 0 takes the high half of the second product and word 2 that of the first: the rows swap, likewise the low halves.
        np.right_shift(product[::-1], _SHIFT, out=even)
        even ^= odd
        even ^= key
        np.bitwise_and(product[::-1], _LOW, out=odd)
        key += _WEYL
        key &= _LOW
    return even, odd


def _gumbel(uniform: Tensor) -> Tensor:
    return torch.log1p(-uniform).neg_().log_().neg_()


def gumbel(seed: Tensor, position: Tensor, group: Tensor, domain: int = TARGET) -> Tensor:
    """Return Gumbel(0, 1) noise f32 [n, 4] of tokens 4 group .. 4 group + 3, for seed i64 [n], position [n] and group [n] integers.

    noise = -log(-log1p(-u)), u = (word + 1/2) / 2^32: u is finest near 0, where the noise is large and decides who wins.
    """
    keys = seed.long().numpy().view(np.uint64)
    counter = np.zeros((4, keys.shape[0]), np.uint64)
    counter[0] = position.long().numpy().view(np.uint64) & _LOW
    counter[1] = group.long().numpy().view(np.uint64)
    counter[2] = domain
    words = philox4x32(counter, np.stack([keys & _LOW, keys >> _SHIFT]))
    uniform = np.ascontiguousarray(words.T).astype(np.float32) * np.float32(2.0**-32) + np.float32(2.0**-33)
    # The largest words round up to u = 1, whose noise would be -inf.
    return rows.elementwise(_gumbel, torch.from_numpy(np.minimum(uniform, np.float32(1.0 - 2.0**-24))))

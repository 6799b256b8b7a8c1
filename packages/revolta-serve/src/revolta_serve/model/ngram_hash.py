"""Constants of the hashed n-gram embedding: multipliers, prime table sizes, offsets. Pure functions of the config.

The checkpoint stores them too; the loader compares.
"""

import math
from functools import lru_cache

_MASK = (1 << 64) - 1
_GAMMA = 0x9E3779B97F4A7C15


def _splitmix(value: int) -> int:
    """One SplitMix64 output for state `value` (Steele, Lea, Flood 2014)."""
    value = (value + _GAMMA) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def multipliers(vocab: int, ngram: int, seed: int, index: int) -> tuple[int, ...]:
    """The odd 63-bit multipliers [ngram] of the n-gram layer with rank `index` among the n-gram layers.

    Token ids below `vocab` times a multiplier stay below 2^63. The seed takes the SplitMix increment once here and once
    inside the generator: both additions are part of the format.
    """
    half = max(1, ((1 << 63) - 1) // vocab // 2)
    base = seed + 10_007 * index
    return tuple(2 * (_splitmix((base + _GAMMA * (i + 1)) & _MASK) % half) + 1 for i in range(ngram))


def _is_prime(value: int) -> bool:
    if value < 4:
        return value in (2, 3)
    return value % 2 == 1 and all(value % divisor for divisor in range(3, math.isqrt(value) + 1, 2))


@lru_cache(maxsize=64)
def primes(base: int, heads: int, index: int) -> tuple[int, ...]:
    """Table sizes [heads] of layer rank `index`: consecutive primes >= base, skipping those of the layers before."""
    found: list[int] = []
    value = base
    while len(found) < heads * (index + 1):
        if _is_prime(value):
            found.append(value)
        value += 1
    return tuple(found[heads * index :])


def offsets(sizes: tuple[int, ...]) -> tuple[int, ...]:
    """First row of every head's part of the table."""
    return tuple(sum(sizes[:j]) for j in range(len(sizes)))


def padded_rows(sizes: tuple[int, ...], divisor: int) -> int:
    """Rows of the whole table: the sum, rounded up to `divisor`; the added rows are never addressed."""
    return -(-sum(sizes) // divisor) * divisor

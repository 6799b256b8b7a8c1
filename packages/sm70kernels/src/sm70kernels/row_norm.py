"""How the norm kernels spread a row over a block: include/row_norm.cuh holds the arithmetic.

The number of threads decides the order of a row's sum, and with it the bits. It is a rule of the row's size, not a configuration, so
that hyper_inject with its norm and hyper_norm agree whatever a tuner chooses.
"""

VECTOR = 8
"""Halves a thread reads at once."""

MOST = 640
"""Threads of the largest block: two of them fill 40 of a multiprocessor's 64 warps, and 10240 halves are two vectors a thread."""


def threads(size: int) -> int:
    """Return the threads of the block that holds a row of `size` halves: one vector each where they are enough, whole warps."""
    return min(MOST, -(-size // (32 * VECTOR)) * 32)

"""ple_hash: rows of the n-gram table for every token, one per hash head.

    c_0 = id_t;  c_i = id_{t-i}, or eos when c_{i-1} (i >= 2) is eos         segments end at eos; eos stands before the request
    mix_2 = c_0·m_0 ⊕ c_1·m_1;  mix_n = mix_{n-1} ⊕ c_{n-1}·m_{n-1}          wrapping int64 products
    row_j = (mix mod p_j) + offset_j                                         mod is never negative, whatever the sign of mix

Of J heads the first J/(G-1) read the 2-gram, the next the 3-gram, and so on up to G. An eos token itself still sees the segment it
ends; the token after it sees eos only. Ids are raw: placeholders of images and videos enter the hash as they are.
"""

import numpy as np
import torch
from torch import Tensor

from sm70kernels import inputs
from sm70kernels.op import EXACT, Dim, Exact, Op, Spec


def reference(ids: Tensor, multipliers: Tensor, primes: Tensor, offsets: Tensor, eos: int) -> Tensor:
    """Return rows i64 [M, J].

    ids i64 [M, G]: column 0 the current token, column i the raw id i tokens back (eos before the request's start);
    multipliers i64 [G]; primes and offsets i64 [J]. Raises ValueError when J is not a multiple of G-1.
    """
    order, heads = ids.shape[1], primes.shape[0]
    if order < 2 or heads % (order - 1):
        raise ValueError(f"ple_hash: J = {heads} heads do not divide among the {order - 1} n-gram orders of G = {order}; pass a multiple")
    window, factors = ids.numpy(), multipliers.numpy()
    tokens = [window[:, i] for i in range(order)]
    for i in range(2, order):
        tokens[i] = np.where(tokens[i - 1] == eos, eos, tokens[i])
    # numpy's products of int64 arrays wrap, and its remainder takes the sign of the prime.
    mixes = [tokens[0] * factors[:1] ^ tokens[1] * factors[1:2]]
    for i in range(2, order):
        mixes.append(mixes[-1] ^ tokens[i] * factors[i : i + 1])
    hashed = np.stack(mixes, 1)[:, :, None] % primes.numpy().reshape(order - 1, -1)
    return torch.from_numpy(hashed.reshape(len(window), heads) + offsets.numpy())


ple_hash = Op(
    "ple_hash",
    reference=reference,
    determinism=EXACT,
    tolerance=Exact(),
    args=dict(
        ids="i64[M,G]",
        multipliers="i64[G]",
        primes="i64[J]",
        offsets="i64[J]",
        eos="int",
        rows="i64[M,J] out",
    ),
    dims=dict(M=Dim(0, 65536, test=(0, 20)), G=Spec(3, test=(2, 3)), J=Spec(16, test=(4, 16))),
    inputs=dict(
        ids=inputs.integers(0, 5),
        multipliers=inputs.integers(1, 1 << 62),
        primes=inputs.integers(2, 1 << 20),
        offsets=inputs.integers(0, 1 << 30),
        eos=inputs.value(3),
    ),
)

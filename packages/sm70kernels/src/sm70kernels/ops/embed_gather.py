"""embed_gather: embedding rows of the tokens this rank holds; zero rows for the others.

out[m] = table[ids[m] - vocab_start] where that row exists, else 0: token ids of other ranks and negative ids (padding) give
exact zeros, so the sum over ranks is the whole embedding.
"""

import numpy as np
import torch
from torch import Tensor

from sm70kernels import inputs
from sm70kernels.op import EXACT, Dim, Exact, Op, Spec


def reference(ids: Tensor, table: Tensor, vocab_start: int) -> Tensor:
    """ids i64[M], table act[V,E] -> act[M,E]."""
    row, shard = ids.numpy() - vocab_start, table.numpy()
    out = shard.take(row, 0, mode="clip")
    foreign = row.view(np.uint64) >= len(shard)  # as unsigned numbers, negative rows are large
    if foreign.any():
        out[foreign] = 0
    return torch.from_numpy(out)


embed_gather = Op(
    "embed_gather",
    reference=reference,
    determinism=EXACT,
    tolerance=Exact(),
    args=dict(ids="i64[M]", table="act[V,E]", vocab_start="int", out="act[M,E] out"),
    dims=dict(M=Dim(0, 1 << 20, test=(0, 20)), V=Dim(1, 1 << 20, test=(1, 30)), E=Spec(2560, test=(1, 24, 75))),
    inputs=dict(ids=inputs.integers(-1, "V + 20"), vocab_start=inputs.one_of(0, 9)),
    # Gathered rows, not the table: each is read and written once.
    bytes=lambda d, dtype: d["M"] * (8 + 2 * d["E"] * dtype.itemsize),
)

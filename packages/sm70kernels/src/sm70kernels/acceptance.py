"""Which drafts of a verify step stand: shared by greedy and sampled verification, which differ only in how a row's token is found."""

import numpy as np
import torch
from torch import Tensor


def lowest_argmax(scores: Tensor) -> Tensor:
    """Return i32 [M]: the lowest index of the largest value of each row of scores [M, V] without NaN (0 for a row of -inf)."""
    # numpy documents that ties go to the first; torch does not promise it on every device and build.
    return torch.from_numpy(scores.numpy().argmax(-1).astype(np.int32))


def accept(target: Tensor, draft: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return (tokens i32 [N, T], count i32 [N]) from target, draft i32 [N, T] and rows i32 [N], the valid rows of each request.

    Row t produced target[:, t]; draft[:, t] is the token row t + 1 was computed from. A request keeps its targets up to and
    including the first that differs from its draft, or its last row's: count = 1 + accepted drafts, 0 when it has no rows.
    Tokens from count on are -1. Raises ValueError when a request claims more rows than the T it has.
    """
    produced, owned = target.numpy(), rows.numpy()
    if owned.max(initial=0) > produced.shape[1]:
        raise ValueError(f"rows: {owned.max()} valid rows of a request that has {produced.shape[1]} (target axis 1); pass at most that")
    column = np.arange(produced.shape[1], dtype=np.int32)
    accepted = np.logical_and.accumulate(produced == draft.numpy(), axis=1).sum(1, dtype=np.int32)
    # The last row's token is judged by nobody in this step, whatever its draft column holds.
    count = np.minimum(accepted + np.int32(1), owned)
    tokens = np.where(column < count[:, None], produced, np.int32(-1))
    return torch.from_numpy(tokens), torch.from_numpy(count)

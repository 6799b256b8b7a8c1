"""lm_head_logits against its definition: float32 dot products, not rounded to the activation dtype."""

import torch
from torch import Tensor

from sm70kernels import lm_head_logits
from sm70kernels.testing import conforms, rows_independent, same_bits


def naive(x: Tensor, w: Tensor) -> Tensor:
    logits = x.new_zeros(x.shape[0], w.shape[0])
    for m in range(x.shape[0]):
        for v in range(w.shape[0]):
            logits[m, v] = (x[m] * w[v]).sum()
    return logits


def large(x: Tensor, w: Tensor) -> Tensor:
    return x @ w.T


test_matches_naive = conforms(lm_head_logits, naive, examples=5, large=large)
test_rows = rows_independent(lm_head_logits)


def test_float16_activations_give_unrounded_float32_logits() -> None:
    batch = lm_head_logits.make({"M": 3, "V": 20, "K": 40}, dtype=torch.float16)
    logits = lm_head_logits(**batch)
    assert logits.dtype == torch.float32
    assert not torch.equal(logits, logits.half().float())
    assert same_bits(logits, lm_head_logits(batch["x"].float(), batch["w"].float()))


def test_a_shard_gives_the_columns_of_the_whole() -> None:
    batch = lm_head_logits.make({"M": 3, "V": 48, "K": 40})
    halves = [lm_head_logits(batch["x"], w.contiguous()) for w in batch["w"].split(24)]
    torch.testing.assert_close(torch.cat(halves, 1), lm_head_logits(**batch), rtol=0, atol=1e-5)

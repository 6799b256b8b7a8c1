"""embed_gather against its definition: copy the row of a token of this shard, zero for any other id."""

import torch
from torch import Tensor

from sm70kernels import embed_gather
from sm70kernels.testing import conforms, rows_independent


def naive(ids: Tensor, table: Tensor, vocab_start: int) -> Tensor:
    out = table.new_zeros(len(ids), table.shape[1])
    for m, token in enumerate(ids.tolist()):
        if vocab_start <= token < vocab_start + len(table):
            out[m] = table[token - vocab_start]
    return out


test_matches_naive = conforms(embed_gather, naive)
test_rows = rows_independent(embed_gather)


def test_shards_add_up_to_the_whole_table() -> None:
    table = torch.randn(20, 24)
    ids = torch.arange(20)
    shards = [embed_gather(ids, table[start : start + 7], start) for start in (0, 7, 14)]
    assert torch.equal(sum(shards[1:], shards[0]), table)


def test_rows_of_other_shards_are_zero_whatever_the_table_holds() -> None:
    got = embed_gather(torch.tensor([-1, 3, 99]), torch.full((2, 24), float("nan")), 5)
    assert torch.equal(got, torch.zeros(3, 24))

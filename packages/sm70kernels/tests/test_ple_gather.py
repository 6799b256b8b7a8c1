import torch
from torch import Tensor

from sm70kernels.ops.ple_gather import ple_gather
from sm70kernels.testing import conforms, rows_independent, same_bits


def naive(rows: Tensor, table: Tensor, row_start: int) -> Tensor:
    m, heads = rows.shape
    width = table.shape[1]
    e = torch.zeros(m, heads * width, dtype=table.dtype)
    for i in range(m):
        for j in range(heads):
            local = int(rows[i, j]) - row_start
            if 0 <= local < table.shape[0]:
                e[i, j * width : (j + 1) * width] = table[local]
    return e


test_matches_naive = conforms(ple_gather, naive)
test_rows = rows_independent(ple_gather)


def test_shards_add_up_to_the_whole() -> None:
    table, rows = torch.randn(40, 4), torch.randint(0, 40, (9, 16))
    rows[0, :4] = torch.tensor([9, 10, 19, 20])  # both sides of the borders
    parts = [ple_gather(rows, table[start : start + 10].contiguous(), start) for start in range(0, 40, 10)]
    assert torch.equal(parts[0] + parts[1] + parts[2] + parts[3], ple_gather(rows, table, 0))


def test_a_nan_row_shows_only_where_it_is_asked_for() -> None:
    table, rows = torch.randn(10, 4), torch.tensor([[5, 14], [0, 20], [4, 15]])
    table[0] = torch.nan  # global row 5
    table[-1] = torch.nan  # global row 14
    e = ple_gather(rows, table, 5)
    assert torch.isnan(e[0]).all()
    assert same_bits(e[1:], torch.zeros(2, 8))


def test_bytes_count_what_is_moved_and_not_what_is_held() -> None:
    assert ple_gather.bytes(dict(M=5, RW=320_001_536)) == 5 * 16 * (8 + 2 * 160 * 2)

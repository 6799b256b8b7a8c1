"""rows: a row's bits do not depend on its neighbours, their number or its place; and the values are right."""

from collections.abc import Callable

import hypothesis
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import Tensor

from sm70kernels import rows

few = hypothesis.settings(max_examples=12, deadline=None, derandomize=True, database=None)


@pytest.mark.parametrize("tile", rows.TILE.values())
@pytest.mark.parametrize(("n", "k"), [(1, 1), (24, 160), (33, 75), (300, 64), (20, 9000), (517, 257)])
def test_linear_rows_alone_and_among_others(tile: int, n: int, k: int) -> None:
    generator = torch.Generator().manual_seed(n)
    w = torch.randn(n, k, generator=generator)
    row = torch.randn(k, generator=generator)
    alone = rows.linear(row[None], w, tile)[0]
    torch.testing.assert_close(alone, w @ row, rtol=1e-5, atol=1e-5 * k**0.5)
    for m in (2, tile - 1, tile, tile + 1, 2 * tile + 3):
        for place in (0, m // 2, m - 1):
            x = torch.randn(m, k, generator=generator)
            x[place] = row
            assert torch.equal(rows.linear(x, w, tile)[place], alone)


def test_linear_widens_float16_and_takes_strided_rows_and_none() -> None:
    x, w = torch.randn(5, 12).half(), torch.randn(3, 6).half()
    view = x[:, 4:10]
    assert torch.equal(rows.linear(view, w, 16), rows.linear(view.float().contiguous(), w.float(), 16))
    assert rows.linear(x[:0, :6], w, 16).shape == (0, 3)


@pytest.mark.parametrize("tile", rows.TILE.values())
@pytest.mark.parametrize(("n", "k"), [(1, 1), (33, 75), (300, 64), (517, 257)])
@np.errstate(all="ignore")
def test_multiply_has_the_bits_of_linear_and_keeps_a_bad_row_to_itself(tile: int, n: int, k: int) -> None:
    generator = torch.Generator().manual_seed(n)
    w, x = torch.randn(n, k, generator=generator), torch.randn(tile + 1, k, generator=generator)
    for m in (0, 1, 2, tile + 1):
        good = rows.linear(x[:m], w, tile)
        assert torch.equal(torch.from_numpy(rows.multiply(x[:m].numpy(), w.numpy(), tile)), good)
    bad = x.clone()
    bad[1], bad[-1] = torch.nan, torch.inf
    for got in (rows.linear(bad, w, tile), torch.from_numpy(rows.multiply(bad.numpy(), w.numpy(), tile))):
        assert torch.equal(got[[0, *range(2, tile)]], good[[0, *range(2, tile)]])
        assert got[1].isnan().all()


def test_a_small_matrix_in_a_decode_tile_takes_rows_one_by_one() -> None:
    assert [rows.product(16, n, k).granule for n, k in ((64, 64), (300, 64))] == [1, 1]
    for tile, n, k in ((64, 64, 64), (16, 517, 257), (16, 20, 9000)):  # a prefill tile; more than SMALL; rows above UNTHREADED
        assert rows.product(tile, n, k).granule > 1


def test_a_shape_without_a_method_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "_METHODS", (lambda x, w: x @ w.t() + x.mean(),))
    rows.product.cache_clear()
    with pytest.raises(rows.RowDependenceError, match="for 16 rows, N=7, K=9"):
        rows.product(16, 7, 9)
    rows.product.cache_clear()


def _on_arrays(function: Callable[[rows.Floats], rows.Floats]) -> Callable[[Tensor], Tensor]:
    @np.errstate(all="ignore")
    def called(x: Tensor) -> Tensor:
        return torch.from_numpy(function(x.numpy()))

    return called


@few
@hypothesis.given(count=st.integers(0, 70_000), offset=st.integers(0, 40), seed=st.integers(0, 99))
@pytest.mark.parametrize(
    ("function", "plain"),
    [
        (rows.exp, torch.exp),
        (rows.sigmoid, torch.sigmoid),
        (_on_arrays(rows.logistic), torch.sigmoid),
        (_on_arrays(rows.swish), F.silu),
    ],
)
def test_elementwise_bits_do_not_depend_on_the_place(
    function: Callable[[Tensor], Tensor], plain: Callable[[Tensor], Tensor], count: int, offset: int, seed: int
) -> None:
    x = torch.randn(count + offset, generator=torch.Generator().manual_seed(seed)) * 10
    whole = function(x)
    assert torch.equal(function(x[offset:]), whole[offset:])
    torch.testing.assert_close(whole, plain(x), rtol=1e-5, atol=0)


@few
@hypothesis.given(m=st.integers(1, 60), k=st.sampled_from([1, 7, 24, 75, 256, 2560, 10240]), seed=st.integers(0, 99))
def test_sums_and_norms_of_a_row_alone_and_among_others(m: int, k: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(m, k, generator=generator)
    place = seed % m
    size = _on_arrays(lambda part: rows.root_mean_square(part, 1e-6))
    torch.testing.assert_close(size(x), (x.double().square().mean(1, keepdim=True) + 1e-6).sqrt().float(), rtol=1e-5, atol=0)
    for function in (rows.row_sum, lambda part: rows.rms(part, 1e-6), size):
        assert torch.equal(function(x)[place], function(x[place : place + 1].clone())[0])
        assert torch.equal(function(x.view(1, m, k))[0], function(x))
    torch.testing.assert_close(rows.row_sum(x), x.double().sum(1, keepdim=True).float(), rtol=1e-5, atol=1e-3)


def test_pad_rows_appends_zeros_up_to_a_multiple() -> None:
    x = torch.ones(5, 2)
    assert rows.pad_rows(x, 5) is x
    padded = rows.pad_rows(x, 4)
    assert padded.shape == (8, 2)
    assert torch.equal(padded[:5], x)
    assert not padded[5:].any()

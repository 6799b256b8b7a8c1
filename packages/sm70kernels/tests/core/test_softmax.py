"""What the attention references take for granted: products, powers and logarithms whose bits do not depend on place or company."""

import numpy as np
import pytest

from sm70kernels import softmax
from sm70kernels.rows import Floats


def normal(*shape: int) -> Floats:
    return np.random.default_rng(1).standard_normal(shape, np.float32)


@pytest.mark.parametrize("transposed", [True, False])
@pytest.mark.parametrize(("m", "n", "k"), [(1, 64, 20), (2, 64, 32), (4, 64, 128), (12, 64, 256), (12, 256, 64), (3, 20, 64)])
def test_a_matrix_has_the_same_product_in_any_company(m: int, n: int, k: int, transposed: bool) -> None:
    product = softmax.rows_product(m, n, k, transposed)
    a, b = normal(7, 2, m, k), normal(3, 7, 2, *((n, k) if transposed else (k, n)))
    b = b.swapaxes(-1, -2) if transposed else b
    together = product(a, b)
    exact = np.matmul(a.astype(np.float64), b.astype(np.float64))
    assert np.abs(together - exact).max() < 1e-4
    for block, row, head in np.ndindex(3, 7, 2):
        assert np.array_equal(together[block, row, head], product(a[row, head], b[block, row, head]))


def test_a_shared_operand_gives_what_a_copy_of_it_gives() -> None:
    product = softmax.rows_product(4, 64, 32, True)
    a, b = normal(9, 1, 4, 32), normal(1, 5, 64, 32)
    copies = np.repeat(b, 9, 0)
    assert np.array_equal(product(a, b.swapaxes(-1, -2)), product(a, copies.swapaxes(-1, -2)))


@pytest.mark.parametrize("function", [np.exp2, np.log2])
def test_powers_and_logarithms_do_not_depend_on_place(function: np.ufunc) -> None:
    x = np.abs(normal(257)) * (-30 if function is np.exp2 else 30)
    whole = function(x)
    for count in (1, 3, 8, 17, 64, 200):
        for at in (0, 1, 5, 57 if count == 200 else 190 - count):
            assert np.array_equal(function(x[at : at + count]), whole[at : at + count])
    assert np.array_equal(function(x[::3]), whole[::3])


def test_exact_values() -> None:
    ends = np.array([0.0, -np.inf, -1e38], np.float32)
    with np.errstate(all="ignore"):
        assert np.exp2(ends).tolist() == [1.0, 0.0, 0.0]
        assert np.log2(np.array([1.0, 0.0, 8.0], np.float32)).tolist() == [0.0, -np.inf, 3.0]


def test_masked_blocks_change_no_bit_of_the_softmax() -> None:
    scores = normal(2, 3, 64)
    hole = np.full((1, 3, 64), -np.inf, np.float32)
    p, w, total, peak = softmax.block_softmax(scores.copy())
    q, v, same, top = softmax.block_softmax(np.concatenate([hole, scores[:1], hole, scores[1:]]))
    assert w is not None
    assert v is not None
    assert np.array_equal(q[[1, 3]], p)
    assert not q[[0, 2]].any()
    assert np.array_equal(v[[1, 3]], w)
    assert np.array_equal(same, total)
    assert np.array_equal(top, peak)

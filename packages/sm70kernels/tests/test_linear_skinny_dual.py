"""linear_skinny_dual against its definition: both products of the same rows, each rounded once."""

import torch
from torch import Tensor

from sm70kernels import linear_skinny, linear_skinny_dual
from sm70kernels.testing import conforms, rounds_as_stated, rows_independent, same_bits


def naive(x: Tensor, w: Tensor, w2: Tensor) -> tuple[Tensor, Tensor]:
    outs = []
    for weight in (w, w2):
        y = x.new_zeros(x.shape[0], weight.shape[0])
        for m, row in enumerate(x.tolist()):
            for n, weights in enumerate(weight.tolist()):
                y[m, n] = sum(a * b for a, b in zip(row, weights, strict=True))
        outs.append(y)
    return outs[0], outs[1]


def large(x: Tensor, w: Tensor, w2: Tensor) -> tuple[Tensor, Tensor]:
    return x @ w.T, x @ w2.T


test_matches_naive = conforms(linear_skinny_dual, naive, examples=4, large=large)
test_rows = rows_independent(linear_skinny_dual)
test_rounding_points = rounds_as_stated(linear_skinny_dual, naive, dict(M=20))


def test_both_products_have_the_bits_of_linear_skinny_in_views_of_wider_rows() -> None:
    """The kernel, with the shares of K that each weight has alone."""
    a = linear_skinny_dual.make(dict(M=9, N=33, N2=6, K=1032), seed=3, dtype=torch.float16)
    wide = torch.full((9, 50), torch.nan).half()
    linear_skinny_dual.emulate(**a, config=(2, 4), out=wide[:, 2:35], out2=wide[:, 40:46])
    for weight, shares, view in ((a["w"], 2, wide[:, 2:35]), (a["w2"], 4, wide[:, 40:46])):
        alone, _ = linear_skinny.emulate(x=a["x"], w=weight, config=shares)
        assert same_bits(alone, view.contiguous())
    for gap in (wide[:, :2], wide[:, 35:40], wide[:, 46:]):
        assert gap.isnan().all()

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from sm70kernels import experts
from sm70kernels.ops.moe_gemm import moe_gemm
from sm70kernels.ops.moe_qpn import moe_qpn
from sm70kernels.testing import DTYPES, clone, conforms, rounds_as_stated, rows_independent, same_bits


def silu(x: Tensor) -> Tensor:
    return torch.where(x == -math.inf, 0.0, x / (1 + (-x).exp()))


def naive(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    w13: Tensor,
    w2: Tensor,
    shared13: Tensor | None,
    shared2: Tensor | None,
    shared_gate: Tensor | None,
    h: Callable[[Tensor], Tensor] = lambda x: x,
) -> Tensor:
    def expert(row: Tensor, both: Tensor, down: Tensor) -> Tensor:
        half = both.shape[0] // 2
        gate, up = h((both[:half] * row).sum(1)), h((both[half:] * row).sum(1))
        return h((down * h(h(silu(gate)) * up)).sum(1))

    out = torch.zeros_like(x)
    for m in range(x.shape[0]):
        for r, e in enumerate(ids[m].tolist()):
            if 0 <= e < w13.shape[0]:
                out[m] += weights[m, r] * expert(x[m], w13[e], w2[:, e])
        out[m] = h(out[m])
        if shared13 is not None and shared2 is not None and shared_gate is not None:
            gate = 1 / (1 + (-h((shared_gate[0] * x[m]).sum())).exp())
            out[m] += h(expert(x[m], shared13, shared2) * gate)
    return out


@pytest.fixture(autouse=True, params=["dense", "one expert at a time", "grouped"], scope="module")
def _every_form(request: pytest.FixtureRequest) -> Iterator[None]:
    """Run every test in each form the reference may take for a bank: all experts in one product, one by one, only the chosen ones."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "one expert at a time":
            patch.setattr(experts, "batched", lambda *shape: False)
        if request.param == "grouped":
            patch.setattr(experts, "DENSE_WEIGHTS", 0)
        yield


def _with_a_strong_shared_expert(arguments: dict[str, Any]) -> None:
    """Half of the rows have no routes, so that the roundings of the shared expert show; its gate logit is large enough to be rounded."""
    generator, hidden, wide = torch.Generator().manual_seed(5), arguments["x"].shape[1], 2 * arguments["w2"].shape[2]
    arguments["ids"][::2] = -1
    arguments |= dict(shared13=torch.randn(wide, hidden, generator=generator).half(), shared2=arguments["w2"][:, 0].contiguous())
    arguments["shared_gate"] = torch.randn(1, hidden, generator=generator).half()


test_matches_naive = conforms(moe_gemm, naive, examples=5)
test_rows = rows_independent(moe_gemm)
test_rounding_points = rounds_as_stated(moe_gemm, naive, dict(M=20), change=_with_a_strong_shared_expert)


def case(m: int, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """Arguments with ids in -1 .. X and a shared expert."""
    made = moe_gemm.make(dict(M=m, K=4, X=8, E=40, I=20, J=8), 5, dtype)
    for name, shape in (("shared13", (16, 40)), ("shared2", (40, 8)), ("shared_gate", (1, 40))):
        made[name] = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    return made


def rows_of(arguments: dict[str, Any], first: int, last: int) -> dict[str, Any]:
    return arguments | {name: arguments[name][first:last].contiguous() for name in ("x", "ids", "weights")}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_keep_their_bits_around_the_tile_border(dtype: torch.dtype) -> None:
    a = case(130, dtype)
    a["ids"][:, 1] = 5  # one expert fills more than two tiles
    out = moe_gemm(**a)
    for first, last in ((0, 1), (0, 63), (0, 64), (0, 65), (64, 130), (129, 130)):
        assert same_bits(moe_gemm(**rows_of(a, first, last)), out[first:last]), (first, last)


def test_rows_keep_their_bits_whatever_the_others_choose() -> None:
    a = case(100)
    out = moe_gemm(**a)
    for expert in (-1, 2):
        crowd = clone(a)
        crowd["ids"][:] = expert
        crowd["x"] *= 3
        crowd["ids"][77], crowd["x"][77] = a["ids"][77], a["x"][77]
        assert same_bits(moe_gemm(**crowd)[77], out[77])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_agrees_with_moe_qpn_on_every_oddity(dtype: torch.dtype) -> None:
    a = case(20, dtype)
    a["ids"][0] = torch.tensor([-1, 8, 9, -7])
    a["ids"][1], a["weights"][1] = 3, torch.tensor([0.25, 0.5, 0.125, 0.125])
    a["weights"][2] = 0.0
    a["ids"][3], a["weights"][3] = 1, torch.tensor([1.0, math.nan, 1.0, 1.0])
    a["x"][4] = math.inf
    a["x"][5] = math.nan
    a["w13"][7, 3] = math.nan
    decode, prefill = moe_qpn(**a), moe_gemm(**a)
    assert torch.allclose(prefill.float(), decode.float(), rtol=1e-2 if dtype == torch.float16 else 1e-4, atol=1e-2, equal_nan=True)
    assert torch.isnan(prefill[3]).all()
    assert torch.isfinite(prefill[:2]).all()


def test_no_rows() -> None:
    assert moe_gemm(**case(0)).shape == (0, 40)

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from sm70kernels import experts
from sm70kernels.op import ContractError
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


test_matches_naive = conforms(moe_qpn, naive, examples=5)
test_rows = rows_independent(moe_qpn)
test_rounding_points = rounds_as_stated(moe_qpn, naive, dict(M=20), change=_with_a_strong_shared_expert)


def case(m: int = 20, dtype: torch.dtype = torch.float32, shared: bool = True, seed: int = 3) -> dict[str, Any]:
    """Arguments with valid ids: X=8, K=4, E=40, I=20, J=8."""
    made = moe_qpn.make(dict(M=m, K=4, X=8, E=40, I=20, J=8), seed, dtype)
    generator = torch.Generator().manual_seed(seed)
    made["ids"] = torch.randint(0, 8, (m, 4), generator=generator).int()
    made["shared13"] = torch.randn(16, 40, generator=generator).to(dtype) if shared else None
    made["shared2"] = torch.randn(40, 8, generator=generator).to(dtype) if shared else None
    made["shared_gate"] = torch.randn(1, 40, generator=generator).to(dtype) if shared else None
    return made


def one_row(arguments: dict[str, Any], row: int) -> dict[str, Any]:
    return arguments | {name: arguments[name][row : row + 1].contiguous() for name in ("x", "ids", "weights")}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_keep_their_bits_across_tiles_and_routings(dtype: torch.dtype) -> None:
    a = case(64, dtype)
    a["ids"][:, 1] = 5  # one expert fills several decode tiles
    out = moe_qpn(**a)
    for row in (0, 15, 16, 47, 63):
        assert same_bits(moe_qpn(**one_row(a, row)), out[row : row + 1])
    crowd = clone(a)
    crowd["ids"][:] = 2  # another routing of all the others
    crowd["ids"][40] = a["ids"][40]
    assert same_bits(moe_qpn(**crowd)[40], out[40])


def test_invalid_ids_contribute_nothing_whatever_their_weight() -> None:
    a = case(shared=False)
    a["ids"][3] = torch.tensor([-1, 8, 2, 100_000])
    a["weights"][3] = torch.tensor([math.nan, math.inf, 0.5, 1.0])
    a["ids"][4] = torch.tensor([-1, 8, -5, 9])
    a["weights"][4] = math.nan
    out = moe_qpn(**a)
    only = one_row(a, 3)
    only["ids"], only["weights"] = torch.tensor([[2]], dtype=torch.int32), torch.tensor([[0.5]])
    assert same_bits(out[3:4], moe_qpn(**only))
    assert same_bits(out[4], torch.zeros(40))  # +0, not -0


def test_an_invalid_id_leaves_the_first_and_last_expert_alone() -> None:
    """Invalid ids stand next to valid ones that a clamped id would fall on, whose expert counts once, or is broken and not chosen."""
    a = case(shared=False)
    a["ids"][:], only = torch.tensor([7, 9, 0, -1]), case(shared=False)
    only["ids"], only["weights"] = torch.tensor([[7, 0]] * 20, dtype=torch.int32), a["weights"][:, ::2].contiguous()
    assert torch.allclose(moe_qpn(**a), moe_qpn(**only), rtol=1e-6)
    a["ids"][:], only["ids"][:] = torch.tensor([3, 9, 4, -1]), torch.tensor([3, 4])
    a["w13"][[0, 7]] = math.inf
    assert torch.allclose(moe_qpn(**a), moe_qpn(**only), rtol=1e-6)


def test_a_row_without_routes_keeps_its_shared_expert() -> None:
    a = case()
    a["ids"][:] = -1
    expected = naive(**{name: item if name == "ids" else item.double() for name, item in a.items()})
    assert torch.allclose(moe_qpn(**a).double(), expected, atol=1e-4)
    assert (expected != 0).all()


def test_duplicate_ids_are_routes_of_their_own() -> None:
    a = case(shared=False)
    a["ids"][:] = 6
    a["weights"][:] = torch.tensor([0.25, 0.5, 0.125, 0.125])
    once = a | dict(ids=a["ids"][:, :1].contiguous(), weights=torch.ones(20, 1))
    assert torch.allclose(moe_qpn(**a), moe_qpn(**once), rtol=1e-6)


@pytest.mark.parametrize("bad", [math.nan, math.inf], ids=str)
def test_a_broken_row_touches_no_other_row(bad: float) -> None:
    a = case()
    clean = moe_qpn(**a)
    a["x"][7, 3] = bad
    dirty = moe_qpn(**a)
    assert not torch.isfinite(dirty[7]).all()
    dirty[7] = clean[7]
    assert same_bits(dirty, clean)


def test_a_nan_weight_stays_in_its_row_and_a_zero_weight_counts_as_zero() -> None:
    a = case()
    a["weights"][2] = 0.0
    clean = moe_qpn(**a)
    a["weights"][9, 1] = math.nan
    dirty = moe_qpn(**a)
    assert torch.isnan(dirty[9]).all()
    dirty[9] = clean[9]
    assert same_bits(dirty, clean)
    bare = case(shared=False)
    bare["weights"][2] = 0.0
    assert torch.equal(moe_qpn(**bare)[2], torch.zeros(40))


def test_a_broken_expert_reaches_only_the_rows_that_chose_it() -> None:
    a = case()
    a["w13"][5] = math.nan
    out = moe_qpn(**a)
    assert torch.equal(torch.isnan(out).any(1), (a["ids"] == 5).any(1))


@pytest.mark.parametrize("gate", [-math.inf, -60000.0, 60000.0, math.inf], ids=str)
def test_silu_is_stable_and_overflow_stays_infinite(gate: float) -> None:
    """x is one-hot, so that w13 holds the gate and up of each route; up is 2: 60000 * 2 overflows float16."""
    a = case(1, torch.float16, shared=False)
    a["x"].zero_()[0, 0] = 1.0
    a["ids"][:], a["weights"][:] = 0, 1.0
    scale = math.copysign(4.0, gate) if math.isinf(gate) else 1.0
    a["x"] *= abs(scale)
    a["w13"][0].zero_()
    a["w13"][0, :20, 0] = 60000.0 * math.copysign(1.0, gate)  # times 4 it overflows to the infinity under test
    a["w13"][0, 20:, 0] = 2.0
    a["w2"][:, 0] = 1.0
    out = moe_qpn(**a)
    assert torch.equal(out, torch.full_like(out, math.inf if gate > 0 else 0.0))


@pytest.mark.parametrize(("sign", "share"), [(1.0, 1.0), (-1.0, 0.0)])
def test_an_infinite_shared_gate_opens_or_shuts(sign: float, share: float) -> None:
    a = case(dtype=torch.float16)
    a["x"].abs_().add_(1.0)
    a["ids"][:] = -1
    a["shared_gate"][:] = 60000.0 * sign
    ungated = a | dict(shared_gate=torch.full_like(a["shared_gate"], 0.0))  # sigmoid(0) = 1/2, exact
    assert torch.allclose(moe_qpn(**a).float(), moe_qpn(**ungated).float() * 2 * share, rtol=1e-3)


def test_no_rows() -> None:
    assert moe_qpn(**case(0)).shape == (0, 40)


def test_a_shared_expert_given_in_part_is_refused() -> None:
    with pytest.raises(ContractError, match="shared2"):
        moe_qpn(**(case() | dict(shared2=None)))
    with pytest.raises(ContractError, match="shared_gate"):
        moe_qpn(**(case(shared=False) | dict(shared_gate=torch.zeros(1, 40))))

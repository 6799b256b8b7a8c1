"""The property tests of sm70kernels.testing fail on what they are there to catch."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from sm70kernels import inputs
from sm70kernels.backends import REFERENCE
from sm70kernels.op import INV, Dim, Exact, Op, Ratio, Spec
from sm70kernels.testing import DTYPES, conforms, poison, poisoned_memory, rounds_as_stated, rows_independent, same_bits


def declare(reference: Callable[..., Any], tolerance: Ratio | Exact | None = None) -> Op[Any]:
    return Op(
        "product",
        reference=reference,
        determinism=INV,
        tolerance=tolerance or Ratio(2.0),
        args=dict(x="act[M,K] strided", w="act[N,K]", out="act[M,N] out"),
        dims=dict(M=Dim(0, 20), N=Spec(5), K=Spec(64, 33)),
    )


def naive(x: Tensor, w: Tensor) -> Tensor:
    return torch.stack([(row * w).sum(1) for row in x]) if len(x) else x.new_zeros(0, len(w))


def good(x: Tensor, w: Tensor) -> Tensor:
    return torch.stack([(row * w.float()).sum(1) for row in x.float()]).to(x.dtype) if len(x) else x.new_zeros(0, len(w))


def drops_the_last_term(x: Tensor, w: Tensor) -> Tensor:
    return good(x[:, :-1], w[:, :-1])


def sums_in_half(x: Tensor, w: Tensor) -> Tensor:
    total = torch.zeros(len(x), len(w), dtype=torch.float16)
    for k in range(x.shape[1]):
        total += (x[:, k, None].float() * w[None, :, k].float()).half()
    return total.to(x.dtype)


def rounds_twice(x: Tensor, w: Tensor) -> Tensor:
    return good(x.half().to(x.dtype), w.half().to(w.dtype))


def forgets_a_row(x: Tensor, w: Tensor) -> Tensor:
    out = torch.empty(len(x), len(w), dtype=x.dtype)
    out[:-1] = good(x, w)[:-1]
    return out


def keeps_state(x: Tensor, w: Tensor, seen: list[int] = []) -> Tensor:  # noqa: B006
    seen.append(1)
    return good(x, w) + len(seen) * 2.0**-8


def centres_rows_on_the_batch(x: Tensor, w: Tensor) -> Tensor:
    return good(x, w) + 0 * x.float().sum() + x.float().mean().to(x.dtype) * 2.0**-20


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_right_reference_passes(dtype: torch.dtype) -> None:
    conforms(declare(good), naive)(dtype=dtype, backend=REFERENCE)
    rows_independent(declare(good))(dtype=dtype, backend=REFERENCE)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("wrong", [drops_the_last_term, sums_in_half, forgets_a_row])
def test_a_wrong_reference_fails(wrong: Callable[..., Any], dtype: torch.dtype) -> None:
    with pytest.raises((AssertionError, BaseExceptionGroup)):
        conforms(declare(wrong), naive)(dtype=dtype, backend=REFERENCE)


def test_float32_inputs_rounded_to_float16_fail() -> None:
    with pytest.raises((AssertionError, BaseExceptionGroup), match="maximum error"):
        conforms(declare(rounds_twice), naive)(dtype=torch.float32, backend=REFERENCE)


def test_a_result_that_changes_from_call_to_call_fails() -> None:
    def op(x: Tensor, w: Tensor) -> Tensor:
        return keeps_state(x, w)

    with pytest.raises((AssertionError, BaseExceptionGroup)):
        conforms(declare(op, Ratio(1e9)), naive)(dtype=torch.float32, backend=REFERENCE)


def test_rows_that_see_each_other_fail() -> None:
    with pytest.raises((AssertionError, BaseExceptionGroup), match="has other bits"):
        rows_independent(declare(centres_rows_on_the_batch))(dtype=torch.float32, backend=REFERENCE)


def test_a_stated_rounding_widens_the_yardstick() -> None:
    def two_steps(x: Tensor, w: Tensor) -> Tensor:
        return (good(x, w).float() * 3).to(x.dtype)

    def with_h(x: Tensor, w: Tensor, h: Callable[[Tensor], Tensor]) -> Tensor:
        return h(naive(x, w)) * 3

    conforms(declare(two_steps, Ratio(1.5)), with_h)(dtype=torch.float16, backend=REFERENCE)


def test_exact_means_every_bit_after_rounding() -> None:
    def off_by_one_bit(x: Tensor, w: Tensor) -> Tensor:
        return torch.nextafter(x[:, : len(w)].clone(), torch.tensor(9.0)) if x.dtype == torch.float32 else x[:, : len(w)].clone()

    def first(x: Tensor, w: Tensor) -> Tensor:
        return x[:, : len(w)].clone()

    conforms(declare(off_by_one_bit, Exact()), first)(dtype=torch.float16, backend=REFERENCE)
    with pytest.raises((AssertionError, BaseExceptionGroup), match="values differ, first at"):
        conforms(declare(off_by_one_bit, Exact()), first)(dtype=torch.float32, backend=REFERENCE)


def test_slots_compare_the_rows_of_a_pool() -> None:
    def add(state: Tensor, x: Tensor, slot: Tensor) -> None:
        state[slot.long()] += x

    def spill(state: Tensor, x: Tensor, slot: Tensor) -> None:
        state[slot.long()] += x.sum(0) * 0.5 + x * 0.5

    for reference, fails in ((add, False), (spill, True)):
        op = Op("add", reference=reference, determinism=INV, tolerance=Exact(), inputs=dict(slot=inputs.distinct("S")),
                args=dict(state="f32[S,K] inout", x="f32[M,K]", slot="i32[M]"), dims=dict(S=Dim(4, 6), M=Dim(0, 4), K=Spec(3)))  # fmt: skip
        test = rows_independent(op, slots={"state": "slot"})
        if fails:
            with pytest.raises((AssertionError, BaseExceptionGroup), match="add: state: row"):
                test(dtype=torch.float32, backend=REFERENCE)
        else:
            test(dtype=torch.float32, backend=REFERENCE)


def test_poison_shows_in_every_dtype() -> None:
    assert poison(torch.zeros(2)).isnan().all()
    assert poison(torch.zeros(2, dtype=torch.int32)).tolist() == [-(2**31)] * 2
    assert poison(torch.zeros(2, dtype=torch.uint8)).tolist() == [255] * 2
    with poisoned_memory():
        assert torch.zeros(2).new_empty(3).isnan().all()
        assert torch.empty_like(torch.zeros(2)).isnan().all()


def test_same_bits_tells_zeros_apart_and_nan_alike() -> None:
    nan = torch.tensor([float("nan")])
    assert same_bits((nan, None), (nan.clone(), None))
    assert not same_bits(torch.tensor([0.0]), torch.tensor([-0.0]))
    assert not same_bits(torch.tensor([0.0]), torch.tensor([0.0]).half())


def squared_product(x: Tensor, w: Tensor, h: Callable[[Tensor], Tensor] = lambda x: x) -> Tensor:
    return h(naive(x, w)) ** 2


def squared_as_stated(x: Tensor, w: Tensor) -> Tensor:
    return (good(x, w).float() ** 2).to(x.dtype)


def squared_unrounded(x: Tensor, w: Tensor) -> Tensor:
    return (good(x.float(), w.float()) ** 2).to(x.dtype)


def test_roundings_are_seen_when_missing_when_too_many_and_when_invisible() -> None:
    sizes = dict(M=20)
    rounds_as_stated(declare(squared_as_stated), squared_product, sizes)()
    rounds_as_stated(declare(good), naive, sizes)()
    with pytest.raises(AssertionError, match="differ from the definition with its roundings"):
        rounds_as_stated(declare(squared_unrounded), squared_product, sizes)()
    with pytest.raises(AssertionError, match="differ from the definition with its roundings"):
        rounds_as_stated(declare(squared_as_stated), lambda x, w: naive(x, w) ** 2, sizes)()

    def rounded_before_the_end(x: Tensor, w: Tensor, h: Callable[[Tensor], Tensor] = lambda x: x) -> Tensor:
        return h(naive(x, w))

    with pytest.raises(AssertionError, match="shows nowhere"):
        rounds_as_stated(declare(good), rounded_before_the_end, sizes)()

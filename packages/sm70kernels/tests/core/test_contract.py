"""Calls that break a declaration: the error names op, argument, axis, dim, expected and got."""

from typing import Any

import pytest
import torch
from torch import Tensor

from sm70kernels.op import INV, ContractError, Derived, Dim, Exact, Op, Spec


def _reference(
    x: Tensor, w: Tensor, cache: Tensor, scale: Tensor | None, kind: str, topk: int, eps: float, flag: bool, count: Tensor
) -> Tensor:
    return x.clone()


op = Op(
    "sample",
    reference=_reference,
    determinism=INV,
    tolerance=Exact(),
    args=dict(
        x="act[M,K] strided",
        w="act[N,K]",
        cache="kv[B,K]",
        scale="f32[B] when=kv:u8",
        kind="enum decode|prefill",
        topk="dim T",
        eps="float",
        flag="bool",
        count="i32 device",
        out="act[M,K] out",
        scratch="u8[W] scratch",
    ),
    dims=dict(M=Dim(0, 8), K=Spec(4), N=Derived("2*K"), B=Dim(1, 4), T=Dim(1, "K"), W=Dim(0, 1 << 30)),
)


def call(**changes: Any) -> Any:
    good = dict(x=torch.zeros(3, 4), w=torch.zeros(8, 4), cache=torch.zeros(2, 4), scale=None, kind="decode", topk=2, eps=1e-6)
    return op(**(good | dict(flag=True, count=torch.tensor(1, dtype=torch.int32)) | changes))


def test_the_good_call_passes_with_any_size_of_a_specialised_dim() -> None:
    assert call().shape == (3, 4)
    assert call(x=torch.zeros(3, 6), w=torch.zeros(12, 6), cache=torch.zeros(2, 6)).shape == (3, 6)
    assert call(cache=torch.zeros(2, 4, dtype=torch.uint8), scale=torch.zeros(2)).shape == (3, 4)
    assert call(cache=torch.zeros(2, 4, dtype=torch.int8)).shape == (3, 4)
    assert call(eps=1, x=torch.zeros(3, 9)[:, 2:6]).shape == (3, 4)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(w=torch.nn.Parameter(torch.zeros(8, 4))), "sample: w: requires grad, and ops have no gradient; pass w.detach()"),
        (dict(w=torch.zeros(8, 5)), "sample: w axis 1: expected K=4 (bound by x axis 1), got 5"),
        (dict(w=torch.zeros(7, 4)), "sample: w axis 0: expected N = 2*K = 8, got N=7"),
        (dict(x=torch.zeros(9, 4)), "sample: x axis 0: expected M <= 8, got M=9"),
        (dict(topk=5), "sample: topk: expected T <= K = 4, got T=5"),
        (dict(topk=0), "sample: topk: expected T >= 1, got T=0"),
        (dict(x=torch.zeros(4)), "sample: x: expected 2 axes [M,K], got shape (4,)"),
        (dict(x=torch.zeros(3, 4, dtype=torch.float64)), "sample: x: expected act (activations are f32 or f16), got torch.float64"),
        (dict(w=torch.zeros(8, 4).half()), "sample: w: expected activation dtype f32 (bound by x), got f16"),
        (dict(cache=torch.zeros(2, 4).half()), "sample: cache: expected activation dtype f32 (bound by x), got f16"),
        (dict(cache=torch.zeros(2, 4, dtype=torch.int32)), "sample: cache: expected kv (activations are f32 or f16), got i32"),
        (dict(cache=torch.zeros(2, 4, dtype=torch.uint8)), "sample: scale: missing, but this call has kv:u8, which needs it"),
        (dict(scale=torch.zeros(2)), "sample: scale: given, but it belongs to kv:u8, which this call does not have; pass None"),
        (dict(count=torch.tensor(1)), "sample: count: expected i32, got i64"),
        (dict(count=1), "sample: count: expected a tensor (i32 device) or an array with __dlpack__, got int"),
        (dict(kind="verify"), "sample: kind: expected one of decode, prefill, got 'verify'"),
        (dict(eps=True), "sample: eps: expected a Python float, got bool True"),
        (dict(flag=1), "sample: flag: expected a Python bool, got int 1"),
        (dict(topk=2.0), "sample: topk: expected a Python int, got float 2.0"),
        (dict(w=None), "sample: w: missing (act[N,K])"),
        (dict(w=torch.zeros(4, 8).t()), "sample: w: expected a contiguous tensor, got strides (1, 8) for shape (8, 4)"),
        (dict(x=torch.zeros(4, 3).t()), "sample: x: expected a contiguous last axis, got strides (1, 3) for shape (3, 4)"),
        (dict(out=torch.zeros(2, 4)), "sample: out axis 0: expected M=3 (bound by x axis 0), got 2"),
        (dict(wide=1), "sample: no argument wide; it takes x, w, cache"),
    ],
)
def test_messages(changes: dict[str, Any], message: str) -> None:
    for _ in range(2):  # a refusal is not cached as a permission
        with pytest.raises(ContractError) as refusal:
            call(**changes)
        assert str(refusal.value).startswith(message)


def test_tensors_of_one_call_share_a_device() -> None:
    op = Op("add", reference=lambda a, b: a + b, launch=lambda cfg, d, a, b, out: None, determinism=INV, tolerance=Exact(),
            args=dict(a="f32[M]", b="f32[M]", out="f32[M] out"), dims=dict(M=Dim(0, 8)))  # fmt: skip
    with pytest.raises(ContractError, match="add: b: on cpu, but a is on meta; move one of them"):
        op(torch.zeros(3, device="meta"), torch.zeros(3))


def test_too_many_and_doubled_arguments() -> None:
    with pytest.raises(ContractError, match="at most 11 arguments"):
        op(*[None] * 12)
    with pytest.raises(ContractError, match="x is given twice"):
        op(torch.zeros(3, 4), x=torch.zeros(3, 4))

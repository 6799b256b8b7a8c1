"""What an Op does around its reference: outputs, cached checks, other libraries' arrays, launches, recording, derived data."""

from collections.abc import Sequence
from enum import StrEnum
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import sm70kernels
from sm70kernels import inputs, rms_norm
from sm70kernels.contract import Bound
from sm70kernels.op import EXACT, INV, ContractError, DeclarationError, Derived, Dim, Exact, NoKernel, Op, Ratio, Spec, record

calls: list[tuple[Any, ...]] = []


def _reference(x: Tensor, kind: str, state: Tensor, weight: Tensor | None) -> tuple[Tensor, Tensor | None]:
    state += 1
    return x * 2, None if weight is None else x * weight


def _launch(cfg: Any, d: dict[str, int], *rest: Any) -> None:
    calls.append((cfg, d, *rest))


def _kernel(cfg: str, d: dict[str, int], x: Any, kind: Any, state: Any, weight: Any, double: Any, product: Any, scratch: Any) -> None:
    calls.append((cfg, d, x, kind, state, weight, double, product, scratch))


def make(**changes: Any) -> Op[tuple[Tensor, Tensor | None]]:
    declaration: dict[str, Any] = dict(
        reference=_reference,
        determinism=INV,
        tolerance=Exact(),
        args=dict(
            x="act[M,K]",
            kind="enum decode|prefill",
            state="f32[K] inout",
            weight="act[K] optional",
            double="act[M,K] out",
            product="act[M,K] out when=weight",
            scratch="u8[W] scratch",
        ),
        dims=dict(M=Dim(0, 8), K=Spec(4), W=Dim(0, 64)),
    )
    return Op("twice", **(declaration | changes))


def test_outputs_are_returned_or_written_where_given() -> None:
    op, x, state = make(), torch.randn(3, 4), torch.zeros(4)
    double, product = op(x, "decode", state, None)
    assert torch.equal(double, x * 2)
    assert product is None
    assert state.tolist() == [1.0] * 4
    given = torch.full((3, 4), float("nan"))
    double, product = op(x, "decode", state, torch.ones(4), double=given)
    assert double is given
    assert torch.equal(given, x * 2)
    assert product is not None
    assert torch.equal(product, x)


def test_an_output_the_call_does_not_make_or_makes_differently_is_refused() -> None:
    op, x = make(), torch.randn(3, 4)
    with pytest.raises(ContractError, match="twice: product: given, but it belongs to weight"):
        op(x, "decode", torch.zeros(4), None, product=torch.zeros(3, 4))

    def halves(x: Tensor) -> Tensor:
        return x.half()

    args = dict(x="f32[M]", out="f32[M] out")
    wrong = Op("halves", reference=halves, determinism=EXACT, tolerance=Exact(), args=args, dims=dict(M=Dim(0, 8)))
    with pytest.raises(ContractError, match=r"halves: out: this call makes torch.float16 \(3,\), got a tensor for torch.float32"):
        wrong(torch.zeros(3), torch.zeros(3))


def test_checks_run_once_a_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    op = make()
    bound = []
    bind = op.contract.bind

    def counting(values: Sequence[Any], kernel: bool) -> Bound:
        bound.append(bind(values, kernel))
        return bound[-1]

    monkeypatch.setattr(op.contract, "bind", counting)
    for _ in range(3):
        op(torch.randn(3, 4), "decode", torch.zeros(4), None)
    op(x=torch.randn(3, 4), kind="decode", state=torch.zeros(4), weight=None)
    assert len(bound) == 1
    op(torch.randn(2, 4), "decode", torch.zeros(4), None)
    op(torch.randn(2, 4), "prefill", torch.zeros(4), None)
    op(torch.randn(2, 4).half(), "prefill", torch.zeros(4), None)
    assert len(bound) == 4


def test_a_subclass_is_not_remembered_as_its_base() -> None:
    class Kind(StrEnum):
        DECODE = "decode"
        VERIFY = "verify"

    op = make()
    op(torch.randn(3, 4), Kind.DECODE, torch.zeros(4), None)
    with pytest.raises(ContractError, match="expected one of decode, prefill"):
        op(torch.randn(3, 4), Kind.VERIFY, torch.zeros(4), None)
    parameter = torch.nn.Parameter(torch.ones(4), requires_grad=False)
    op(torch.randn(3, 4), "decode", torch.zeros(4), parameter)
    with pytest.raises(ContractError, match="weight axis 0"):
        op(torch.randn(3, 4), "decode", torch.zeros(4), torch.nn.Parameter(torch.ones(5), requires_grad=False))


def test_memory_of_cached_checks_is_bounded() -> None:
    op = Op("copy", reference=lambda x: x.clone(), determinism=EXACT, tolerance=Exact(), args=dict(x="f32[M]", out="f32[M] out"),
            dims=dict(M=Dim(0, 5000)))  # fmt: skip
    for m in range(5000):
        op(torch.empty(m))
    assert 0 < len(op._plans) <= 512


def test_arrays_of_other_libraries_share_memory() -> None:
    op = make()
    x, state, double = np.ones((3, 4), np.float32), np.zeros(4, np.float32), np.zeros((3, 4), np.float32)
    op(x, "decode", state, None, double)
    assert (double == 2).all()
    assert (state == 1).all()
    with pytest.raises(ContractError, match="twice: x: this array cannot come in through DLPack"):
        op(x.astype(">f4"), "decode", state, None)  # big-endian: DLPack has no word for it


def test_a_device_without_a_kernel_is_an_error_and_never_the_reference() -> None:
    x = torch.empty(3, 4, device="meta")  # a device that is not the CPU and that every machine has
    with pytest.raises(NoKernel, match="twice: no CUDA kernel; x is on meta"):
        make()(x, "decode", torch.empty(4, device="meta"), None)


def test_launch_gets_config_dims_and_every_argument() -> None:
    op = make(launch=_kernel, configs=("narrow", "wide"), choose=lambda d: "wide" if d["M"] > 2 else "narrow")
    x, state, weight = (torch.empty(shape, device="meta", dtype=torch.float16) for shape in ((3, 4), (4,), (4,)))
    scratch = torch.empty(16, device="meta", dtype=torch.uint8)
    calls.clear()
    double, product = op(x, "decode", state.float(), weight, scratch=scratch)
    config, dims, *rest = calls.pop()
    assert config == "wide"
    assert dims == {"M": 3, "K": 4, "W": 16}
    assert rest[4] is double
    assert rest[5] is product
    assert double.shape == (3, 4)
    assert double.dtype == torch.float16
    assert op(x, "decode", state.float(), None, scratch=scratch)[1] is None
    with pytest.raises(ContractError, match="scratch: missing"):
        op(x, "decode", state.float(), None)
    with pytest.raises(ContractError, match="x axis 1: K=5 has no kernel; kernels exist for 4"):
        op(torch.empty(3, 5, device="meta"), "decode", torch.empty(5, device="meta"), None, scratch=scratch)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (dict(reference=lambda x, state, kind, weight: None), r"reference takes \(x, state, kind, weight\), but args declares"),
        (dict(launch=_launch), "launch takes cfg, d, rest; args declares x, kind"),
        (dict(inputs=dict(y=inputs.normal())), "inputs names y"),
        (dict(dims=dict(M=Dim(0, 8), W=Dim(0, 64))), "x uses dim K, which dims= does not declare"),
        (dict(dims=dict(M=Dim(0, 8), K=Spec(4), W=Dim(0, 64), Z=Dim(0, 1))), "dim Z is declared but"),
        (dict(dims=dict(M=Dim(0, "Q"), K=Spec(4), W=Dim(0, 64))), "cannot be ordered"),
    ],
)
def test_wrong_declarations_fail_at_import(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(DeclarationError, match=f"twice: .*{reason}"):
        make(**changes)


def test_record_collects_names_of_the_block_only() -> None:
    op = make()
    with record() as outer:
        rms_norm(torch.ones(1, 4), torch.ones(4), 1e-6, True)
        with record() as inner:
            op(torch.randn(3, 4), "decode", torch.zeros(4), None)
    op(torch.randn(3, 4), "decode", torch.zeros(4), None)
    assert outer == ["rms_norm", "twice"]
    assert inner == ["twice"]


def test_make_is_repeatable_and_fills_in_model_sizes() -> None:
    op = make(inputs=dict(weight=inputs.optional(inputs.unit())))
    first, again = op.make(dict(M=2, W=0), seed=5), op.make(dict(M=2, W=0), seed=5)
    assert first["x"].shape == (2, 4)
    assert torch.equal(first["x"], again["x"])
    assert not torch.equal(first["x"], op.make(dict(M=2, W=0), seed=6)["x"])
    assert op.make(dict(M=2, W=0), dtype=torch.float16)["x"].dtype == torch.float16
    assert {op.make(dict(M=2, W=0), seed=seed)["weight"] is None for seed in range(20)} == {True, False}
    with pytest.raises(ContractError, match="dim M is needed"):
        op.make(dict(W=0))
    with pytest.raises(ContractError, match="no dim Q"):
        op.make(dict(Q=1))


def test_integer_arguments_need_a_maker() -> None:
    op = Op("pick", reference=lambda ids: ids, determinism=EXACT, tolerance=Exact(), args=dict(ids="i32[M]"), dims=dict(M=Dim(0, 8)))
    with pytest.raises(DeclarationError, match=r"pick: ids \(i32\[M\]\) needs a maker"):
        op.make(dict(M=3))


def test_bytes_count_inout_twice_and_scratch_not_at_all() -> None:
    assert make().bytes(dict(M=2, W=64)) == 3 * 2 * 8 + 2 * 16 + 8
    assert make().bytes(dict(M=2, W=64), torch.float32) == 3 * 2 * 16 + 2 * 16 + 16
    assert make(bytes=lambda d, dtype: d["M"] * dtype.itemsize).bytes(dict(M=2, W=0)) == 4


def test_derived_sizes_follow() -> None:
    op = Op("glue", reference=lambda a, b: torch.cat([a, b]), determinism=EXACT, tolerance=Ratio(1.0),
            args=dict(a="f32[A]", b="f32[B]", out="f32[C] out"), dims=dict(A=Dim(0, 4), B=Dim(0, 4), C=Derived("A+B")))  # fmt: skip
    assert op.sizes(dict(A=1, B=3)) == {"A": 1, "B": 3, "C": 4}
    assert op(torch.zeros(1), torch.zeros(3), torch.zeros(4)).shape == (4,)
    with pytest.raises(ContractError, match=r"out axis 0: expected C = A\+B = 4, got C=5"):
        op(torch.zeros(1), torch.zeros(3), torch.zeros(5))


def test_exports_are_the_ops_and_their_list() -> None:
    assert sm70kernels.__all__ == ["OPS", *sorted(sm70kernels.OPS)]
    assert "rms_norm" in dir(sm70kernels)
    with pytest.raises(AttributeError, match="no attribute 'rms_nrom'"):
        sm70kernels.rms_nrom  # noqa: B018

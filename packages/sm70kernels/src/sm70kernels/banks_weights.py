"""Quantised weights w [N, K] of four formats as the matrices a checkpoint has, and what each format means.

    int4    w = fma_h(q, scale, bias)                       codes 0..15, float16 scale and bias a group of 32 k
    nvfp4   w = h(e2m1(code) · S), S = h(e4m3(scale) · g)    a scale code a group of 16 k, a float32 g a row
    fp8     w = e4m3(code) · scale                           a float32 scale a row and block of 128 k
    int8    w = code · scale                                 a float32 scale a row

h() rounds to float16; fma_h is a multiplication and an addition with one rounding. Scales of fp8 and int8 multiply float32 sums, so their
codes reach the products unrounded. Every constructor refuses what would put NaN or an infinity into a product: padding and rows without
data are multiplied too, and zero times infinity is not zero. Errors are :class:`BankError` and name the place and the value.
"""

from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, Self

import numpy as np
import torch
from torch import Tensor

HALF_MAX = 65504.0
"""The largest float16 number."""

GROUP = {"int4": 32, "nvfp4": 16}
"""Consecutive k that share a scale."""

BLOCK = 128
"""Rows and columns of w that share a scale in fp8 checkpoints."""

NVFP4_LIMIT = HALF_MAX / 2**14
"""The largest |S|. The conversion of e2m1 leaves out a factor of 2^14, which kernels put into S; weights up to 6 S = 23.98 exist."""

_E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0])


class BankError(ValueError):
    """Weights that cannot be packed, or a bank that is not of the stated size; names the place, the value and what is allowed."""


def _refuse(place: str, tensor: Tensor, bad: Tensor, rule: str) -> None:
    """Raise for the first element of `tensor` where `bad` is true."""
    if bad.any():
        at = bad.nonzero()[0].tolist()
        raise BankError(f"{place}{at}: {rule}, got {tensor[tuple(at)].item()}")


def _shape(place: str, tensor: Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    if tensor.dtype != dtype or tuple(tensor.shape) != shape:
        raise BankError(f"{place}: expected {dtype} {list(shape)}, got {tensor.dtype} {list(tensor.shape)}")


def _matrix(place: str, codes: Tensor, dtype: torch.dtype) -> tuple[int, int]:
    if codes.dim() != 2 or codes.dtype != dtype:
        raise BankError(f"{place}: expected {dtype} [N, K], got {codes.dtype} {list(codes.shape)}")
    return codes.shape[0], codes.shape[1]


def _groups(name: str, k: int) -> int:
    if k % GROUP[name]:
        raise BankError(f"{name}: K={k} is not a multiple of the group of {GROUP[name]}; split the matrix at a multiple of it")
    return k // GROUP[name]


def e4m3(codes: Tensor) -> Tensor:
    """Return the float32 values of E4M3 codes (u8, any shape)."""
    return codes.view(torch.float8_e4m3fn).float()


@dataclass(frozen=True)
class Int4:
    """codes u8 [N, K] of 0..15, scale and bias f16 [N, K / 32]."""

    codes: Tensor
    scale: Tensor
    bias: Tensor
    format: ClassVar[str] = "int4"

    def __post_init__(self) -> None:
        n, k = _matrix("int4: codes", self.codes, torch.uint8)
        groups = _groups("int4", k)
        for name, values in (("scale", self.scale), ("bias", self.bias)):
            _shape(f"int4: {name}", values, torch.float16, (n, groups))
            _refuse(f"int4: {name}", values, ~torch.isfinite(values), "expected a finite number")
        _refuse("int4: codes", self.codes, self.codes > 15, "expected 0..15")
        if self.codes.numel() == 0:
            return
        by_group = self.codes.view(n, groups, GROUP["int4"])
        for extreme in (by_group.amin(-1), by_group.amax(-1)):
            w = extreme.double() * self.scale.double() + self.bias.double()
            _refuse("int4: w of group ", w, w.abs() >= HALF_MAX + 16, f"code · scale + bias must round to at most {HALF_MAX:.0f}")

    @classmethod
    def from_zeros(cls, codes: Tensor, scale: Tensor, zeros: Tensor) -> Self:
        """Make it from zero points u8 [N, K / 32] of 4 or 8 bits: bias = h(-(zero · scale)). Refuses products above 65504."""
        n, k = _matrix("int4: codes", codes, torch.uint8)
        for name, values, dtype in (("zeros", zeros, torch.uint8), ("scale", scale, torch.float16)):
            _shape(f"int4: {name}", values, dtype, (n, _groups("int4", k)))
        _refuse("int4: scale", scale, ~torch.isfinite(scale), "expected a finite number")
        product = zeros.float() * scale.float()
        _refuse("int4: zero · scale of group ", product, product.abs() > HALF_MAX, f"expected at most {HALF_MAX:.0f}")
        return cls(codes, scale, (-product).half())

    def dequantise(self) -> Tensor:
        """Return w f32 [N, K], every value a float16 number."""
        q, scale, bias = (t.cpu().numpy().astype(np.float64) for t in (self.codes, self.scale, self.bias))
        n, k = q.shape
        # Exact in float64, and numpy rounds from there to float16 in one step, as the fused operation does; torch takes two.
        w = q.reshape(n, k // GROUP["int4"], GROUP["int4"]) * scale[..., None] + bias[..., None]
        return torch.from_numpy(w.astype(np.float16).astype(np.float32).reshape(n, k)).to(self.codes.device)


@dataclass(frozen=True)
class Nvfp4:
    """codes u8 [N, K] of 0..15 (sign, exponent 2, mantissa 1), scale u8 [N, K / 16] of E4M3 codes, rows f32 [N] of global scales.

    Gate and up halves of one matrix may have different global scales, hence one a row.
    """

    codes: Tensor
    scale: Tensor
    rows: Tensor
    format: ClassVar[str] = "nvfp4"

    def __post_init__(self) -> None:
        n, k = _matrix("nvfp4: codes", self.codes, torch.uint8)
        _shape("nvfp4: scale", self.scale, torch.uint8, (n, _groups("nvfp4", k)))
        _shape("nvfp4: rows", self.rows, torch.float32, (n,))
        _refuse("nvfp4: codes", self.codes, self.codes > 15, "expected 0..15")
        _refuse("nvfp4: scale", self.scale, (self.scale & 0x7F) == 0x7F, "expected an E4M3 number, and this code is NaN")
        _refuse("nvfp4: rows", self.rows, ~torch.isfinite(self.rows), "expected a finite number")
        product = self.scales().float()
        _refuse("nvfp4: scale · global of group ", product, product.abs() > NVFP4_LIMIT, f"expected at most {NVFP4_LIMIT}")

    def scales(self) -> Tensor:
        """Return S f16 [N, K / 16]."""
        return (e4m3(self.scale) * self.rows[:, None]).half()

    def dequantise(self) -> Tensor:
        """Return w f32 [N, K], every value a float16 number."""
        n, k = self.codes.shape
        values = _E2M1.to(self.codes.device)[self.codes.long()].view(n, k // GROUP["nvfp4"], GROUP["nvfp4"])
        return (values * self.scales().float()[..., None]).half().float().reshape(n, k)


@dataclass(frozen=True)
class Fp8:
    """codes u8 [N, K] of E4M3, scale f32 [N, B]: of row n for the B blocks of 128 k that the columns lie in.

    Column k of w is column phase + k of its first block, so B = ceil((phase + K) / 128); phase is 0, 32, 64 or 96.
    """

    codes: Tensor
    scale: Tensor
    phase: int = 0
    format: ClassVar[str] = "fp8"

    def __post_init__(self) -> None:
        n, k = _matrix("fp8: codes", self.codes, torch.uint8)
        check_phase("fp8", self.phase)
        _shape("fp8: scale", self.scale, torch.float32, (n, blocks(k, self.phase)))
        _refuse("fp8: codes", self.codes, (self.codes & 0x7F) == 0x7F, "expected an E4M3 number, and this code is NaN")
        _refuse("fp8: scale", self.scale, ~torch.isfinite(self.scale * 256), "expected a finite number below 2^120")

    @classmethod
    def from_blocks(cls, codes: Tensor, scale: Tensor, row: int = 0, column: int = 0) -> Self:
        """Cut a slice out of a matrix whose 128 x 128 blocks have the scales f32 [R, C]: codes [N, K] begin at `row` and `column` of it."""
        n, k = _matrix("fp8: codes", codes, torch.uint8)
        need = (blocks(n, row), blocks(k, column))
        if scale.dim() != 2 or any(have < wanted for have, wanted in zip(scale.shape, need, strict=True)):
            place = f"fp8: scale of {n} rows from {row} and {k} columns from {column}"
            raise BankError(f"{place}: expected at least {list(need)} blocks of 128 x 128, got {list(scale.shape)}")
        of_row = (row + torch.arange(n, device=scale.device)) // BLOCK
        return cls(codes, scale[of_row, column // BLOCK : need[1]].contiguous(), column % BLOCK)

    def dequantise(self) -> Tensor:
        """Return w f32 [N, K], each product code · scale rounded to float32."""
        k = self.codes.shape[1]
        of_column = (self.phase + torch.arange(k, device=self.codes.device)) // BLOCK
        return e4m3(self.codes) * self.scale[:, of_column]


@dataclass(frozen=True)
class Int8:
    """codes i8 [N, K], scale f32 [N]."""

    codes: Tensor
    scale: Tensor
    format: ClassVar[str] = "int8"

    def __post_init__(self) -> None:
        n, _ = _matrix("int8: codes", self.codes, torch.int8)
        _shape("int8: scale", self.scale, torch.float32, (n,))
        _refuse("int8: scale", self.scale, ~torch.isfinite(self.scale), "expected a finite number")

    def dequantise(self) -> Tensor:
        """Return w f32 [N, K], each product code · scale rounded to float32."""
        return self.codes.float() * self.scale[:, None]


Weights = Int4 | Nvfp4 | Fp8 | Int8


def take_rows(weights: Weights, rows: Tensor) -> Weights:
    """Return the weights of the rows i64 [R] of w, in that order."""
    values = {field.name: getattr(weights, field.name) for field in fields(weights)}
    taken: dict[str, Any] = {name: value[rows] for name, value in values.items() if isinstance(value, Tensor)}
    return replace(weights, **taken)


def check_phase(name: str, phase: int) -> None:
    """Raise BankError unless `phase` is one that the format has: 0, and for fp8 32, 64 and 96 too."""
    allowed = (0, 32, 64, 96) if name == "fp8" else (0,)
    if phase not in allowed:
        raise BankError(f"{name}: phase {phase}: expected one of {', '.join(map(str, allowed))}; split the matrix at a multiple of 32")


def blocks(k: int, phase: int) -> int:
    """Return how many blocks of 128 the columns phase .. phase + k - 1 lie in."""
    return -(-(phase + k) // BLOCK)

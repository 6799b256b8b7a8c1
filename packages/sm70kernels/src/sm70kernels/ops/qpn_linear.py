"""qpn_linear: y = x · wᵀ for the few rows of decode and verify steps, with w in a packed bank of 4-bit or 8-bit weights.

y[m,n] = h(Σ_k x[m,k] w[n,k]): float32 products and sum, one rounding to the activation dtype, no bias. What w is, the four formats
say (sm70kernels.banks_weights): float16 numbers for int4 and nvfp4; for fp8 and int8 the products take the codes, and the float32
sum over a block of 128 k (fp8) or over all k (int8) is multiplied by its scale. sm70kernels.banks packs the bank.

N is an argument, because a bank is bytes; PHASE is where in its first block of 128 the slice of k begins (fp8; 0 otherwise). A row that
holds infinities or NaN changes no other row.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from sm70kernels import inputs, rows
from sm70kernels.banks import CLASSES, FORMATS, bank_bytes, dequantise, pack
from sm70kernels.banks_inputs import fitting_format, random_weights
from sm70kernels.cuda import Kernel
from sm70kernels.op import INV, ContractError, Dim, Op, Ratio, Spec


def reference(x: Tensor, format: str, n: int, phase: int, bank: Tensor) -> Tensor:
    """x act[M,K], bank u8[B] of `format` for w [n, K] -> act[M,n], in tiles of 16 rows."""
    _check_size(format, n, x.shape[1], phase, bank)
    y = rows.linear(x, dequantise(bank, format, n, x.shape[1], phase), rows.TILE["decode"])
    return y if x.dtype == torch.float32 else y.to(x.dtype)


@dataclass(frozen=True)
class Config:
    """Warps that share the k of a tile of 32 columns, and tiles a block computes; the first decides the order of sums."""

    warps_k: int
    warps_n: int = 1


KERNEL = Kernel("qpn_linear")
ROW_BLOCKS = {"int4": 3, "nvfp4": 3, "fp8": 2, "int8": 3}
"""Most blocks of 8 rows at a time: their sums fit in the 128 registers a lane has with 16 warps on a multiprocessor; fp8 has two sums."""

WARPS = 16
"""Warps of a multiprocessor at 128 registers."""

STAGE, STATIC_SHARED = 1152, 48 << 10
"""Bytes of shared memory a warp needs for each block of rows, and most that a block may declare."""


def launch(config: Config, d: Mapping[str, int], x: Tensor, format: str, n: int, phase: int, bank: Tensor, out: Tensor) -> None:
    """Blocks of (tiles of 32 columns, blocks of 8 rows); more rows than fit are shared evenly by several blocks."""
    _check_size(format, n, d["K"], phase, bank)
    warps, eights = config.warps_k * config.warps_n, -(-d["M"] // 8)
    passes = -(-eights // min(ROW_BLOCKS[format], STATIC_SHARED // (STAGE * warps)))
    row_blocks = -(-eights // passes) if passes else 1
    defines: dict[str, int | str] = dict(
        N=d["N"], K=d["K"], PHASE=phase, FORMAT=CLASSES[format], ROW_BLOCKS=row_blocks, WARPS_K=config.warps_k, WARPS_N=config.warps_n,
        BLOCKS=max(1, WARPS // warps), DEPTH=4 if row_blocks == 1 else 2,
    )  # fmt: skip
    grid = (-(-d["N"] // (32 * config.warps_n)), passes)
    KERNEL(defines, grid, 32 * warps, x, bank, out, d["M"], x.stride(0))


def choose(d: Mapping[str, int]) -> Config:
    """Short k is shared by fewer warps, so that each has at least a step."""
    return Config(8) if d["K"] >= 1024 else Config(4)


def _check_size(format: str, n: int, k: int, phase: int, bank: Tensor) -> None:
    if phase and format != "fp8":
        raise ContractError(f"qpn_linear: phase: {format} has no blocks of k for a slice to begin in, got {phase}; pass 0")
    expected = bank_bytes(format, n, k, phase)
    if bank.numel() != expected:
        raise ContractError(
            f"qpn_linear: bank axis 0: {format} [{n}, {k}] with phase {phase} takes {expected} bytes, got {bank.numel()}; "
            "pack it with sm70kernels.banks.pack"
        )


def _bank(draw: inputs.Draw) -> Tensor:
    return pack(random_weights(draw, draw.made["format"], draw.dims["N"], draw.dims["K"], draw.dims["PHASE"]))


def _shape(format: str, m: int, n: int, k: int) -> dict[str, int]:
    return dict(M=m, N=n, K=k, PHASE=0, B=bank_bytes(format, n, k))


qpn_linear = Op(
    "qpn_linear",
    reference=reference,
    launch=launch,
    determinism=INV,
    tolerance=Ratio(2.0),
    args=dict(
        x="act[M,K] strided aligned", format=f"enum {'|'.join(FORMATS)}", n="dim N", phase="dim PHASE", bank="u8[B] aligned",
        out="act[M,N] out",
    ),
    dims=dict(
        M=Dim(0, 64, test=(0, 20)),
        N=Spec(2560, 4120, 3584, 640, 320, 62080, test=(1, 24, 33), kernel=(40, 64, 72)),
        K=Spec(2560, 1536, 10240, 320, 160, test=(32, 96), kernel=(32, 96)),
        PHASE=Spec(0, 32, 64, 96, test=(0, 0, 96)),
        B=Dim(0, 1 << 40, test=(0, 0)),
    ),
    inputs=dict(format=lambda draw: fitting_format(draw, draw.dims["N"], draw.dims["K"], "B"), bank=_bank),
    configs=(Config(8), Config(4), Config(1, 4)),
    choose=choose,
    flops=lambda d: 2 * d["M"] * d["N"] * d["K"],
    shapes=[
        *(_shape("int4", m, n, k) for n, k in ((2560, 2560), (320, 2560), (2560, 160), (62080, 2560)) for m in (1, 5, 16, 40, 64)),
        *(_shape(format, m, n, k) for format in FORMATS[1:] for n, k in ((320, 2560), (2560, 160)) for m in (5, 16)),
    ],
)

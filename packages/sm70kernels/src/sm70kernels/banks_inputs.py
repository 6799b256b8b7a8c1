"""Random packed banks for tests and benchmarks of the ops that take them."""

from collections.abc import Mapping

import torch
from torch import Tensor

from sm70kernels.banks import FORMATS, Fp8, Int4, Int8, Nvfp4, Weights, bank_bytes
from sm70kernels.banks_weights import blocks
from sm70kernels.inputs import Draw


def fitting_format(draw: Draw, n: int, k: int, bytes: str) -> str:
    """Return the format whose bank of [n, k] has as many bytes as the dim named `bytes` says, else any that has the dim PHASE."""
    dims: Mapping[str, int] = draw.dims
    able = ("fp8",) if dims["PHASE"] else FORMATS
    fitting = [format for format in able if bank_bytes(format, n, k) == dims[bytes]]
    return fitting[0] if fitting else able[draw.integer(0, len(able) - 1)]


def random_weights(draw: Draw, format: str, n: int, k: int, phase: int) -> Weights:
    """Return weights [n, k] with every code of the format and a standard deviation of about 0.07."""

    def codes(count: int) -> Tensor:
        return torch.randint(0, count, (n, k), generator=draw.generator)

    def scale(columns: int, mean: float) -> Tensor:
        return (draw.normal(n, columns) * 0.25 + 1.0) * mean

    if format == "int4":
        zeros = torch.randint(0, 16, (n, k // 32), generator=draw.generator).to(torch.uint8)
        return Int4.from_zeros(codes(16).to(torch.uint8), scale(k // 32, 1 / 96).half(), zeros)
    if format == "nvfp4":
        scales = scale(k // 16, 64.0).to(torch.float8_e4m3fn).view(torch.uint8)
        return Nvfp4(codes(16).to(torch.uint8), scales, scale(1, 1 / 2560).flatten())
    if format == "fp8":
        return Fp8((draw.normal(n, k) * 64).to(torch.float8_e4m3fn).view(torch.uint8), scale(blocks(k, phase), 1 / 1024), phase)
    return Int8((codes(256) - 128).to(torch.int8), scale(1, 1 / 1024).flatten())

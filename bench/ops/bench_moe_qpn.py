"""moe_qpn: ten of 512 packed experts and the shared one, on one of four GPUs; every row chooses its ten at random."""

import torch

from sm70kernels import moe_qpn
from sm70kernels.banks import FORMATS, bank_bytes
from sm70kernels.bench import Cases, benchmark
from sm70kernels.inputs import Draw

SIZE = dict(K=10, X=512, E=2560, I=160, PHASE=0)


def routes(draw: Draw) -> torch.Tensor:
    """Distinct experts for each row [M, K]."""
    rows = [torch.randperm(draw.dims["X"], generator=draw.generator)[: draw.dims["K"]] for _ in range(draw.dims["M"])]
    return torch.stack(rows).to(draw.dtype)


def moved(d: dict[str, int]) -> int:
    """Bytes of the experts that M random choices of K reach on average, of the shared expert, of x and out."""
    reached = d["X"] * (1 - (1 - d["K"] / d["X"]) ** d["M"])
    return int(reached * (d["B13"] + d["B2"])) + 2 * d["E"] * (3 * d["J"] + 1) + d["M"] * (4 * d["E"] + 8 * d["K"])


CASES = [
    Cases(
        moe_qpn,
        rows=(1, 5, 40) if format == "int4" else (5,),
        sizes={format: SIZE},
        given=dict(format=format, w13=None, ids=routes),
        follows=dict(
            J=lambda d: d["I"],
            B13=lambda d, format=format: bank_bytes(format, 2 * d["I"], d["E"]),
            B2=lambda d, format=format: bank_bytes(format, d["E"], d["I"]),
        ),
        bytes=moved,
    )
    for format in FORMATS
]
test_moe_qpn = benchmark(*CASES)

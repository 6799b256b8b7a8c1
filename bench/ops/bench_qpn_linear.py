"""qpn_linear: packed weights in each format, a square product and the shared expert's on one of four GPUs."""

from sm70kernels import inputs, qpn_linear
from sm70kernels.banks import FORMATS, bank_bytes
from sm70kernels.bench import Cases, benchmark

SIZES = dict(
    square=dict(N=2560, K=2560, PHASE=0),
    shared_up_tp4=dict(N=320, K=2560, PHASE=0),
    shared_down_tp4=dict(N=2560, K=160, PHASE=0),
    lm_head_tp4=dict(N=62080, K=2560, PHASE=0),
)
CASES = [
    Cases(
        qpn_linear,
        rows=(1, 5, 40),
        sizes={f"{format}_{name}": size for name, size in SIZES.items()},
        given=dict(format=format, bank=inputs.integers(0, 255)),  # bytes of any value take the same time
        follows=dict(B=lambda d, format=format: bank_bytes(format, d["N"], d["K"])),
    )
    for format in FORMATS
]
test_qpn_linear = benchmark(*CASES)

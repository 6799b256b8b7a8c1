"""linear_skinny_dual: two products of one input in one launch, on one of four GPUs (tp4) and on one alone (tp1)."""

from sm70kernels import linear_skinny_dual
from sm70kernels.bench import Cases, benchmark

CASES = Cases(
    linear_skinny_dual,
    rows=(1, 5, 40),
    sizes=dict(
        gdn_in_tp4=dict(N=4096, N2=24),
        gdn_in_tp1=dict(N=16384, N2=96),
        shared_up_tp4=dict(N=320, N2=1),
        shared_up_tp1=dict(N=1280, N2=1),
    ),
)
test_linear_skinny_dual = benchmark(CASES)

"""linear_skinny: every dense product of a decode step, on one of four GPUs (tp4) and on one alone (tp1)."""

from sm70kernels import linear_skinny
from sm70kernels.bench import Cases, benchmark

CASES = Cases(
    linear_skinny,
    rows=(1, 5, 40),
    sizes=dict(
        gdn_in_tp4=dict(N=4120, K=2560),
        qsa_in_tp4=dict(N=3584, K=2560),
        attention_out_tp4=dict(N=2560, K=1536),
        index=dict(N=640, K=2560),
        router=dict(N=512, K=2560),
        shared_up_tp4=dict(N=320, K=2560),
        shared_down_tp4=dict(N=2560, K=160),
        square=dict(N=2560, K=2560),
        gdn_in_tp1=dict(N=16480, K=2560),
        qsa_in_tp1=dict(N=13312, K=2560),
        attention_out_tp1=dict(N=2560, K=6144),
        shared_up_tp1=dict(N=1280, K=2560),
        shared_down_tp1=dict(N=2560, K=640),
    ),
)
test_linear_skinny = benchmark(CASES)

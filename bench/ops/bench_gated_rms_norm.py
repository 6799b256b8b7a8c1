"""gated_rms_norm: the value heads of a GDN layer on one of four GPUs, and on one alone."""

from sm70kernels import gated_rms_norm
from sm70kernels.bench import Cases, benchmark

CASES = Cases(
    gated_rms_norm,
    rows=(1, 5, 40, 64),
    sizes=dict(tp4=dict(HV=12), tp1=dict(HV=48)),
    given=dict(activation="sigmoid"),
)
test_gated_rms_norm = benchmark(CASES)

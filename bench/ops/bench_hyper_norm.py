"""hyper_norm: the four streams before every mix."""

from sm70kernels import hyper_norm
from sm70kernels.bench import Cases, benchmark

CASES = Cases(hyper_norm, rows=(1, 5, 40, 64), sizes=dict(streams=dict(S=4)))
test_hyper_norm = benchmark(CASES)

"""hyper_mean: the four streams to one, before the output head."""

from sm70kernels import hyper_mean
from sm70kernels.bench import Cases, benchmark

CASES = Cases(hyper_mean, rows=(1, 5, 40, 64), sizes=dict(streams=dict(S=4)))
test_hyper_mean = benchmark(CASES)

"""hyper_inject: a block's output into the four streams, with the norm of the next mix and without."""

from sm70kernels import hyper_inject
from sm70kernels.bench import Cases, benchmark

WITH = Cases(hyper_inject, rows=(1, 5, 40, 64), sizes=dict(norm=dict(S=4)))
WITHOUT = Cases(
    hyper_inject,
    rows=(1, 5, 40, 64),
    sizes=dict(alone=dict(S=4)),
    given=dict(weight=None),
    # The streams are read and written, the output and its gates are read.
    bytes=lambda d: d["M"] * (2 * 2 * d["S"] * d["E"] + 2 * d["E"] + 4 * d["S"]),
)
test_with_norm = benchmark(WITH)
test_without_norm = benchmark(WITHOUT)

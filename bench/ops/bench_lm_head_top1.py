"""lm_head_top1: the best token of a quarter of the vocabulary, and of all of it."""

from sm70kernels import inputs, lm_head_top1
from sm70kernels.bench import Cases, benchmark

CASES = Cases(
    lm_head_top1,
    rows=(1, 5, 40),
    sizes=dict(tp4=dict(V=62080), tp1=dict(V=248320)),
    given=dict(vocab_start=0, valid=inputs.integers("V", "V")),
)
test_lm_head_top1 = benchmark(CASES)

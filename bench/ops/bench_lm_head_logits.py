"""lm_head_logits: a quarter of the vocabulary, and all of it."""

from sm70kernels import lm_head_logits
from sm70kernels.bench import Cases, benchmark

CASES = Cases(lm_head_logits, rows=(1, 5, 40), sizes=dict(tp4=dict(V=62080), tp1=dict(V=248320)))
test_lm_head_logits = benchmark(CASES)

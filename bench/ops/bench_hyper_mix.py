"""hyper_mix: the mix before a block, with the gates of its injection, and the final one without."""

from sm70kernels import hyper_mix
from sm70kernels.bench import Cases, benchmark

CASES = Cases(
    hyper_mix,
    rows=(1, 5, 40, 64),
    sizes=dict(block=dict(G=4), final=dict(G=0)),
    given=dict(kind="decode"),
)
test_hyper_mix = benchmark(CASES)

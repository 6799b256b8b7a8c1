"""rms_norm: rows of the hidden size, and of all four streams at once."""

from sm70kernels import rms_norm
from sm70kernels.bench import Cases, benchmark

CASES = Cases(
    rms_norm,
    rows=(1, 5, 40, 64),
    sizes=dict(hidden=dict(E=2560), streams=dict(E=10240)),
    given=dict(unit_offset=True, eps=1e-6),
)
test_rms_norm = benchmark(CASES)

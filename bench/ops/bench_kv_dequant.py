"""kv_dequant: scattered rows of the cache as f16, for a handful and for a prefill's worth, in each storage."""

from sm70kernels import kv_dequant
from sm70kernels.bench import Cases, benchmark

SIZE = dict(HK=1, B=64, P=64)
ROWS = (5, 4096)
F16 = Cases(kv_dequant, ROWS, dict(f16=SIZE))
# One byte an element is read and f16 written; i8 has a float scale a head.
U8 = Cases(kv_dequant, ROWS, dict(u8=SIZE), storage="u8", bytes=lambda d: d["M"] * (8 + 6 * d["HK"] * d["D"]))
I8 = Cases(kv_dequant, ROWS, dict(i8=SIZE), storage="i8", bytes=lambda d: d["M"] * (8 + d["HK"] * (6 * d["D"] + 8)))
test_f16, test_u8, test_i8 = benchmark(F16), benchmark(U8), benchmark(I8)

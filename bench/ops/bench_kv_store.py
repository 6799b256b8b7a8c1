"""kv_store: new rows into the cache, one K/V head a GPU as with four of them, in each of its storages."""

from sm70kernels import kv_store
from sm70kernels.bench import Cases, benchmark

SIZE = dict(HK=1, B=16, P=64)
ROWS = (1, 5, 40)
F16 = Cases(kv_store, ROWS, dict(f16=SIZE))
# Rows are read as f16 and written as one byte an element; i8 has a float scale a head.
U8 = Cases(kv_store, ROWS, dict(u8=SIZE), storage="u8", bytes=lambda d: d["M"] * (8 + 6 * d["HK"] * d["D"]))
I8 = Cases(kv_store, ROWS, dict(i8=SIZE), storage="i8", bytes=lambda d: d["M"] * (8 + d["HK"] * (6 * d["D"] + 8)))
test_f16, test_u8, test_i8 = benchmark(F16), benchmark(U8), benchmark(I8)

"""moe_route: ten of 512 experts."""

from sm70kernels import moe_route
from sm70kernels.bench import Cases, benchmark

CASES = Cases(moe_route, rows=(1, 5, 40, 64), sizes=dict(experts=dict(X=512, K=10)))
test_moe_route = benchmark(CASES)

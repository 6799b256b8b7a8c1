"""The same cases under pytest-benchmark: `pytest bench/ops/bench_<op>.py` on a machine with a GPU."""

from collections.abc import Callable
from functools import cache
from typing import Any

from sm70kernels.bench.cases import Cases


def benchmark(*declared: Cases) -> Callable[..., None]:
    """Return a test of every case, marked gpu, that lets pytest-benchmark time the captured graph. Needs the extra `test`."""
    import pytest  # here, because building images needs this package and no tests
    import torch

    from sm70kernels.bench.timing import Stopwatch

    each = [case for cases in declared for case in cases.each()]

    @pytest.mark.gpu
    @pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
    @pytest.mark.parametrize("case", each, ids=[case.name for case in each])
    def timed(benchmark: Any, case: Any) -> None:
        prepared = Stopwatch(_device()).prepare(case)
        benchmark.pedantic(prepared.replay, rounds=25, warmup_rounds=3)
        benchmark.extra_info.update(calls=prepared.copies, bytes=case.bytes, flops=case.flops)

    test: Callable[..., None] = timed
    return test


@cache
def _device() -> Any:
    from sm70kernels.bench.timing import Cuda

    return Cuda()

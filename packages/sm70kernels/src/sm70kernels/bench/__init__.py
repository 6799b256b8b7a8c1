"""Times ops on a GPU; where there is none, says what they do and what that would cost.

    from sm70kernels.bench import Cases, benchmark     what a file of the repository's bench/ops declares
"""

from sm70kernels.bench.cases import Case, Cases, NoCases
from sm70kernels.bench.collect import benchmark

__all__ = ["Case", "Cases", "NoCases", "benchmark"]

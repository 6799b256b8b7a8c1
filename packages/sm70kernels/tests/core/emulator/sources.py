"""CUDA C++ sources of the tests, compiled once each, and where in them a fault is expected."""

import functools

from sm70kernels.cuda import compile_source

FILE = "probe.cu"


@functools.cache
def compile_cuda(source: str) -> str:
    """PTX of `source`; its lines carry the file name probe.cu and count from 1."""
    return compile_source(source, name=FILE).ptx


def lines_of(source: str) -> list[str]:
    """The lines of `source` marked `// here`, as faults and counters name them."""
    return [f"{FILE}:{number}" for number, text in enumerate(source.split("\n"), 1) if "// here" in text]


def line_of(source: str) -> str:
    """The only line marked `// here`."""
    (line,) = lines_of(source)
    return line

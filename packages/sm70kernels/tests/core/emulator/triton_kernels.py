"""Two Triton kernels, and the PTX that triton 3.6.0 makes of them for compute capability 7.0, which tests read from foreign/.

    python triton_kernels.py          needs triton, no GPU; rewrites foreign/*.ptx

The PTX is kept because the tests' environment has no triton: a CUDA build of torch brings one of its own.
"""

import re
from pathlib import Path

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

FOLDER = Path(__file__).parent / "foreign"
WARPS = 4


@triton.jit
def softmax_rows(x, y, columns, stride, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, WIDTH)
    inside = at < columns
    v = tl.load(x + row * stride + at, mask=inside, other=-float("inf")).to(tl.float32)
    e = tl.exp(v - tl.max(v, axis=0))
    tl.store(y + row * stride + at, e / tl.sum(e, axis=0), mask=inside)


@triton.jit
def layer_norm(x, weight, y, columns, epsilon, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0)
    at = tl.arange(0, WIDTH)
    inside = at < columns
    v = tl.load(x + row * columns + at, mask=inside, other=0).to(tl.float32)
    mean = tl.sum(v, axis=0) / columns
    centred = tl.where(inside, v - mean, 0)
    scale = 1 / tl.sqrt(tl.sum(centred * centred, axis=0) / columns + epsilon)
    w = tl.load(weight + at, mask=inside, other=0)
    tl.store(y + row * columns + at, (centred * scale * w).to(tl.float16), mask=inside)


SIGNATURES = {
    softmax_rows: {"x": "*fp16", "y": "*fp32", "columns": "i32", "stride": "i32", "WIDTH": "constexpr"},
    layer_norm: {"x": "*fp16", "weight": "*fp32", "y": "*fp16", "columns": "i32", "epsilon": "fp32", "WIDTH": "constexpr"},
}

WIDTHS = {softmax_rows: 1024, layer_norm: 512}


def main() -> None:
    """Compile each kernel and write its PTX, with the dynamic shared memory it wants in a first comment."""
    FOLDER.mkdir(exist_ok=True)
    for function, width in WIDTHS.items():
        source = ASTSource(function, SIGNATURES[function], constexprs={"WIDTH": width})
        kernel = triton.compile(source, target=GPUTarget("cuda", 70, 32), options={"num_warps": WARPS})
        name = function.fn.__name__
        code = kernel.asm["ptx"].partition("\t.section")[0]  # the rest is for debuggers
        code = re.sub(r'(\.file\s+\d+\s+")[^"]*/', r"\1", code)
        (FOLDER / f"{name}.ptx").write_text(f"// shared {kernel.metadata.shared}\n{code}", encoding="utf-8")


if __name__ == "__main__":
    main()

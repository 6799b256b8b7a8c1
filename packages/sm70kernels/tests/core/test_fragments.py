"""include/mma.cuh: which lane holds which element, and that the tensor instruction agrees, for every pair of layouts.

Small integers make every sum exact, so a misplaced element shows as a wrong number.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import sm70kernels
from sm70kernels.cuda import Image, compile_source
from sm70kernels.emulator import emulate

INCLUDE = Path(sm70kernels.__file__).parent / "include"

PRODUCTS = """
#include <cuda_fp16.h>
#include "mma.cuh"
// Quad-pair q multiplies a[q] [8, 4] by b[q] [4, 8].
extern "C" __global__ void products(const __half* a, const __half* b, float* c) {
    const int lane = threadIdx.x, q = quad_pair(lane);
    __half as[4], bs[4];
    float sum[8];
    for (int i = 0; i < 4; ++i) as[i] = a[q * 32 + a_row<Layout::A>(lane, i) * 4 + a_k<Layout::A>(lane, i)];
    for (int i = 0; i < 4; ++i) bs[i] = b[q * 32 + b_k<Layout::B>(lane, i) * 8 + b_column<Layout::B>(lane, i)];
    for (int i = 0; i < 8; ++i) sum[i] = c[q * 64 + c_row(lane, i) * 8 + c_column(lane, i)];
    const unsigned* aw = reinterpret_cast<unsigned*>(as);
    const unsigned* bw = reinterpret_cast<unsigned*>(bs);
    mma_884<Layout::A, Layout::B>(sum, aw[0], aw[1], bw[0], bw[1]);
    for (int i = 0; i < 8; ++i) c[q * 64 + c_row(lane, i) * 8 + c_column(lane, i)] = sum[i];
}
"""

ALONG_N = """
#include <cuda_fp16.h>
#include "mma.cuh"
// y [8, 32] += x [8, 4] w [32, 4]^T: the four quad-pairs stand side by side along the columns of y.
extern "C" __global__ void products(const __half* x, const __half* w, float* y) {
    const int lane = threadIdx.x;
    const uint2 a = *reinterpret_cast<const uint2*>(x + 4 * fragment_outer(lane));
    const uint2 b = *reinterpret_cast<const uint2*>(w + 4 * qpn_column(lane));
    float sum[8];
    for (int i = 0; i < 8; ++i) sum[i] = y[c_row(lane, i) * 32 + qpn_c_column(lane, i)];
    mma_884(sum, a.x, a.y, b.x, b.y);
    for (int i = 0; i < 8; ++i) y[c_row(lane, i) * 32 + qpn_c_column(lane, i)] = sum[i];
}
"""

Run = Callable[[Image, tuple[Tensor, ...]], None]


def _emulated(image: Image, tensors: tuple[Tensor, ...]) -> None:
    emulate(image.ptx, "products", 1, 32, *tensors)


def _launched(image: Image, tensors: tuple[Tensor, ...]) -> None:
    from sm70kernels.driver import load

    on_device = tuple(tensor.cuda() for tensor in tensors)
    load(image, "products", 0).launch(1, 32, on_device)
    for tensor, result in zip(tensors, on_device, strict=True):
        tensor.copy_(result)


def _without_a_device() -> bool:
    return not torch.cuda.is_available()


@pytest.fixture(
    params=[
        pytest.param(_emulated, id="emulator"),
        pytest.param(_launched, id="gpu", marks=[pytest.mark.gpu, pytest.mark.skipif(_without_a_device(), reason="needs a CUDA device")]),
    ]
)
def run(request: pytest.FixtureRequest) -> Run:
    chosen: Run = request.param
    return chosen


def compiled(source: str, **defines: Any) -> Image:
    return compile_source(source, defines, headers={path.name: path.read_text() for path in INCLUDE.glob("*.cuh")})


def integers(seed: int, *shape: int) -> Tensor:
    return torch.from_numpy(np.random.default_rng(seed).integers(-8, 9, shape).astype(np.float32))


@pytest.mark.parametrize("a_layout", ["kRow", "kCol"])
@pytest.mark.parametrize("b_layout", ["kRow", "kCol"])
def test_every_pair_of_layouts_multiplies_as_the_maps_say(run: Run, a_layout: str, b_layout: str) -> None:
    image = compiled(PRODUCTS, A=a_layout, B=b_layout)
    for seed in range(4):
        a, b, c = integers(seed, 4, 8, 4), integers(seed + 10, 4, 4, 8), integers(seed + 20, 4, 8, 8)
        got = c.clone()
        run(image, (a.half(), b.half(), got))
        for q in range(4):
            for m in range(8):
                for n in range(8):
                    expected = c[q, m, n] + sum(a[q, m, k] * b[q, k, n] for k in range(4))
                    assert got[q, m, n] == expected, (q, m, n)


def test_four_quad_pairs_side_by_side_cover_32_columns(run: Run) -> None:
    image = compiled(ALONG_N)
    for seed in range(4):
        x, w, y = integers(seed, 8, 4), integers(seed + 10, 32, 4), integers(seed + 20, 8, 32)
        got = y.clone()
        run(image, (x.half(), w.half(), got))
        for m in range(8):
            for n in range(32):
                assert got[m, n] == y[m, n] + sum(x[m, k] * w[n, k] for k in range(4)), (m, n)

"""Random order of warps and branches: race-free kernels keep their bits, order-dependent ones show it, a seed repeats itself."""

import numpy as np
import pytest

from sm70kernels.emulator import emulate

from .sources import compile_cuda

SEEDS = range(10)

RACE_FREE = {
    "a block sum through shared memory and shuffles": """extern "C" __global__ void probe(const float* x, float* y) {
        __shared__ float part[8];
        int t = threadIdx.x, w = t / 32;
        float v = x[blockIdx.x * 256 + t];
        for (int d = 16; d; d /= 2) v += __shfl_xor_sync(~0u, v, d);
        if (t % 32 == 0) part[w] = v;
        __syncthreads();
        if (w == 0) {
            v = t < 8 ? part[t] : 0;
            for (int d = 4; d; d /= 2) v += __shfl_down_sync(~0u, v, d);
        }
        __syncthreads();
        if (t == 0) part[0] = v;
        __syncthreads();
        y[blockIdx.x * 256 + t] = x[blockIdx.x * 256 + t] / part[0];
    }""",
    "a transpose with divergent lanes": """extern "C" __global__ void probe(const float* x, float* y) {
        __shared__ float tile[16][17];
        int t = threadIdx.x, r = t / 16, c = t % 16;
        float v = x[blockIdx.x * 256 + t];
        if (c % 3 == 0) v = v * 2; else if (c % 3 == 1) for (int i = 0; i < r; ++i) v += 0.1f; else v = -v;
        tile[r][c] = v;
        __syncthreads();
        y[blockIdx.x * 256 + t] = tile[c][r];
    }""",
    "integer atomics": """extern "C" __global__ void probe(const float* x, float* y) {
        __shared__ int bins[16];
        int t = threadIdx.x;
        if (t < 16) bins[t] = 0;
        __syncthreads();
        atomicAdd(bins + (int)(fabsf(x[blockIdx.x * 256 + t]) * 8) % 16, t);
        __syncthreads();
        y[blockIdx.x * 256 + t] = bins[t % 16];
    }""",
}


def run(source: str, order: int | None, check: bool = True) -> bytes:
    x = np.random.default_rng(1).standard_normal(1024).astype(np.float32)
    y = np.zeros(1024, np.float32)
    emulate(compile_cuda(source), "probe", 4, 256, x, y, order=order, check=check)
    return y.tobytes()


@pytest.mark.parametrize("name", RACE_FREE)
def test_race_free_kernels_give_the_same_bits_in_every_order(name: str) -> None:
    straight = run(RACE_FREE[name], None)
    assert any(straight)
    assert {run(RACE_FREE[name], seed) for seed in SEEDS} == {straight}


ORDERED = {
    "the last of several stores": """extern "C" __global__ void probe(const float* x, float* y) {
        if (threadIdx.x % 32 == 0) *(volatile float*)y = threadIdx.x;
    }""",
    "a missing barrier": """extern "C" __global__ void probe(const float* x, float* y) {
        __shared__ float tile[256];
        tile[threadIdx.x] = 0;
        __syncthreads();
        tile[threadIdx.x] = x[threadIdx.x];
        y[blockIdx.x * 256 + threadIdx.x] = tile[(threadIdx.x + 64) % 256];
    }""",
    "a float sum by atomics": """extern "C" __global__ void probe(const float* x, float* y) {
        if (threadIdx.x % 32 == 0) atomicAdd(y, x[blockIdx.x * 256 + threadIdx.x] * 1e-3f + 1e3f * (threadIdx.x == 96));
    }""",
    "the branch of a warp that comes first": """extern "C" __global__ void probe(const float* x, float* y) {
        volatile float* at = y + blockIdx.x;
        if (threadIdx.x == 0) *at = 1;
        else if (threadIdx.x == 1) *at = 2;
    }""",
}


@pytest.mark.parametrize("name", ORDERED)
def test_an_order_dependent_kernel_gives_different_bits_for_some_seed(name: str) -> None:
    assert len({run(ORDERED[name], seed, check=False) for seed in SEEDS}) > 1


@pytest.mark.parametrize("name", ORDERED)
def test_a_seed_repeats_itself(name: str) -> None:
    for seed in (3, 4):
        assert run(ORDERED[name], seed, check=False) == run(ORDERED[name], seed, check=False)
    assert run(ORDERED[name], None, check=False) == run(ORDERED[name], None, check=False)


def test_barriers_hold_in_every_order() -> None:
    """Twenty rounds of neighbour exchange over one buffer, with two barriers a round, by eight warps."""
    source = """extern "C" __global__ void probe(const float* x, float* y) {
        __shared__ float tile[256];
        int t = threadIdx.x;
        float v = x[blockIdx.x * 256 + t];
        for (int i = 0; i < 20; ++i) {
            tile[t] = v;
            __syncthreads();
            v = 0.5f * v + 0.5f * tile[(t + 97) % 256];
            __syncthreads();
        }
        y[blockIdx.x * 256 + t] = v;
    }"""
    value = np.random.default_rng(1).standard_normal(1024).astype(np.float32).reshape(4, 256)
    for _ in range(20):
        value = np.float32(0.5) * value + np.float32(0.5) * np.roll(value, -97, 1)
    for seed in (None, 1, 2, 3):
        got = np.frombuffer(run(source, seed), np.float32).reshape(4, 256)
        assert np.allclose(got, value, rtol=1e-6, atol=1e-6)

// lm_head_top1: logits as in lm_head_logits, of which each block keeps the best one of every row as a key; a second kernel takes the best key.
//
// Keys order as the op does: (logit descending, row of w ascending), 0 for no candidate. Their maximum does not depend on any order.
#include "skinny.cuh"

using Key = unsigned long long;

// The bits of a float in an order that unsigned integers have; -0 counts as +0.
__device__ __forceinline__ unsigned ordered(float value) {
    const unsigned bits = __float_as_uint(value == 0.0f ? 0.0f : value);
    return bits >> 31 ? ~bits : bits | 0x80000000u;
}

__device__ __forceinline__ float unordered(unsigned bits) {
    return __uint_as_float(bits >> 31 ? bits & 0x7fffffffu : ~bits);
}

__device__ __forceinline__ Key key_of(float logit, int row) {
    return isnan(logit) ? 0 : static_cast<Key>(ordered(logit)) << 32 | ~static_cast<unsigned>(row);
}

__device__ __forceinline__ Key better(Key a, Key b) { return a > b ? a : b; }

#ifdef COLUMNS  // the second kernel has no sizes: one image serves all
extern "C" __global__ void __launch_bounds__(32 * GROUPS, 2)
best_of_columns(const __half* __restrict__ x, int rows, const __half* __restrict__ w, int valid, int parts, Key* __restrict__ best) {
    const int lane = threadIdx.x % 32, group = threadIdx.x / 32;
    const int m0 = blockIdx.x * ROWS, n0 = (blockIdx.y * GROUPS + group) * COLUMNS;
    const __half* row[ROWS];
    const __half* column[COLUMNS];
    point<ROWS>(row, x, m0, rows, K);
    point<COLUMNS>(column, w, n0, valid, K);
    const float logit = dot<ROWS, COLUMNS, K, 1>(row, column, 0, lane);

    using Mine = Own<ROWS, COLUMNS>;
    __shared__ Key mine[GROUPS][ROWS];
    const int n = n0 + Mine::at(lane) % COLUMNS;
    Key key = n < valid ? key_of(logit, n) : 0;
#pragma unroll
    for (int step = Mine::kLanes; step < Mine::kLanes * COLUMNS; step <<= 1) key = better(key, __shfl_xor_sync(0xffffffffu, key, step));
    if (lane % (Mine::kLanes * COLUMNS) == 0) mine[group][Mine::at(lane) / COLUMNS] = key;
    __syncthreads();
    if (threadIdx.x < ROWS && m0 + threadIdx.x < rows) {
        key = mine[0][threadIdx.x];
#pragma unroll
        for (int g = 1; g < GROUPS; ++g) key = better(key, mine[g][threadIdx.x]);
        best[static_cast<long long>(m0 + threadIdx.x) * parts + blockIdx.y] = key;
    }
}
#else
extern "C" __global__ void __launch_bounds__(256)
best_of_parts(const Key* __restrict__ best, int parts, int count, int vocab_start, float* __restrict__ value, int* __restrict__ index) {
    const int warp = threadIdx.x / 32;
    Key key = 0;
#pragma unroll 1  // 8 rounds for a whole vocabulary
    for (int part = threadIdx.x; part < count; part += 256) key = better(key, best[static_cast<long long>(blockIdx.x) * parts + part]);
#pragma unroll
    for (int step = 16; step; step >>= 1) key = better(key, __shfl_down_sync(0xffffffffu, key, step));
    __shared__ Key keys[8];
    if (threadIdx.x % 32 == 0) keys[warp] = key;
    __syncthreads();
    if (threadIdx.x) return;
#pragma unroll
    for (int other = 1; other < 8; ++other) key = better(key, keys[other]);
    value[blockIdx.x] = key ? unordered(key >> 32) : __int_as_float(0x7fc00000);
    index[blockIdx.x] = vocab_start + (key ? static_cast<int>(~static_cast<unsigned>(key)) : 0);
}
#endif

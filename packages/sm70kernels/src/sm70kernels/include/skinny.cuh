// y[m, n] = sum over k of x[m, k] * w[n, k] for few rows: weights stream once from HBM, rows come from the L1 cache.
//
// A warp owns COLUMNS consecutive rows of w (columns of y) and one of WARPS_K contiguous shares of K. Within its share a lane takes 8
// consecutive k of every 256, so a warp reads 512 contiguous bytes of each weight row at a time. Every sum is one chain of fused
// multiply-adds per lane in ascending k, then a butterfly over the lanes, then the shares in ascending order. That order depends on K,
// COLUMNS and WARPS_K alone: a row's bits are the same whatever ROWS the block takes and wherever the row stands. All of it is IEEE
// arithmetic, so the bits are the same on every GPU too.
#pragma once
#include "reduce.cuh"
#include "vector.cuh"

// Points at kCount rows of a matrix with `stride` elements a row, from `first` on. Those beyond the last of `count` rows point at the last:
// their sums are computed, because a warp works as a whole, and not stored.
template <int kCount>
__device__ __forceinline__ void point(const __half* (&at)[kCount], const __half* matrix, int first, int count, long long stride) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) at[i] = matrix + min(first + i, count - 1) * stride;
}

// Adds the products of one lane's 8 k at offset k to its sums, row by row.
template <int kRows, int kColumns>
__device__ __forceinline__ void multiply8(
    float (&sums)[kRows * kColumns], const __half* const (&row)[kRows], const Half8 (&weights)[kColumns], int k) {
    float w[kColumns][8];
#pragma unroll
    for (int c = 0; c < kColumns; ++c) widen(weights[c], w[c]);
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
        float x[8];
        widen(load8(row[r] + k), x);
#pragma unroll
        for (int c = 0; c < kColumns; ++c)
#pragma unroll
            for (int i = 0; i < 8; ++i) sums[r * kColumns + c] = fmaf(x[i], w[c][i], sums[r * kColumns + c]);
    }
}

// One of the kRows * kColumns sums (a power of two, at most 32) over this warp's share of kDepth: the one of row and column at(lane).
template <int kRows, int kColumns>
struct Own {
    static constexpr int kSums = kRows * kColumns, kLanes = 32 / kSums;
    __device__ __forceinline__ static int at(int lane) { return lane / kLanes; }
    __device__ __forceinline__ static bool first(int lane) { return lane % kLanes == 0; }  // of the lanes that hold the same sum
};

template <int kRows, int kColumns, int kDepth, int kShares>
__device__ __forceinline__ float dot(const __half* const (&row)[kRows], const __half* const (&column)[kColumns], int share, int lane) {
    constexpr int kStep = 256, kSteps = (kDepth + kStep - 1) / kStep;
    const int first = share * kSteps / kShares, last = (share + 1) * kSteps / kShares;
    float sums[kRows * kColumns] = {};
    int k = first * kStep + lane * 8;
#pragma unroll(kRows > 4 ? 1 : 2)  // 8 rows fill the registers
    for (int step = first; step < last; ++step, k += kStep) {
        if (kDepth % kStep && k >= kDepth) break;  // only the last step of a depth that is not a multiple of 256
        Half8 weights[kColumns];
#pragma unroll
        for (int c = 0; c < kColumns; ++c) weights[c] = load8(column[c] + k);
        multiply8<kRows, kColumns>(sums, row, weights, k);
    }
    return scatter_sums<kRows * kColumns>(sums, lane);
}

// One block of kGroups * kShares warps: the sums of kRows rows of x from m0 on and kGroups * kColumns rows of w from block's first on, each
// handed to store(m, n, sum) by one thread, consecutive n by consecutive threads. The shares of a sum are added in ascending order.
template <int kRows, int kColumns, int kDepth, int kShares, int kGroups, class Store>
__device__ __forceinline__ void multiply_block(
    const __half* x, long long x_stride, int rows, const __half* w, int columns, int m0, int block, const Store& store) {
    constexpr int kWide = kGroups * kColumns;
    const int lane = threadIdx.x % 32, group = threadIdx.x / 32 / kShares, share = threadIdx.x / 32 % kShares;
    const __half* row[kRows];
    const __half* column[kColumns];
    point<kRows>(row, x, m0, rows, x_stride);
    point<kColumns>(column, w, block * kWide + group * kColumns, columns, kDepth);
    const float mine = dot<kRows, kColumns, kDepth, kShares>(row, column, share, lane);

    using Mine = Own<kRows, kColumns>;
    __shared__ float shares[kShares][kRows][kWide];
    if (Mine::first(lane)) shares[share][Mine::at(lane) / kColumns][group * kColumns + Mine::at(lane) % kColumns] = mine;
    __syncthreads();
    for (int i = threadIdx.x; i < kRows * kWide; i += blockDim.x) {
        const int r = i / kWide, c = i % kWide, m = m0 + r, n = block * kWide + c;
        if (m >= rows || n >= columns) continue;
        float sum = shares[0][r][c];
#pragma unroll
        for (int part = 1; part < kShares; ++part) sum += shares[part][r][c];
        store(m, n, sum);
    }
}

// qpn_linear: a block computes WARPS_N tiles of 32 columns for ROW_BLOCKS blocks of 8 rows; WARPS_K warps share the k of each tile and their
// sums are added in ascending order. Which warp takes which k depends on K and WARPS_K only, so a row's bits do not depend on M.
#include <cuda_fp16.h>

#include "qpn.cuh"

constexpr int kThreads = 32 * WARPS_K * WARPS_N;

extern "C" __global__ void __launch_bounds__(kThreads, BLOCKS)
qpn_linear(const __half* __restrict__ x,            // [M, K], rows x_stride apart
           const unsigned char* __restrict__ bank,  // FORMAT [N, K]
           __half* __restrict__ out,                // [M, N], written here
           int m, long long x_stride) {
    using Bank = FORMAT<N, K, PHASE>;
    constexpr int kSteps = Bank::Size::kSteps, kRows = 8 * ROW_BLOCKS;
    __shared__ uint4 stages[WARPS_N][WARPS_K][ROW_BLOCKS * kStagePieces];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, slice = warp % WARPS_K;
    const int tile = blockIdx.x * WARPS_N + warp / WARPS_K, first_row = blockIdx.y * kRows;
    if (tile < Bank::Size::kTiles) {
        const __half* rows[ROW_BLOCKS];
        float sum[ROW_BLOCKS][8];
#pragma unroll
        for (int r = 0; r < ROW_BLOCKS; ++r) {
            const int row = first_row + 8 * r + lane / 4;
            rows[r] = row < m ? x + row * x_stride : nullptr;
#pragma unroll
            for (int i = 0; i < 8; ++i) sum[r][i] = 0.0f;
        }
        Bank weights(bank, tile, lane);
        uint4* stage = stages[warp / WARPS_K][slice];
        multiply_tile<ROW_BLOCKS, DEPTH>(weights, rows, kSteps * slice / WARPS_K, kSteps * (slice + 1) / WARPS_K, stage, sum);
        store_sums(sum, stage);
    }
    __syncthreads();
    for (int at = threadIdx.x; at < WARPS_N * kRows * kTile; at += kThreads) {
        const int local = at / (kRows * kTile), row = at / kTile % kRows, column = at % kTile;
        const int n = (blockIdx.x * WARPS_N + local) * kTile + column;
        if (first_row + row >= m || n >= N) continue;
        const int place = row / 8 * 256 + summed(row % 8, column);
        float total = reinterpret_cast<const float*>(stages[local][0])[place];
#pragma unroll
        for (int other = 1; other < WARPS_K; ++other) total += reinterpret_cast<const float*>(stages[local][other])[place];
        out[static_cast<long long>(first_row + row) * N + n] = __float2half_rn(Bank::scaled(total, bank, n));
    }
}

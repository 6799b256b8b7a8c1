// lm_head_logits: as linear_skinny with one warp a column and float32 results.
#include "skinny.cuh"

extern "C" __global__ void __launch_bounds__(32 * WARPS_K * GROUPS, 2)
lm_head_logits(const __half* __restrict__ x, int rows, const __half* __restrict__ w, int columns, float* __restrict__ logits) {
    multiply_block<ROWS, COLUMNS, K, WARPS_K, GROUPS>(
        x, K, rows, w, columns, blockIdx.x * ROWS, blockIdx.y,
        [&](int m, int n, float sum) { logits[static_cast<long long>(m) * columns + n] = sum; });
}

// linear_skinny: a block takes ROWS rows of x and GROUPS * COLUMNS columns of y, see include/skinny.cuh.
// Blocks that share columns are neighbours in x, so they run together and all but the first find the weights in L2.
#include "skinny.cuh"

extern "C" __global__ void __launch_bounds__(32 * WARPS_K * GROUPS, 2)
linear_skinny(const __half* __restrict__ x, long long x_stride, int rows, const __half* __restrict__ w, int columns, __half* __restrict__ out) {
    multiply_block<ROWS, COLUMNS, K, WARPS_K, GROUPS>(
        x, x_stride, rows, w, columns, blockIdx.x * ROWS, blockIdx.y,
        [&](int m, int n, float sum) { out[static_cast<long long>(m) * columns + n] = __float2half_rn(sum); });
}

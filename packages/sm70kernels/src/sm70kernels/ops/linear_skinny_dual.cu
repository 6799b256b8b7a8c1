// linear_skinny_dual: the first `blocks` blocks of y's columns, then those of y2's; each is a block of linear_skinny.
#include "skinny.cuh"

extern "C" __global__ void __launch_bounds__(256, 2)
linear_skinny_dual(const __half* __restrict__ x, long long x_stride, int rows, const __half* __restrict__ w, int columns,
                   __half* __restrict__ out, long long out_stride, int blocks, const __half* __restrict__ w2, int columns2,
                   __half* __restrict__ out2, long long out2_stride) {
    const int m0 = blockIdx.x * ROWS, block = blockIdx.y;
    if (block < blocks)
        multiply_block<ROWS, COLUMNS, K, WARPS_K, 8 / WARPS_K>(
            x, x_stride, rows, w, columns, m0, block, [&](int m, int n, float sum) { out[m * out_stride + n] = __float2half_rn(sum); });
    else
        multiply_block<ROWS, COLUMNS, K, WARPS_K2, 8 / WARPS_K2>(
            x, x_stride, rows, w2, columns2, m0, block - blocks,
            [&](int m, int n, float sum) { out2[m * out2_stride + n] = __float2half_rn(sum); });
}

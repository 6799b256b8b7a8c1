// hyper_mix in two kernels: the normed streams down to the low-rank rows and the gates, then up again and mixed.
//
// The sums are those of include/skinny.cuh. In the second kernel a warp's COLUMNS are the S streams of one hidden unit, so the mix over
// streams closes in the warp.
#include "skinny.cuh"

__device__ __forceinline__ float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }
__device__ __forceinline__ float rounded(float x) { return __half2float(__float2half_rn(x)); }

#ifdef DOWN
extern "C" __global__ void __launch_bounds__(32 * WARPS_K * GROUPS, 2)
hyper_mix_down(const __half* __restrict__ n, int rows, const __half* __restrict__ w_in, int gates, __half* __restrict__ low,
               float* __restrict__ gate) {
    multiply_block<ROWS, COLUMNS, S * E, WARPS_K, GROUPS>(
        n, S * E, rows, w_in, R + gates, blockIdx.x * ROWS, blockIdx.y, [&](int m, int c, float sum) {
            const float l = rounded(sum) / S;
            if (c < R)
                low[static_cast<long long>(m) * R + c] = __float2half_rn(l * sigmoid(l));
            else
                gate[static_cast<long long>(m) * gates + c - R] = 2.0f * sigmoid(l);
        });
}
#else
extern "C" __global__ void __launch_bounds__(32 * GROUPS, 2)
hyper_mix_up(const __half* __restrict__ low, int rows, const __half* __restrict__ w_up, const __half* __restrict__ n, __half* __restrict__ x) {
    const int lane = threadIdx.x % 32, e = blockIdx.y * GROUPS + threadIdx.x / 32, m0 = blockIdx.x * ROWS;
    const int unit = min(e, E - 1);
    const __half* row[ROWS];
    const __half* column[S];
    point<ROWS>(row, low, m0, rows, R);
#pragma unroll
    for (int s = 0; s < S; ++s) column[s] = w_up + (static_cast<long long>(s) * E + unit) * R;
    const float up = dot<ROWS, S, R, 1>(row, column, 0, lane);

    // A lane mixes in the stream whose sum it holds; the first lane of a row adds the streams up, ascending.
    using Mine = Own<ROWS, S>;
    const int m = min(m0 + Mine::at(lane) / S, rows - 1), s = Mine::at(lane) % S;
    const float part = sigmoid(rounded(up)) * __half2float(n[(static_cast<long long>(m) * S + s) * E + unit]);
    float sum = part;
#pragma unroll
    for (int stream = 1; stream < S; ++stream) sum += __shfl_down_sync(0xffffffffu, part, stream * Mine::kLanes);
    if (lane % (Mine::kLanes * S) == 0 && m0 + Mine::at(lane) / S < rows && e < E) x[static_cast<long long>(m) * E + e] = __float2half_rn(sum / S);
}
#endif

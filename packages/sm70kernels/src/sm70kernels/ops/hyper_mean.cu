// hyper_mean: a thread averages 8 elements over the S streams of a row, added in ascending order.
#include "vector.cuh"

extern "C" __global__ void __launch_bounds__(THREADS, 2)
hyper_mean(const __half* __restrict__ h,  // [M,S,E]
           int vectors,                   // M * E / 8
           __half* __restrict__ mean) {   // [M,E], written
    const int vector = blockIdx.x * THREADS + threadIdx.x;
    if (vector >= vectors) return;
    const long long row = vector / (E / 8);
    const int e = vector % (E / 8) * 8;
    Half8 stream[S];
#pragma unroll
    for (int s = 0; s < S; ++s) stream[s] = load8(h + (row * S + s) * E + e);
    float sum[8] = {};
#pragma unroll
    for (int s = 0; s < S; ++s) {
        float value[8];
        widen(stream[s], value);
#pragma unroll
        for (int j = 0; j < 8; ++j) sum[j] += value[j];
    }
#pragma unroll
    for (int j = 0; j < 8; ++j) sum[j] /= S;
    store8(mean + row * E + e, narrow(sum));
}

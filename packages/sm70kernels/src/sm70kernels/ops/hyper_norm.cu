// hyper_norm: one block a stream of a row, E halves that are read once and kept in registers. hyper_inject repeats its arithmetic.
#include "row_norm.cuh"

extern "C" __global__ void __launch_bounds__(THREADS, 2)
hyper_norm(const __half* __restrict__ h,       // [M,S,E]
           const __half* __restrict__ weight,  // [S,E]
           float eps,
           __half* __restrict__ n) {           // [M,S,E], written
    const long long start = static_cast<long long>(blockIdx.x) * E;
    Row<E, THREADS> row, gain;
    row.load(h + start);
    gain.load(weight + blockIdx.x % S * E);
    float square[1] = {row.square()};
    block_sums<THREADS>(square);
    row.store_normed(n + start, gain, rms_scale<E>(square[0], eps), 1.0f);
}

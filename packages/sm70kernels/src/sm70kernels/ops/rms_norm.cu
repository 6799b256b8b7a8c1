// rms_norm: one block a row of E halves, read once and kept in registers. The order of the sum depends on E and THREADS only.
#include "row_norm.cuh"

extern "C" __global__ void __launch_bounds__(THREADS, 2)
rms_norm(const __half* __restrict__ x,       // [M,E]
         const __half* __restrict__ weight,  // [E]
         float eps, bool unit_offset,
         __half* __restrict__ out) {         // [M,E], written
    const long long start = static_cast<long long>(blockIdx.x) * E;
    Row<E, THREADS> row, gain;
    row.load(x + start);
    gain.load(weight);  // before the sum, so that both loads wait together
    float square[1] = {row.square()};
    block_sums<THREADS>(square);
    row.store_normed(out + start, gain, rms_scale<E>(square[0], eps), unit_offset ? 1.0f : 0.0f);
}

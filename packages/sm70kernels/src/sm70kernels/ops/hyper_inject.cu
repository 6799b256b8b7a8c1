// hyper_inject: one block takes STREAMS of the S residual streams of a row, so the block output o is read S / STREAMS times. Every thread
// updates the vectors it holds where they are, rounds once, and what is normed is the rounded state.
#include "row_norm.cuh"

using Stream = Row<E, THREADS>;

// h(state + gate * o), element by element, in place.
__device__ __forceinline__ void inject(Stream& state, const Stream& o, float gate) {
#pragma unroll
    for (int i = 0; i < Stream::kVectors; ++i) {
        float value[8], added[8];
        widen(state.vector[i], value);
        widen(o.vector[i], added);
#pragma unroll
        for (int j = 0; j < 8; ++j) value[j] = fmaf(gate, added[j], value[j]);
        state.vector[i] = narrow(value);
    }
}

// Updates the streams of this block in memory and returns them: stream s of row m at (m * S + s) * E.
__device__ __forceinline__ void update(__half* h, const __half* o, const float* gate, long long first, Stream (&state)[STREAMS]) {
    Stream block_output;
    block_output.load(o + first / S * E);
    float factor[STREAMS];
#pragma unroll
    for (int s = 0; s < STREAMS; ++s) {
        factor[s] = __ldg(gate + first + s);
#pragma unroll
        for (int i = 0; i < Stream::kVectors; ++i)
            state[s].vector[i] = Stream::holds(i) ? read8(h + (first + s) * E + Stream::offset(i)) : zero8();
    }
#pragma unroll
    for (int s = 0; s < STREAMS; ++s) {
        inject(state[s], block_output, factor[s]);
#pragma unroll
        for (int i = 0; i < Stream::kVectors; ++i)
            if (Stream::holds(i)) store8(h + (first + s) * E + Stream::offset(i), state[s].vector[i]);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 2)
hyper_inject(__half* __restrict__ h,              // [M,S,E], changed in place
             const __half* __restrict__ o,        // [M,E]
             const float* __restrict__ gate) {    // [M,S]
    Stream state[STREAMS];
    update(h, o, gate, static_cast<long long>(blockIdx.x) * STREAMS, state);
}

extern "C" __global__ void __launch_bounds__(THREADS, 2)
hyper_inject_norm(__half* __restrict__ h,             // [M,S,E], changed in place
                  const __half* __restrict__ o,       // [M,E]
                  const float* __restrict__ gate,     // [M,S]
                  const __half* __restrict__ weight,  // [S,E]
                  float eps,
                  __half* __restrict__ n) {           // [M,S,E], written
    const long long first = static_cast<long long>(blockIdx.x) * STREAMS;
    Stream state[STREAMS], gain[STREAMS];
#pragma unroll
    for (int s = 0; s < STREAMS; ++s) gain[s].load(weight + (first + s) % S * E);
    update(h, o, gate, first, state);
    float square[STREAMS];
#pragma unroll
    for (int s = 0; s < STREAMS; ++s) square[s] = state[s].square();
    block_sums<THREADS>(square);
#pragma unroll
    for (int s = 0; s < STREAMS; ++s) state[s].store_normed(n + (first + s) * E, gain[s], rms_scale<E>(square[s], eps), 1.0f);
}

// Root mean square norms of rows that a block holds in its registers: a row is read from memory once.
#pragma once
#include <cuda_fp16.h>

#include "reduce.cuh"
#include "vector.cuh"

// kSize halves spread over kThreads threads: vector i of a thread is the row's vector i * kThreads + threadIdx.x, so that the lanes of
// a warp are side by side in memory. Sums take a thread's vectors in order, then warps (block_sums): kSize and kThreads fix the bits.
template <int kSize, int kThreads>
struct Row {
    static_assert(kSize % 8 == 0, "rows are read 8 halves at a time");
    static_assert(kThreads % 32 == 0, "sums are over whole warps");
    static constexpr int kVectors = (kSize / 8 + kThreads - 1) / kThreads;

    Half8 vector[kVectors];  // +0 beyond the end of the row

    static __device__ __forceinline__ int offset(int i) { return (i * kThreads + static_cast<int>(threadIdx.x)) * 8; }
    static __device__ __forceinline__ bool holds(int i) { return kSize / 8 >= (i + 1) * kThreads || offset(i) < kSize; }

    // Reads a row that nobody writes during the kernel.
    __device__ __forceinline__ void load(const __half* from) {
#pragma unroll
        for (int i = 0; i < kVectors; ++i) vector[i] = holds(i) ? load8(from + offset(i)) : zero8();
    }

    // This thread's part of the sum of squares.
    __device__ __forceinline__ float square() const {
        float sum = 0.0f;
#pragma unroll
        for (int i = 0; i < kVectors; ++i) {
            float value[8];
            widen(vector[i], value);
#pragma unroll
            for (int j = 0; j < 8; ++j) sum = fmaf(value[j], value[j], sum);
        }
        return sum;
    }

    // Writes h(y * (unit + weight)) with y = row * scale; `scale` is rms_scale of the block's sum of squares and `unit` 0 or 1.
    __device__ __forceinline__ void store_normed(__half* to, const Row& weight, float scale, float unit) const {
#pragma unroll
        for (int i = 0; i < kVectors; ++i) {
            float value[8], gain[8];
            widen(vector[i], value);
            widen(weight.vector[i], gain);
#pragma unroll
            for (int j = 0; j < 8; ++j) {
                const float normed = value[j] * scale;
                value[j] = fmaf(normed, gain[j], normed * unit);  // where unit is the constant 1 the second product costs nothing
            }
            if (holds(i)) store8(to + offset(i), narrow(value));
        }
    }
};

// The factor that brings a row of kSize values to a mean square of 1, but for eps. The mean multiplies by the rounded 1 / kSize: a
// division would cost every thread some twenty instructions on the way to its store.
template <int kSize>
__device__ __forceinline__ float rms_scale(float square, float eps) {
    constexpr float kShare = 1.0f / kSize;
    return rsqrtf(fmaf(square, kShare, eps));
}

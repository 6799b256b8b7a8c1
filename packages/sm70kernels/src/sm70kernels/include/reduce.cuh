// Sums over a warp and over a block in an order that is fixed by the block's size: butterfly inside a warp, then warps ascending.
#pragma once

// Every lane returns the sum over its group of kLanes lanes, a power of two up to 32. All 32 lanes must call it.
template <int kLanes>
__device__ __forceinline__ float group_sum(float value) {
    static_assert(kLanes >= 1 && kLanes <= 32 && (kLanes & (kLanes - 1)) == 0, "a butterfly needs a power of two");
#pragma unroll
    for (int step = kLanes / 2; step; step >>= 1) value += __shfl_xor_sync(0xffffffffu, value, step);
    return value;
}

// Sums kCount values (a power of two, at most 32) over the warp and leaves value lane / (32 / kCount) with each lane. A step exchanges the
// half of the values that the other lane keeps, so it takes kCount - 1 shuffles and then those of one butterfly's rest; every value is added
// up in the order of warp_sum.
template <int kCount, int kStep = 16, int kRoom>
__device__ __forceinline__ float scatter_sums(float (&values)[kRoom], int lane) {
    if constexpr (kStep == 0) {
        return values[0];
    } else if constexpr (kCount == 1) {
        values[0] += __shfl_xor_sync(0xffffffffu, values[0], kStep);
        return scatter_sums<1, kStep / 2>(values, lane);
    } else {
        constexpr int kHalf = kCount / 2;
        const bool upper = lane & kStep;
#pragma unroll
        for (int i = 0; i < kHalf; ++i) {
            const float other = __shfl_xor_sync(0xffffffffu, upper ? values[i] : values[i + kHalf], kStep);
            values[i] = (upper ? values[i + kHalf] : values[i]) + other;
        }
        return scatter_sums<kHalf, kStep / 2>(values, lane);
    }
}

// Every lane returns the sum of all 32.
__device__ __forceinline__ float warp_sum(float value) { return group_sum<32>(value); }

// Every lane returns the maximum of all 32.
__device__ __forceinline__ unsigned warp_max(unsigned value) {
#pragma unroll
    for (int step = 16; step; step >>= 1) value = max(value, __shfl_xor_sync(0xffffffffu, value, step));
    return value;
}

// Every thread returns the sum over the block of kThreads threads, a multiple of 32. All threads must call it.
template <int kThreads>
__device__ __forceinline__ float block_sum(float value) {
    constexpr int kWarps = kThreads / 32;
    __shared__ float parts[kWarps];
    value = warp_sum(value);
    if (kWarps == 1) return value;
    __syncthreads();  // the values of an earlier call have been read
    if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = value;
    __syncthreads();
    float sum = parts[0];
#pragma unroll
    for (int warp = 1; warp < kWarps; ++warp) sum += parts[warp];
    return sum;
}

// Replaces each of kCount values by its sum over the block, as block_sum does and with its bits, but at the price of one barrier.
// All threads must call it, and only once: a second call would overwrite sums that a slower warp still reads.
template <int kThreads, int kCount>
__device__ __forceinline__ void block_sums(float (&value)[kCount]) {
    constexpr int kWarps = kThreads / 32;
    __shared__ float parts[kCount][kWarps];
#pragma unroll
    for (int i = 0; i < kCount; ++i) value[i] = warp_sum(value[i]);
    if constexpr (kWarps > 1) {
        if (threadIdx.x % 32 == 0)
#pragma unroll
            for (int i = 0; i < kCount; ++i) parts[i][threadIdx.x / 32] = value[i];
        __syncthreads();
#pragma unroll
        for (int i = 0; i < kCount; ++i) {
            value[i] = parts[i][0];
#pragma unroll
            for (int warp = 1; warp < kWarps; ++warp) value[i] += parts[i][warp];
        }
    }
}

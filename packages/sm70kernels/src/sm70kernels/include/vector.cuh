// 16-byte loads and stores of halves: the widest access a lane has, and what a weight stream needs to keep HBM busy.
#pragma once
#include <cuda_fp16.h>

struct alignas(16) Half8 {
    __half2 pair[4];
};

// The same 16 bytes as halves and as the four words that one instruction moves. A Half8 copied from or to memory as a whole, by
// assignment or memcpy, would be moved in parts.
__device__ __forceinline__ Half8 halves(uint4 words) {
    Half8 value;
    memcpy(&value.pair[0], &words.x, 4);
    memcpy(&value.pair[1], &words.y, 4);
    memcpy(&value.pair[2], &words.z, 4);
    memcpy(&value.pair[3], &words.w, 4);
    return value;
}

__device__ __forceinline__ uint4 words(Half8 value) {
    uint4 bits;
    memcpy(&bits.x, &value.pair[0], 4);
    memcpy(&bits.y, &value.pair[1], 4);
    memcpy(&bits.z, &value.pair[2], 4);
    memcpy(&bits.w, &value.pair[3], 4);
    return bits;
}

// Reads 8 halves through the read-only path; the address must be a multiple of 16, and nobody may write there during the kernel.
__device__ __forceinline__ Half8 load8(const __half* from) { return halves(__ldg(reinterpret_cast<const uint4*>(from))); }

// Reads 8 halves of memory that the kernel writes too; the address must be a multiple of 16.
__device__ __forceinline__ Half8 read8(const __half* from) { return halves(*reinterpret_cast<const uint4*>(from)); }

// Writes 8 halves; the address must be a multiple of 16.
__device__ __forceinline__ void store8(__half* to, const Half8& value) { *reinterpret_cast<uint4*>(to) = words(value); }

// Eight +0.
__device__ __forceinline__ Half8 zero8() { return halves(make_uint4(0, 0, 0, 0)); }

// Widens 8 halves to float, exactly.
__device__ __forceinline__ void widen(const Half8& from, float (&to)[8]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const float2 two = __half22float2(from.pair[i]);
        to[2 * i] = two.x;
        to[2 * i + 1] = two.y;
    }
}

// Rounds 8 floats to half, nearest even.
__device__ __forceinline__ Half8 narrow(const float (&from)[8]) {
    Half8 to;
#pragma unroll
    for (int i = 0; i < 4; ++i) to.pair[i] = __floats2half2_rn(from[2 * i], from[2 * i + 1]);
    return to;
}

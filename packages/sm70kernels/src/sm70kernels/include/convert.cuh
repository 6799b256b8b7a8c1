// Packed codes to halves and floats, every value exact: a code has at most 5 significant bits and half has 11.
//
// A word holds its codes so that one mask yields a pair (low half, high half) of half2. With four 8-bit codes c0..c3 of consecutive k the
// bytes are c0 c2 c1 c3 (from the lowest), with eight 4-bit codes the nibbles are c0 c2 c4 c6 c1 c3 c5 c7: pair j is (c[2j], c[2j+1]).
// Functions named *_scaled leave out a power of two that the caller folds into a scale.
#pragma once
#include <cuda_fp16.h>

__device__ __forceinline__ __half2 as_half2(unsigned bits) { return *reinterpret_cast<__half2*>(&bits); }

__device__ __forceinline__ unsigned as_bits(__half2 pair) { return *reinterpret_cast<unsigned*>(&pair); }

// (a & b) | c in one instruction.
__device__ __forceinline__ unsigned and_or(unsigned a, unsigned b, unsigned c) {
    unsigned result;
    asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(result) : "r"(a), "r"(b), "r"(c));
    return result;
}

// INT4 unsigned: q in 0..15. With the bits of 1024 above it a code is the half 1024 + q, or 1024 + 16 q from the nibble above.
__device__ __forceinline__ void int4_pairs(unsigned word, __half2 (&pair)[4]) {
    constexpr unsigned kBase = 0x64006400;
    const __half2 sixteenth = as_half2(0x2c002c00), minus_64 = as_half2(0xd400d400), base = as_half2(kBase);
    pair[0] = __hsub2(as_half2(and_or(word, 0x000f000f, kBase)), base);
    pair[1] = __hfma2(as_half2(and_or(word, 0x00f000f0, kBase)), sixteenth, minus_64);
    word >>= 8;
    pair[2] = __hsub2(as_half2(and_or(word, 0x000f000f, kBase)), base);
    pair[3] = __hfma2(as_half2(and_or(word, 0x00f000f0, kBase)), sixteenth, minus_64);
}

// INT8 signed: v in -128..127; a code with its sign bit flipped, below the bits of 1024, is the half 1152 + v.
__device__ __forceinline__ void int8_pairs(unsigned word, __half2 (&pair)[2]) {
    constexpr unsigned kBase = 0x64646464;
    const __half2 offset = as_half2(0x64806480);
    word ^= 0x80808080;
    pair[0] = __hsub2(as_half2(__byte_perm(word, kBase, 0x4240)), offset);
    pair[1] = __hsub2(as_half2(__byte_perm(word, kBase, 0x4341)), offset);
}

// E4M3: pair = value / 256. The two NaN codes give ±480 / 256, so stale bytes cannot inject NaN.
__device__ __forceinline__ void e4m3_pairs_scaled(unsigned word, __half2 (&pair)[2]) {
    const unsigned even = word << 8;
    pair[0] = as_half2(and_or(even, 0x80008000, (even & 0x7f007f00) >> 1));
    pair[1] = as_half2(and_or(word, 0x80008000, (word & 0x7f007f00) >> 1));
}

__device__ __forceinline__ void e4m3_pairs(unsigned word, __half2 (&pair)[2]) {
    const __half2 factor = as_half2(0x5c005c00);  // 256
    e4m3_pairs_scaled(word, pair);
    pair[0] = __hmul2(pair[0], factor);
    pair[1] = __hmul2(pair[1], factor);
}

// E5M2: the upper byte of a half; infinities and NaN included.
__device__ __forceinline__ void e5m2_pairs(unsigned word, __half2 (&pair)[2]) {
    pair[0] = as_half2((word << 8) & 0xff00ff00);
    pair[1] = as_half2(word & 0xff00ff00);
}

// E2M1: pair = value / 16384, value in 0 .5 1 1.5 2 3 4 6 with a sign.
__device__ __forceinline__ void e2m1_pairs_scaled(unsigned word, __half2 (&pair)[4]) {
    pair[0] = as_half2(and_or(word << 12, 0x80008000, (word << 9) & 0x0e000e00));
    pair[1] = as_half2(and_or(word << 8, 0x80008000, (word << 5) & 0x0e000e00));
    pair[2] = as_half2(and_or(word << 4, 0x80008000, (word << 1) & 0x0e000e00));
    pair[3] = as_half2(and_or(word, 0x80008000, (word >> 3) & 0x0e000e00));
}

__device__ __forceinline__ void e2m1_pairs(unsigned word, __half2 (&pair)[4]) {
    const __half2 factor = as_half2(0x74007400);  // 16384
    e2m1_pairs_scaled(word, pair);
#pragma unroll
    for (int j = 0; j < 4; ++j) pair[j] = __hmul2(pair[j], factor);
}

// E8M0: 2^(code - 127), 255 is NaN.
__device__ __forceinline__ float e8m0_float(unsigned code) {
    if (code == 255) return __uint_as_float(0x7fc00000);
    return __uint_as_float(code == 0 ? 0x00400000 : code << 23);
}

// E8M0 as a half: 0 below 2^-24, infinity above 2^15, NaN for 255. Exact from 2^-24 to 2^15.
__device__ __forceinline__ __half e8m0_half(unsigned code) {
    unsigned bits = (code - 112) << 10;
    if (code < 113) bits = code < 103 ? 0 : 1u << (code - 103);
    if (code > 142) bits = code == 255 ? 0x7e00 : 0x7c00;
    return __ushort_as_half(static_cast<unsigned short>(bits));
}

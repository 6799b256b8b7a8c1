// Storage formats of the K/V cache, 8 values at a time.
//
//   E4M3  four exponent bits (bias 7), three mantissa bits, no infinity, NaN = 0x7f and 0xff. One scale a cache.
//   INT8  -128 .. 127 in two's complement. One scale a token and head; a scale that is NaN marks a row that was not finite.
//
// Encoding divides by the scale, decoding multiplies by it, both in float32 with IEEE rounding. Every code decodes exactly before that.
#pragma once
#include <cuda_fp16.h>

#include "convert.cuh"
#include "vector.cuh"

// The E4M3 code nearest to x, ties to even; beyond +-448 that of +-448, and 0x7f for NaN whatever its sign.
__device__ __forceinline__ unsigned encode_e4m3(float x) {
    const float magnitude = fminf(fabsf(x), 448.0f);
    const unsigned bits = __float_as_uint(magnitude);
    // From 2^-6 up: round off 20 bits of the mantissa, then change the exponent's bias from 127 to 7. A carry goes to the exponent.
    const unsigned normal = (bits + 0x7ffffu + (bits >> 20 & 1u) >> 20) - (120u << 3);
    // Below: multiples of 2^-9, which is the last place of floats from 2^14 to 2^15, so the addition rounds.
    const unsigned subnormal = __float_as_uint(magnitude + 16384.0f) - 0x46800000u;
    const unsigned code = (magnitude < 0.015625f ? subnormal : normal) | (__float_as_uint(x) >> 24 & 0x80u);
    return x != x ? 0x7fu : code;
}

// The exact values of the two E4M3 codes that stand in the high bytes of both halves; the low bytes are ignored.
__device__ __forceinline__ __half2 decode_e4m3(unsigned codes) {
    const unsigned magnitude = codes & 0x7f007f00u;
    // One bit to the right a code is a half of 2^-8 its value. Only 0x7f carries into the sign's place; there it sets the exponent's top
    // bit, which makes NaN of 0x7f.
    const unsigned nan = (magnitude + 0x01000100u & 0x80008000u) >> 1;
    return __hmul2(as_half2((codes & 0x80008000u) | magnitude >> 1 | nan), as_half2(0x5c005c00u));  // times 256
}

// The exact values of 8 E4M3 codes, in order.
__device__ __forceinline__ Half8 decode8_e4m3(uint2 codes) {
    Half8 value;
    value.pair[0] = decode_e4m3(__byte_perm(codes.x, 0, 0x1404));  // bytes 0 and 1 to the high bytes of the halves
    value.pair[1] = decode_e4m3(__byte_perm(codes.x, 0, 0x3424));
    value.pair[2] = decode_e4m3(__byte_perm(codes.y, 0, 0x1404));
    value.pair[3] = decode_e4m3(__byte_perm(codes.y, 0, 0x3424));
    return value;
}

// The exact values of two bytes of a word whose sign bits are flipped: byte b is the half 1024 + b once 0x64 stands over it. (int8_pairs
// of convert.cuh takes codes in another order.)
template <unsigned kSelect>
__device__ __forceinline__ __half2 decode_i8(unsigned flipped) {
    return __hsub2(as_half2(__byte_perm(flipped, 0x64646464u, kSelect)), as_half2(0x64806480u));  // minus 1152
}

// The exact values of 8 INT8 codes, in order.
__device__ __forceinline__ Half8 decode8_i8(uint2 codes) {
    const unsigned low = codes.x ^ 0x80808080u, high = codes.y ^ 0x80808080u;
    Half8 value;
    value.pair[0] = decode_i8<0x4140>(low);
    value.pair[1] = decode_i8<0x4342>(low);
    value.pair[2] = decode_i8<0x4140>(high);
    value.pair[3] = decode_i8<0x4342>(high);
    return value;
}

// Packs the low bytes of 8 words, in order.
__device__ __forceinline__ uint2 pack8(const unsigned (&code)[8]) {
    uint2 packed;
    packed.x = __byte_perm(__byte_perm(code[0], code[1], 0x0040), __byte_perm(code[2], code[3], 0x0040), 0x5410);
    packed.y = __byte_perm(__byte_perm(code[4], code[5], 0x0040), __byte_perm(code[6], code[7], 0x0040), 0x5410);
    return packed;
}

// The E4M3 codes of 8 values over a scale.
__device__ __forceinline__ uint2 encode8_e4m3(const float (&value)[8], float scale) {
    unsigned code[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) code[i] = encode_e4m3(value[i] / scale);
    return pack8(code);
}

// The scale of an INT8 row from the bits of its largest magnitude, as floats; NaN for a row with an infinity or a NaN.
__device__ __forceinline__ float scale_i8(unsigned largest) {
    constexpr unsigned kInfinity = 0x7f800000u, kNan = 0x7fc00000u;
    return largest < kInfinity ? fmaxf(__uint_as_float(largest) / 127.0f, 1e-6f) : __uint_as_float(kNan);
}

// The INT8 codes of 8 values over their row's scale: rounded to nearest even and clamped; zeros where the scale is NaN.
__device__ __forceinline__ uint2 encode8_i8(const float (&value)[8], float scale) {
    unsigned code[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        const int rounded = min(max(__float2int_rn(value[i] / scale), -128), 127);
        code[i] = scale == scale ? static_cast<unsigned>(rounded) : 0u;
    }
    return pack8(code);
}

// 8 exactly decoded codes times their scale, rounded once from float32.
__device__ __forceinline__ Half8 scaled8(const Half8& code, float scale) {
    float value[8];
    widen(code, value);
#pragma unroll
    for (int i = 0; i < 8; ++i) value[i] *= scale;
    return narrow(value);
}

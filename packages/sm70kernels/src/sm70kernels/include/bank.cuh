// Packed weight banks: how each format becomes B fragments of mma.sync.m8n8k4. The byte layout is that of sm70kernels.banks.
//
// A bank holds tiles of 32 columns (rows of w) by steps of 32 k. In a step a lane holds 32 consecutive k of one column; its 16-byte pieces
// lie in lane order, so that a warp reads 512 consecutive bytes at once, and the steps of a tile follow each other. Per format a struct
// says what a lane loads for a step, how 8 codes become two fragments, and how sums are scaled. Padding decodes to finite weights.
// `load(ahead)` reads that many steps past the one that `advance` has come to, so that in an unrolled loop offsets are constants.
#pragma once
#include "convert.cuh"
#include "mma.cuh"

constexpr int kStep = 32;
constexpr int kTile = 32;
constexpr int kWordsPerStep = 4;  // words of 8 weights a lane holds of a step

template <int kN, int kK>
struct BankSize {
    static constexpr int kTiles = (kN + kTile - 1) / kTile;
    static constexpr int kSteps = (kK + kStep - 1) / kStep;
    static constexpr long long kTileSteps = static_cast<long long>(kTiles) * kSteps;
    static_assert(kK % kStep == 0, "kernels read whole steps of x");
};

__device__ __forceinline__ unsigned word_of(const uint4& words, int index) {
    return index == 0 ? words.x : index == 1 ? words.y : index == 2 ? words.z : words.w;
}

// What formats without scaled sums have in common.
struct Unscaled {
    static constexpr int kScaledSteps = 0;  // steps after which a sum is scaled; 0: never
    __device__ __forceinline__ static float scaled(float sum, const unsigned char*, int) { return sum; }
};

// INT4, asymmetric, groups of 32: w = fma_h(q, scale, bias).
template <int kN, int kK, int kPhase>
struct Int4 : Unscaled {
    using Size = BankSize<kN, kK>;
    struct Step {
        uint4 codes;
        unsigned scale_bias;
    };
    const uint4* codes;
    const unsigned* groups;
    __half2 scale, bias;

    __device__ __forceinline__ Int4(const unsigned char* bank, int tile, int lane) {
        const long long first = static_cast<long long>(tile) * Size::kSteps * 32 + lane;
        codes = reinterpret_cast<const uint4*>(bank) + first;
        groups = reinterpret_cast<const unsigned*>(bank + Size::kTileSteps * 512) + first;
    }
    __device__ __forceinline__ Step load(int ahead) const { return {__ldg(codes + ahead * 32), __ldg(groups + ahead * 32)}; }
    __device__ __forceinline__ void advance(int steps) { codes += steps * 32, groups += steps * 32; }
    __device__ __forceinline__ void begin(const Step& step) {
        scale = __low2half2(as_half2(step.scale_bias));
        bias = __high2half2(as_half2(step.scale_bias));
    }
    __device__ __forceinline__ void fragments(const Step& step, int word, unsigned (&b)[4]) const {
        __half2 pair[4];
        int4_pairs(word_of(step.codes, word), pair);
#pragma unroll
        for (int j = 0; j < 4; ++j) b[j] = as_bits(__hfma2(pair[j], scale, bias));
    }
};

// NVFP4, groups of 16: S = h(e4m3 · global), w = h(e2m1 · S). Packing makes sure that S · 2^14, which undoes e2m1's factor, is finite.
template <int kN, int kK, int kPhase>
struct Nvfp4 : Unscaled {
    using Size = BankSize<kN, kK>;
    struct Step {
        uint4 codes;
        unsigned scales;
    };
    const uint4* codes;
    const unsigned short* groups;
    float global;  // times 256, which undoes e4m3's factor
    __half2 scale[2];

    __device__ __forceinline__ Nvfp4(const unsigned char* bank, int tile, int lane) {
        const long long first = static_cast<long long>(tile) * Size::kSteps * 32 + lane;
        codes = reinterpret_cast<const uint4*>(bank) + first;
        groups = reinterpret_cast<const unsigned short*>(bank + Size::kTileSteps * 512) + first;
        global = __ldg(reinterpret_cast<const float*>(bank + Size::kTileSteps * 576) + tile * kTile + lane) * 256.0f;
    }
    __device__ __forceinline__ Step load(int ahead) const { return {__ldg(codes + ahead * 32), __ldg(groups + ahead * 32)}; }
    __device__ __forceinline__ void advance(int steps) { codes += steps * 32, groups += steps * 32; }
    __device__ __forceinline__ void begin(const Step& step) {
        const __half2 undo = as_half2(0x74007400);  // 16384
        const unsigned spread = __byte_perm(step.scales, 0, 0x1404);  // byte 0 in bits 8..15, byte 1 in bits 24..31
        const float2 both = __half22float2(as_half2(and_or(spread, 0x80008000, (spread & 0x7f007f00) >> 1)));
        scale[0] = __hmul2(__half2half2(__float2half_rn(both.x * global)), undo);
        scale[1] = __hmul2(__half2half2(__float2half_rn(both.y * global)), undo);
    }
    __device__ __forceinline__ void fragments(const Step& step, int word, unsigned (&b)[4]) const {
        __half2 pair[4];
        e2m1_pairs_scaled(word_of(step.codes, word), pair);
#pragma unroll
        for (int j = 0; j < 4; ++j) b[j] = as_bits(__hmul2(pair[j], scale[word / 2]));
    }
};

// 8-bit codes: the two 16-byte pieces of a lane's step hold k 0..15 and k 16..31.
struct Bytes {
    struct Step {
        uint4 codes[2];
    };
    const uint4* codes;
    __device__ __forceinline__ Bytes(const unsigned char* bank, long long first_step, int lane)
        : codes(reinterpret_cast<const uint4*>(bank) + first_step * 64 + lane) {}
    __device__ __forceinline__ Step load(int ahead) const { return {{__ldg(codes + ahead * 64), __ldg(codes + ahead * 64 + 32)}}; }
    __device__ __forceinline__ void advance(int steps) { codes += steps * 64; }
    __device__ __forceinline__ void begin(const Step&) {}
};

// FP8 E4M3: the half is code / 256; the sum over each block of 128 k is multiplied by 256 · scale of its column and block.
template <int kN, int kK, int kPhase>
struct Fp8 : Bytes {
    using Size = BankSize<kN, kK>;
    static constexpr int kScaledSteps = 128 / kStep;
    static constexpr int kFirst = kPhase / kStep;  // steps of the first block that belong to another slice of k
    static constexpr int kBlocks = (kPhase + kK + 127) / 128;
    const float* scales;
    float scale[4];

    __device__ __forceinline__ Fp8(const unsigned char* bank, int tile, int lane)
        : Bytes(bank, static_cast<long long>(tile) * Size::kSteps, lane),
          scales(reinterpret_cast<const float*>(bank + Size::kTileSteps * 1024) + static_cast<long long>(tile) * kBlocks * kTile +
                 8 * quad_pair(lane) + 2 * (lane & 2)) {}
    __device__ __forceinline__ void fragments(const Step& step, int word, unsigned (&b)[4]) const {
        __half2 pair[2];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            e4m3_pairs_scaled(word_of(step.codes[word / 2], word % 2 * 2 + half), pair);
            b[2 * half] = as_bits(pair[0]);
            b[2 * half + 1] = as_bits(pair[1]);
        }
    }
    __device__ __forceinline__ void load_scale(int step) {
        const float4 four = __ldg(reinterpret_cast<const float4*>(scales + (step + kFirst) / kScaledSteps * kTile));
        scale[0] = four.x * 256.0f, scale[1] = four.y * 256.0f, scale[2] = four.z * 256.0f, scale[3] = four.w * 256.0f;
    }
    __device__ __forceinline__ static bool begins_block(int step) { return (step + kFirst) % kScaledSteps == 0; }
    // The scale of element i of a sum: a lane's four columns are stored side by side.
    __device__ __forceinline__ float scale_of(int i) const { return scale[(i & 4) / 2 + (i & 1)]; }
    __device__ __forceinline__ static float scaled(float sum, const unsigned char*, int) { return sum; }
};

// INT8: the code itself; the whole sum is multiplied by the scale of its column.
template <int kN, int kK, int kPhase>
struct Int8 : Bytes {
    using Size = BankSize<kN, kK>;
    static constexpr int kScaledSteps = 0;

    __device__ __forceinline__ Int8(const unsigned char* bank, int tile, int lane)
        : Bytes(bank, static_cast<long long>(tile) * Size::kSteps, lane) {}
    __device__ __forceinline__ void fragments(const Step& step, int word, unsigned (&b)[4]) const {
        __half2 pair[2];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            int8_pairs(word_of(step.codes[word / 2], word % 2 * 2 + half), pair);
            b[2 * half] = as_bits(pair[0]);
            b[2 * half + 1] = as_bits(pair[1]);
        }
    }
    __device__ __forceinline__ static float scaled(float sum, const unsigned char* bank, int column) {
        return sum * __ldg(reinterpret_cast<const float*>(bank + Size::kTileSteps * 1024) + column);
    }
};

// Rows of float16 weights as they lie in memory: `row` is the lane's row of w, at a multiple of 16 bytes.
struct Rows16 : Unscaled {
    struct Step {
        uint4 words[kWordsPerStep];
    };
    const uint4* row;

    __device__ __forceinline__ explicit Rows16(const __half* from) : row(reinterpret_cast<const uint4*>(from)) {}
    __device__ __forceinline__ Step load(int ahead) const {
        Step step;
#pragma unroll
        for (int word = 0; word < kWordsPerStep; ++word) step.words[word] = __ldg(row + ahead * 4 + word);
        return step;
    }
    __device__ __forceinline__ void advance(int steps) { row += steps * 4; }
    __device__ __forceinline__ void begin(const Step&) {}
    __device__ __forceinline__ void fragments(const Step& step, int word, unsigned (&b)[4]) const {
        b[0] = step.words[word].x, b[1] = step.words[word].y, b[2] = step.words[word].z, b[3] = step.words[word].w;
    }
};

// The inner loop of every product with a packed bank: one warp multiplies blocks of 8 rows of x by one 32-column tile over a slice of k.
//
// Weights go from global memory to registers to the tensor core; of x each lane loads one 16-byte piece a step and row block, and the warp
// exchanges them through its own piece of shared memory. Loads run kDepth steps ahead. Sums are taken in ascending k.
#pragma once
#include "bank.cuh"

constexpr int kRowBlockPieces = 36;  // 16-byte pieces of 8 rows of a step: 4 a row, and one unused after every second row
constexpr int kStagePieces = 2 * kRowBlockPieces;  // what a warp needs for each row block: two steps of x, later 8 x 32 sums

// Where piece p (8 k) of row r of a step lies: rows that a quarter of a warp reads or writes at once are in different banks.
__device__ __forceinline__ constexpr int staged(int r, int p) { return r * 4 + r / 2 + p; }

// Where (row, column) of 8 x 32 sums lies: pairs of columns, as lanes hold them, are written without conflicts.
__device__ __forceinline__ constexpr int summed(int row, int column) { return row * kTile + (column ^ ((row & 1) << 2)); }

// Adds to `sum` the product over steps [begin, end) of k. rows[r] points to row 8 r + lane / 4 of x, at a multiple of 16 bytes, or is null
// for a row of zeros. `stage` is the warp's kRowBlocks * kStagePieces of shared memory; kDepth is even, for its halves take turns. A row's
// result is that of the row alone, whatever the others hold.
template <int kRowBlocks, int kDepth, class Bank>
__device__ __forceinline__ void multiply_tile(
    Bank& bank, const __half* const (&rows)[kRowBlocks], int begin, int end, uint4* stage, float (&sum)[kRowBlocks][8]) {
    static_assert(kDepth % 2 == 0, "steps alternate between two halves of the stage");
    struct Ahead {
        typename Bank::Step weights;
        uint4 x[kRowBlocks];
    };
    const int lane = threadIdx.x % 32;
    uint4* const write = stage + staged(lane / 4, lane % 4);
    const uint4* const read = stage + staged(fragment_outer(lane), 0);
    const uint4* x[kRowBlocks];
    bool valid[kRowBlocks];
    Ahead ahead[kDepth];
    float block[kRowBlocks][8];  // the sum since the last scaling

    auto load_x = [&](int steps, Ahead& to) {
#pragma unroll
        for (int r = 0; r < kRowBlocks; ++r) to.x[r] = valid[r] ? __ldg(x[r] + steps * 4) : make_uint4(0, 0, 0, 0);
    };
    auto scale = [&] {
        if constexpr (Bank::kScaledSteps != 0) {
#pragma unroll
            for (int r = 0; r < kRowBlocks; ++r) {
#pragma unroll
                for (int i = 0; i < 8; ++i) {
                    sum[r][i] = fmaf(block[r][i], bank.scale_of(i), sum[r][i]);
                    block[r][i] = 0.0f;
                }
            }
        }
    };

    bank.advance(begin);
#pragma unroll
    for (int r = 0; r < kRowBlocks; ++r) {
        valid[r] = rows[r] != nullptr;
        x[r] = reinterpret_cast<const uint4*>(rows[r]) + begin * 4 + lane % 4;
#pragma unroll
        for (int i = 0; i < 8; ++i) block[r][i] = 0.0f;
    }
#pragma unroll
    for (int d = 0; d < kDepth; ++d) {
        if (begin + d < end) {
            ahead[d].weights = bank.load(d);
            load_x(d, ahead[d]);
        }
    }
    if constexpr (Bank::kScaledSteps != 0) {
        if (begin < end) bank.load_scale(begin);
    }
#pragma unroll 1  // a short slice of known length would be unrolled into more registers than there are
    for (int first = begin; first < end; first += kDepth) {
#pragma unroll
        for (int d = 0; d < kDepth; ++d) {
            if (first + d >= end) break;
            constexpr int kHalf = kRowBlocks * kRowBlockPieces;
#pragma unroll
            for (int r = 0; r < kRowBlocks; ++r) write[d % 2 * kHalf + r * kRowBlockPieces] = ahead[d].x[r];
            const bool more = first + d + kDepth < end;
            if (more) load_x(d + kDepth, ahead[d]);
            if constexpr (Bank::kScaledSteps != 0) {
                if (first + d != begin && Bank::begins_block(first + d)) {
                    scale();
                    bank.load_scale(first + d);
                }
            }
            bank.begin(ahead[d].weights);
            __syncwarp();
#pragma unroll
            for (int word = 0; word < kWordsPerStep; ++word) {
                unsigned b[4];
                bank.fragments(ahead[d].weights, word, b);
#pragma unroll
                for (int r = 0; r < kRowBlocks; ++r) {
                    const uint4 a = read[d % 2 * kHalf + r * kRowBlockPieces + word];
                    float(&to)[8] = Bank::kScaledSteps != 0 ? block[r] : sum[r];
                    mma_884(to, a.x, a.y, b[0], b[1]);
                    mma_884(to, a.z, a.w, b[2], b[3]);
                }
            }
            if (more) ahead[d].weights = bank.load(d + kDepth);  // after their last use: no registers for a copy
        }
        bank.advance(kDepth);
#pragma unroll
        for (int r = 0; r < kRowBlocks; ++r) x[r] += kDepth * 4;
    }
    if (begin < end) scale();  // a warp without a step has no scale, and 0 times what its registers hold may be NaN
}

// Writes a warp's sums to its piece of shared memory, which the warp has stopped reading x from; kRowBlocks tiles of 8 x 32 floats.
template <int kRowBlocks>
__device__ __forceinline__ void store_sums(const float (&sum)[kRowBlocks][8], uint4* stage) {
    const int lane = threadIdx.x % 32;
    float* to = reinterpret_cast<float*>(stage);
    __syncwarp();
#pragma unroll
    for (int r = 0; r < kRowBlocks; ++r) {
#pragma unroll
        for (int i = 0; i < 8; i += 2)
            *reinterpret_cast<float2*>(to + r * 256 + summed(c_row(lane, i), qpn_c_column(lane, i))) = make_float2(sum[r][i], sum[r][i + 1]);
    }
}

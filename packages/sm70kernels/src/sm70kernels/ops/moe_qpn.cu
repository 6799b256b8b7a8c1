// moe_qpn: four launches. moe_plan groups the routes by expert into packs of up to 8, moe_gated computes silu(gate) up of every route,
// moe_down its y, and moe_fold adds the routes of a row in slot order and the shared expert's result.
//
// Packs with the numbers M·K .. M·K + M / 8 are the shared expert's: its weights are float16 rows and its routes are M·K + row.
// X experts, E model width, I width of an expert, WARPS_K warps that share the k of a tile of the first product. The order of every sum
// depends on these alone.
#include <cuda_fp16.h>

#include "qpn.cuh"
#include "reduce.cuh"

constexpr int kPackRows = 8;
constexpr int kPlanThreads = (X + 31) / 32 * 32;
constexpr int kMostRoutes = 4096;
constexpr int kDownTiles = 4;     // tiles of the second product a block computes, one a warp
constexpr int kFoldThreads = 64;  // of moe_fold, 8 columns each
constexpr int kUnits = kTile / 2; // units of an expert in a tile of the first product: gate and up are columns side by side
static_assert(kPlanThreads <= 1024, "moe_plan has a thread for every expert");

// plan: the number of packs, then for each its expert, its first place in the list and its length, then the list of routes.
struct Plan {
    const int* plan;
    int routes;
    __device__ __forceinline__ int packs() const { return plan[0]; }
    __device__ __forceinline__ int expert(int pack) const { return plan[1 + pack]; }
    __device__ __forceinline__ int first(int pack) const { return plan[1 + routes + pack]; }
    __device__ __forceinline__ int count(int pack) const { return plan[1 + 2 * routes + pack]; }
    __device__ __forceinline__ int route(int place) const { return plan[1 + 3 * routes + place]; }
};

// One pack as a block sees it: which routes, in ascending order, and whether they are the shared expert's.
struct Pack {
    Plan plan;
    bool shared;
    int expert, first, count;

    // m rows; a pack beyond the last has no routes.
    __device__ __forceinline__ Pack(const int* from, int routes, int m, int pack) : plan{from, routes}, shared(pack >= routes), expert(0) {
        if (shared) {
            first = (pack - routes) * kPackRows;
            count = min(kPackRows, m - first);
        } else if (pack < plan.packs()) {
            expert = plan.expert(pack), first = plan.first(pack), count = plan.count(pack);
        } else {
            count = 0;
        }
    }
    __device__ __forceinline__ int route(int row) const { return shared ? plan.routes + first + row : plan.route(first + row); }
};

// The sum over the block's threads before this one.
__device__ __forceinline__ int sum_before(int value) {
    __shared__ int totals[32];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    int sum = value;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
        const int other = __shfl_up_sync(0xffffffffu, sum, step);
        if (lane >= step) sum += other;
    }
    if (lane == 31) totals[warp] = sum;
    __syncthreads();
    int before = sum - value;
    for (int other = 0; other < warp; ++other) before += totals[other];
    return before;
}

// One block, a thread for every expert: ascending experts, and of each its routes m·K + slot in ascending order.
extern "C" __global__ void __launch_bounds__(kPlanThreads)
moe_plan(const int* __restrict__ ids,  // [routes]
         int* __restrict__ plan, int routes) {
    __shared__ int chosen[kMostRoutes];
    const int expert = threadIdx.x;
    for (int i = threadIdx.x; i < routes; i += kPlanThreads) chosen[i] = ids[i];
    __syncthreads();
    int count = 0;
    if (expert < X) {
        for (int i = 0; i < routes; ++i) count += chosen[i] == expert;
    }
    const int packs = (count + kPackRows - 1) / kPackRows;
    const int before = sum_before(packs << 16 | count);  // both at most kMostRoutes
    int pack = before >> 16, place = before & 0xffff;
    if (threadIdx.x == kPlanThreads - 1) plan[0] = pack + packs;
    for (int left = count; left > 0; left -= kPackRows, ++pack) {
        plan[1 + pack] = expert;
        plan[1 + routes + pack] = place + count - left;
        plan[1 + 2 * routes + pack] = min(left, kPackRows);
    }
    for (int i = 0; count > 0 && i < routes; ++i) {
        if (chosen[i] == expert) plan[1 + 3 * routes + place++] = i, --count;
    }
}

__device__ __forceinline__ float h(float value) { return __half2float(__float2half_rn(value)); }

// -0 below about -104, and -infinity is no exception to that.
__device__ __forceinline__ float silu(float x) {
    const float bounded = x < -1000.0f ? -1000.0f : x;
    return bounded / (1.0f + expf(-bounded));
}

// A warp's share of the first product: sums of the pack's rows over its slice of k, left in shared memory.
template <int kDepth, class Bank>
__device__ __forceinline__ void gated_slice(Bank bank, const __half* row, int slice, uint4* stage) {
    constexpr int kSteps = E / kStep;
    const __half* rows[1] = {row};
    float sum[1][8] = {};
    multiply_tile<1, kDepth>(bank, rows, kSteps * slice / WARPS_K, kSteps * (slice + 1) / WARPS_K, stage, sum);
    store_sums(sum, stage);
}

extern "C" __global__ void __launch_bounds__(32 * WARPS_K, 16 / WARPS_K)
moe_gated(const __half* __restrict__ x,             // [m, E]
          const unsigned char* __restrict__ w13,    // FORMAT banks [2 I, E] w13_bytes apart, gate and up rows interleaved
          const __half* __restrict__ shared13,      // [2 I, E], gate rows and then up rows, or null
          const int* __restrict__ plan,             //
          __half* __restrict__ act,                 // [routes + m, I], written here
          int m, int slots, long long w13_bytes) {
    using Bank = FORMAT<2 * I, E, 0>;
    __shared__ uint4 stages[WARPS_K][kStagePieces];
    const Pack pack(plan, m * slots, m, blockIdx.y);
    const int lane = threadIdx.x % 32, slice = threadIdx.x / 32, tile = blockIdx.x;
    if (pack.count <= 0) return;
    const __half* row = nullptr;
    if (lane / 4 < pack.count) {
        const int route = pack.route(lane / 4);
        row = x + static_cast<long long>(pack.shared ? route - m * slots : route / slots) * E;
    }
    const unsigned char* bank = w13 + pack.expert * w13_bytes;
    if (pack.shared) {
        const int column = tile * kTile + qpn_column(lane);
        gated_slice<2>(Rows16(shared13 + static_cast<long long>(column / 2 + column % 2 * I) * E), row, slice, stages[slice]);
    } else {
        gated_slice<4>(Bank(bank, tile, lane), row, slice, stages[slice]);
    }
    __syncthreads();
    for (int at = threadIdx.x; at < pack.count * kUnits; at += 32 * WARPS_K) {
        const int local = at / kUnits, unit = at % kUnits, n = tile * kTile + 2 * unit;
        float2 both = make_float2(0.0f, 0.0f);
#pragma unroll
        for (int other = 0; other < WARPS_K; ++other) {
            const float* sums = reinterpret_cast<const float*>(stages[other]);
            const float2 part = *reinterpret_cast<const float2*>(sums + summed(local, 2 * unit));
            both.x += part.x, both.y += part.y;
        }
        if (!pack.shared) both = make_float2(Bank::scaled(both.x, bank, n), Bank::scaled(both.y, bank, n + 1));
        act[static_cast<long long>(pack.route(local)) * I + n / 2] = __float2half_rn(h(silu(h(both.x))) * h(both.y));
    }
}

// A tile of the second product; a few steps are so short a slice that the number of warps hides more latency than depth does.
template <class Bank>
__device__ __forceinline__ void down_tile(Bank bank, const __half* row, uint4* stage) {
    const __half* rows[1] = {row};
    float sum[1][8] = {};
    multiply_tile<1, 2>(bank, rows, 0, I / kStep, stage, sum);
    store_sums(sum, stage);
}

extern "C" __global__ void __launch_bounds__(32 * kDownTiles, 6)
moe_down(const __half* __restrict__ act,           // [routes + m, I]
         const unsigned char* __restrict__ w2,     // FORMAT banks [E, I] w2_bytes apart
         const __half* __restrict__ shared2,       // [E, I] or null
         const int* __restrict__ plan,             //
         __half* __restrict__ y,                   // [routes + m, E], written here
         int m, int slots, long long w2_bytes) {
    using Bank = FORMAT<E, I, PHASE>;
    __shared__ uint4 stages[kDownTiles][kStagePieces];
    const Pack pack(plan, m * slots, m, blockIdx.y);
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, tile = blockIdx.x * kDownTiles + warp;
    if (pack.count <= 0 || tile >= E / kTile) return;
    const __half* row = lane / 4 < pack.count ? act + static_cast<long long>(pack.route(lane / 4)) * I : nullptr;
    const unsigned char* bank = w2 + pack.expert * w2_bytes;
    if (pack.shared) {
        down_tile(Rows16(shared2 + static_cast<long long>(tile * kTile + qpn_column(lane)) * I), row, stages[warp]);
    } else {
        down_tile(Bank(bank, tile, lane), row, stages[warp]);
    }
    __syncwarp();
    const int column = lane % 16 * 2, n = tile * kTile + column;
    for (int local = lane / 16; local < pack.count; local += 2) {
        float2 both = *reinterpret_cast<const float2*>(reinterpret_cast<const float*>(stages[warp]) + summed(local, column));
        if (!pack.shared) both = make_float2(Bank::scaled(both.x, bank, n), Bank::scaled(both.y, bank, n + 1));
        *reinterpret_cast<__half2*>(y + static_cast<long long>(pack.route(local)) * E + n) = __floats2half2_rn(both.x, both.y);
    }
}

__device__ __forceinline__ void add_halves(const __half* from, float factor, float (&sum)[8]) {
    const uint4 bits = __ldg(reinterpret_cast<const uint4*>(from));
#pragma unroll
    for (int word = 0; word < 4; ++word) {
        const float2 two = __half22float2(as_half2(word_of(bits, word)));
        sum[2 * word] = fmaf(factor, two.x, sum[2 * word]);
        sum[2 * word + 1] = fmaf(factor, two.y, sum[2 * word + 1]);
    }
}

extern "C" __global__ void __launch_bounds__(kFoldThreads)
moe_fold(const __half* __restrict__ x,            // [m, E]
         const int* __restrict__ ids,             // [m, slots]
         const float* __restrict__ weights,       // [m, slots]
         const __half* __restrict__ y,            // [routes + m, E]
         const __half* __restrict__ shared_gate,  // [E] or null
         __half* __restrict__ out,                // [m, E], written here
         int m, int slots) {
    const int row = blockIdx.x, column = (blockIdx.y * kFoldThreads + threadIdx.x) * 8;
    float share = 0.0f;
    if (shared_gate != nullptr) {
        float dot = 0.0f;
        for (int at = threadIdx.x * 8; at < E; at += kFoldThreads * 8) {
            const uint4 a = __ldg(reinterpret_cast<const uint4*>(x + static_cast<long long>(row) * E + at));
            const uint4 b = __ldg(reinterpret_cast<const uint4*>(shared_gate + at));
#pragma unroll
            for (int word = 0; word < 4; ++word) {
                const float2 p = __half22float2(as_half2(word_of(a, word))), q = __half22float2(as_half2(word_of(b, word)));
                dot = fmaf(p.y, q.y, fmaf(p.x, q.x, dot));
            }
        }
        share = 1.0f / (1.0f + expf(-h(block_sum<kFoldThreads>(dot))));
    }
    if (column >= E) return;
    float routed[8] = {};
    for (int slot = 0; slot < slots; ++slot) {
        const int route = row * slots + slot;
        if (static_cast<unsigned>(ids[route]) < X) add_halves(y + static_cast<long long>(route) * E + column, weights[route], routed);
    }
    float shared[8] = {};
    if (shared_gate != nullptr) add_halves(y + static_cast<long long>(m * slots + row) * E + column, share, shared);
    __half2 result[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const float low = h(routed[2 * i]), high = h(routed[2 * i + 1]);
        result[i] = shared_gate == nullptr ? __floats2half2_rn(low, high)
                                           : __floats2half2_rn(low + h(shared[2 * i]), high + h(shared[2 * i + 1]));
    }
    *reinterpret_cast<uint4*>(out + static_cast<long long>(row) * E + column) =
        make_uint4(as_bits(result[0]), as_bits(result[1]), as_bits(result[2]), as_bits(result[3]));
}

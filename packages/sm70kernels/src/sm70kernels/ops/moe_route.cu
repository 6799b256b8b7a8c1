// moe_route: a warp takes a row, a lane every 32nd logit; one round a slot finds the warp's best remaining key. Keys order as the op does.
#include <cuda_fp16.h>

using Key = unsigned long long;

constexpr int kOwn = (X + 31) / 32;  // logits a lane holds

// The bits of a logit in an order that unsigned integers have: -0 counts as +0, and NaN of either sign comes last.
__device__ __forceinline__ unsigned ordered(float logit) {
    if (logit != logit) return 0xffffffffu;
    const unsigned bits = __float_as_uint(logit + 0.0f);
    return bits >> 31 ? ~bits : bits | 0x80000000u;
}

__device__ __forceinline__ float unordered(unsigned bits) {
    return __uint_as_float(bits >> 31 ? bits & 0x7fffffffu : ~bits);
}

extern "C" __global__ void __launch_bounds__(32)
moe_route(const __half* __restrict__ logits, int topk, int* __restrict__ ids, float* __restrict__ weights) {
    const int lane = threadIdx.x;
    const long long row = blockIdx.x;
    Key own[kOwn];
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
        const int expert = i * 32 + lane;
        own[i] = expert < X ? static_cast<Key>(ordered(__half2float(logits[row * X + expert]))) << 32 | ~static_cast<unsigned>(expert) : 0;
    }
    // The lane of a slot keeps its expert and weight. Every lane follows their sum, so the order is that of the slots. A row is degenerate
    // when its best logit is not finite: NaN and +inf come before everything else, -inf is best where there is nothing else.
    int expert = lane;
    float weight = 0.0f, best = 0.0f, sum = 0.0f;
    for (int slot = 0; slot < topk; ++slot) {
        Key key = own[0];
#pragma unroll
        for (int i = 1; i < kOwn; ++i) key = own[i] > key ? own[i] : key;
#pragma unroll
        for (int step = 16; step; step >>= 1) {
            const Key other = __shfl_xor_sync(0xffffffffu, key, step);
            key = other > key ? other : key;
        }
        const float logit = unordered(key >> 32);
        if (slot == 0) {
            best = logit;
            if (!(fabsf(best) < __int_as_float(0x7f800000))) {
                sum = 1.0f;
                break;
            }
        }
#pragma unroll
        for (int i = 0; i < kOwn; ++i)
            if (own[i] == key) own[i] = 0;
        const float share = expf(logit - best);
        sum += share;
        if (lane == slot) {
            expert = static_cast<int>(~static_cast<unsigned>(key));
            weight = share;
        }
    }
    if (lane < topk) {
        ids[row * topk + lane] = expert;
        weights[row * topk + lane] = weight / sum;
    }
}

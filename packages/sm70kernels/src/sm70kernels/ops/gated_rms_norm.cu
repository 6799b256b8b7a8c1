// gated_rms_norm: V / 8 lanes a head, 8 of its values each, so the mean square is a butterfly among them: no shared memory, no barrier.
#include "reduce.cuh"
#include "vector.cuh"

constexpr int kLanes = V / 8;

// 1 / (1 + e^-z); 0 and 1 in the limits.
__device__ __forceinline__ float sigmoid(float z) { return 1.0f / (1.0f + expf(-z)); }

// z / (1 + e^-z). It is -0 in float from -104 down, so the floor changes no finite input; it turns silu(-inf) from NaN to its limit.
__device__ __forceinline__ float silu(float z) {
    const float floored = z < -128.0f ? -128.0f : z;
    return floored / (1.0f + expf(-floored));
}

template <bool kSilu>
__device__ __forceinline__ void norm(
    const __half* o, const __half* z, long long z_row, long long z_head, const float* weight, float eps, int heads, __half* out) {
    const int head = blockIdx.x * (THREADS / kLanes) + threadIdx.x / kLanes;
    const int at = threadIdx.x % kLanes * 8;
    const bool active = head < heads;  // the others still take part in their warp's butterfly
    const long long from = static_cast<long long>(head) * V + at;
    const Half8 values = active ? load8(o + from) : zero8();
    const Half8 gates = active ? load8(z + head / HV * z_row + head % HV * z_head + at) : zero8();
    float factor[8];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const float4 four = __ldg(reinterpret_cast<const float4*>(weight + at) + i);
        factor[4 * i] = four.x, factor[4 * i + 1] = four.y, factor[4 * i + 2] = four.z, factor[4 * i + 3] = four.w;
    }
    float x[8], gate[8];
    widen(values, x);
    widen(gates, gate);
    float square = 0.0f;
#pragma unroll
    for (int j = 0; j < 8; ++j) square = fmaf(x[j], x[j], square);
    const float scale = rsqrtf(group_sum<kLanes>(square) / V + eps);
    if (!active) return;
#pragma unroll
    for (int j = 0; j < 8; ++j) x[j] *= scale;
    widen(narrow(x), x);  // the normalised value is rounded before the weight
#pragma unroll
    for (int j = 0; j < 8; ++j) x[j] = x[j] * factor[j] * (kSilu ? silu(gate[j]) : sigmoid(gate[j]));
    store8(out + from, narrow(x));
}

extern "C" __global__ void __launch_bounds__(THREADS, 2)
gated_rms_norm_sigmoid(const __half* __restrict__ o,                // [M,HV,V]
                       const __half* __restrict__ z,                // [M,HV,V] with these strides, in halves
                       long long z_row, long long z_head,
                       const float* __restrict__ weight,            // [V]
                       float eps, int heads,                        // M * HV
                       __half* __restrict__ out) {                  // [M,HV,V], written
    norm<false>(o, z, z_row, z_head, weight, eps, heads, out);
}

extern "C" __global__ void __launch_bounds__(THREADS, 2)
gated_rms_norm_silu(const __half* __restrict__ o,                   // as gated_rms_norm_sigmoid
                    const __half* __restrict__ z, long long z_row, long long z_head, const float* __restrict__ weight,
                    float eps, int heads, __half* __restrict__ out) {
    norm<true>(o, z, z_row, z_head, weight, eps, heads, out);
}

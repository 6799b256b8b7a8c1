// kv_dequant: one warp a row and head; a lane reads 8 codes (or halves) of the head's keys and of its values and writes 8 halves of each.
// A row of no cell of the pool becomes zeros, and nothing is read for it. One entry a storage format.
#include "kv_format.cuh"

static_assert(D % 8 == 0 && D <= 256, "a warp covers a head with 8 values a lane");

// The cell and head this lane reads and the values it writes. `write` is -1 for a lane that has none, `read` for a row without a cell.
struct Place {
    long long write, read;
    long long scale;  // cell * HK + head
};

__device__ __forceinline__ Place locate(const long long* kv_index, int rows, long long cells) {
    const int unit = blockIdx.x * (THREADS / 32) + threadIdx.x / 32;
    const int lane = threadIdx.x % 32 * 8;
    if (unit >= rows * HK || lane >= D) return {-1, -1, -1};
    Place place{static_cast<long long>(unit) * D + lane, -1, -1};
    const long long index = kv_index[unit / HK];
    if (index >= 0 && index < cells) {
        place.scale = index * HK + unit % HK;
        place.read = place.scale * D + lane;
    }
    return place;
}

__device__ __forceinline__ uint2 load_codes(const void* from, const Place& place) {
    return __ldg(reinterpret_cast<const uint2*>(static_cast<const unsigned char*>(from) + place.read));
}

extern "C" __global__ void __launch_bounds__(THREADS, 2)
kv_dequant_f16(const __half* __restrict__ k_cache,            // [B,P,HK,D]
               const __half* __restrict__ v_cache,            // [B,P,HK,D]
               const long long* __restrict__ kv_index,        // [M], cells or -1
               int rows, long long cells,                     // M, B * P
               __half* __restrict__ k,                        // [M,HK,D], written
               __half* __restrict__ v) {                      // [M,HK,D], written
    const Place place = locate(kv_index, rows, cells);
    if (place.write < 0) return;
    Half8 key = zero8(), value = zero8();
    if (place.read >= 0) {
        key = load8(k_cache + place.read);
        value = load8(v_cache + place.read);
    }
    store8(k + place.write, key);
    store8(v + place.write, value);
}

extern "C" __global__ void __launch_bounds__(THREADS, 2)
kv_dequant_e4m3(const unsigned char* __restrict__ k_cache,    // [B,P,HK,D] codes
                const unsigned char* __restrict__ v_cache,    // [B,P,HK,D] codes
                const long long* __restrict__ kv_index, int rows, long long cells,
                const float* __restrict__ k_scale,            // one, of all keys
                const float* __restrict__ v_scale,            // one, of all values
                __half* __restrict__ k, __half* __restrict__ v) {
    const Place place = locate(kv_index, rows, cells);
    if (place.write < 0) return;
    Half8 key = zero8(), value = zero8();
    if (place.read >= 0) {
        const uint2 key_codes = load_codes(k_cache, place), value_codes = load_codes(v_cache, place);
        key = scaled8(decode8_e4m3(key_codes), __ldg(k_scale));
        value = scaled8(decode8_e4m3(value_codes), __ldg(v_scale));
    }
    store8(k + place.write, key);
    store8(v + place.write, value);
}

extern "C" __global__ void __launch_bounds__(THREADS, 2)
kv_dequant_i8(const signed char* __restrict__ k_cache,        // [B,P,HK,D] codes
              const signed char* __restrict__ v_cache,        // [B,P,HK,D] codes
              const long long* __restrict__ kv_index, int rows, long long cells,
              const float* __restrict__ k_scales,             // [B,P,HK]
              const float* __restrict__ v_scales,             // [B,P,HK]
              __half* __restrict__ k, __half* __restrict__ v) {
    const Place place = locate(kv_index, rows, cells);
    if (place.write < 0) return;
    Half8 key = zero8(), value = zero8();
    if (place.read >= 0) {
        const uint2 key_codes = load_codes(k_cache, place), value_codes = load_codes(v_cache, place);
        key = scaled8(decode8_i8(key_codes), __ldg(k_scales + place.scale));
        value = scaled8(decode8_i8(value_codes), __ldg(v_scales + place.scale));
    }
    store8(k + place.write, key);
    store8(v + place.write, value);
}

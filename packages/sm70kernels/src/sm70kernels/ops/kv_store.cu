// kv_store: one warp a row and head; a lane holds 8 of the head's D keys and 8 of its values, and stores them with one access each.
// Rows of no cell of the pool are left before anything of them is read. One entry a storage format.
#include "kv_format.cuh"
#include "reduce.cuh"

static_assert(D % 8 == 0 && D <= 256, "a warp covers a head with 8 values a lane");

struct Place {
    long long row;   // m * HK + head
    long long cell;  // cell * HK + head; -1 for a row without one
    int lane;        // first of this lane's values in the head
    bool active;     // whether the head reaches this lane
};

// Where this warp reads and writes, given the rows M and the pool's cells B * P.
__device__ __forceinline__ Place locate(const long long* kv_index, int rows, long long cells) {
    const int unit = blockIdx.x * (THREADS / 32) + threadIdx.x / 32;
    const int lane = threadIdx.x % 32 * 8;
    Place place{unit, -1, lane, lane < D};
    if (unit >= rows * HK) return place;
    const long long index = kv_index[unit / HK];
    if (index >= 0 && index < cells) place.cell = index * HK + unit % HK;
    return place;
}

__device__ __forceinline__ void store_codes(void* to, const Place& place, uint2 codes) {
    if (place.active) *reinterpret_cast<uint2*>(static_cast<unsigned char*>(to) + place.cell * D + place.lane) = codes;
}

// This lane's 8 values of the row; +0 beyond the end of the head.
__device__ __forceinline__ void load_row(const __half* from, const Place& place, float (&value)[8]) {
    widen(place.active ? load8(from + place.row * D + place.lane) : zero8(), value);
}

extern "C" __global__ void __launch_bounds__(THREADS, 2)
kv_store_f16(const __half* __restrict__ k,               // [M,HK,D]
             const __half* __restrict__ v,               // [M,HK,D]
             const long long* __restrict__ kv_index,     // [M], cells or -1
             int rows, long long cells,                  // M, B * P
             __half* __restrict__ k_cache,               // [B,P,HK,D], rows of named cells written
             __half* __restrict__ v_cache) {             // likewise
    const Place place = locate(kv_index, rows, cells);
    if (place.cell < 0 || !place.active) return;
    const Half8 key = load8(k + place.row * D + place.lane), value = load8(v + place.row * D + place.lane);
    store8(k_cache + place.cell * D + place.lane, key);
    store8(v_cache + place.cell * D + place.lane, value);
}

extern "C" __global__ void __launch_bounds__(THREADS, 2)
kv_store_e4m3(const __half* __restrict__ k, const __half* __restrict__ v, const long long* __restrict__ kv_index, int rows, long long cells,
              unsigned char* __restrict__ k_cache,       // [B,P,HK,D] codes, rows of named cells written
              unsigned char* __restrict__ v_cache,       // likewise
              const float* __restrict__ k_scale,         // one, of all keys
              const float* __restrict__ v_scale) {       // one, of all values
    const Place place = locate(kv_index, rows, cells);
    if (place.cell < 0) return;
    float key[8], value[8];
    load_row(k, place, key);
    load_row(v, place, value);
    store_codes(k_cache, place, encode8_e4m3(key, __ldg(k_scale)));
    store_codes(v_cache, place, encode8_e4m3(value, __ldg(v_scale)));
}

// The bits of the largest magnitude of a row, as floats: integers order magnitudes, infinity and NaN alike.
__device__ __forceinline__ unsigned largest(const float (&value)[8]) {
    unsigned most = 0;
#pragma unroll
    for (int i = 0; i < 8; ++i) most = max(most, __float_as_uint(fabsf(value[i])));
    return warp_max(most);
}

extern "C" __global__ void __launch_bounds__(THREADS, 2)
kv_store_i8(const __half* __restrict__ k, const __half* __restrict__ v, const long long* __restrict__ kv_index, int rows, long long cells,
            signed char* __restrict__ k_cache,           // [B,P,HK,D] codes, rows of named cells written
            signed char* __restrict__ v_cache,           // likewise
            float* __restrict__ k_scales,                // [B,P,HK], of named cells written
            float* __restrict__ v_scales) {              // likewise
    const Place place = locate(kv_index, rows, cells);
    if (place.cell < 0) return;
    float key[8], value[8];
    load_row(k, place, key);
    load_row(v, place, value);
    const float key_scale = scale_i8(largest(key)), value_scale = scale_i8(largest(value));
    store_codes(k_cache, place, encode8_i8(key, key_scale));
    store_codes(v_cache, place, encode8_i8(value, value_scale));
    if (place.lane) return;
    k_scales[place.cell] = key_scale;
    v_scales[place.cell] = value_scale;
}

// read_only: reads `count` 16-byte words and does nothing else, four loads in flight a thread: what a stream of reads can reach here.
// The words are combined so that no load can be left out; *found is written only if they combine to `sentinel`.
extern "C" __global__ void __launch_bounds__(THREADS)
read_only(const uint4* __restrict__ from, long long count, unsigned sentinel, unsigned* __restrict__ found) {
    const long long step = static_cast<long long>(gridDim.x) * THREADS;
    long long at = static_cast<long long>(blockIdx.x) * THREADS + threadIdx.x;
    unsigned all = 0;
    for (; at + 3 * step < count; at += 4 * step) {
        uint4 word[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) word[i] = __ldg(from + at + i * step);
#pragma unroll
        for (int i = 0; i < 4; ++i) all ^= word[i].x ^ word[i].y ^ word[i].z ^ word[i].w;
    }
    for (; at < count; at += step) {
        const uint4 word = __ldg(from + at);
        all ^= word.x ^ word.y ^ word.z ^ word.w;
    }
    if (all == sentinel) *found = all;
}

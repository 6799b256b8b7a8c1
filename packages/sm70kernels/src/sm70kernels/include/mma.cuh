// Volta's tensor instruction, mma.sync.m8n8k4: a warp computes four independent 8 x 8 x 4 products, one for each quad-pair.
//
// Quad-pair q is the lanes 4q..4q+3 and 16+4q..16+4q+3. Of its 8 lanes each holds 4 halves of A and of B and 8 floats of C; the functions
// below say which. Layout: kRow is A[m][k] or B[k][n] with the second index along a fragment's elements, kCol with the first.
//
// Quad-pairs along N (QPN): all four multiply the same 8 rows of x by 8 columns each, so that a warp covers 8 rows by 32 columns and every
// weight is held by exactly one lane: A row-major from x[m][k], B column-major from w[n][k].
#pragma once

enum class Layout { kRow, kCol };

__device__ __forceinline__ constexpr int quad_pair(int lane) { return (lane >> 2) & 3; }

// The one of m (A row-major, B column-major: n) that is the same for all elements of a lane's fragment.
__device__ __forceinline__ constexpr int fragment_outer(int lane) { return (lane & 3) + 4 * (lane >> 4); }

template <Layout kLayout>
__device__ __forceinline__ constexpr int a_row(int lane, int i) {
    return kLayout == Layout::kRow ? fragment_outer(lane) : i + 4 * (lane >> 4);
}

template <Layout kLayout>
__device__ __forceinline__ constexpr int a_k(int lane, int i) {
    return kLayout == Layout::kRow ? i : lane & 3;
}

template <Layout kLayout>
__device__ __forceinline__ constexpr int b_k(int lane, int i) {
    return kLayout == Layout::kRow ? lane & 3 : i;
}

template <Layout kLayout>
__device__ __forceinline__ constexpr int b_column(int lane, int i) {
    return kLayout == Layout::kRow ? i + 4 * (lane >> 4) : fragment_outer(lane);
}

__device__ __forceinline__ constexpr int c_row(int lane, int i) { return (lane & 1) + (i & 2) + 4 * (lane >> 4); }

__device__ __forceinline__ constexpr int c_column(int lane, int i) { return (i & 4) + (lane & 2) + (i & 1); }

// QPN: the column of the 32-column tile whose weights a lane holds, and the one that element i of its sum belongs to.
__device__ __forceinline__ constexpr int qpn_column(int lane) { return 8 * quad_pair(lane) + fragment_outer(lane); }

__device__ __forceinline__ constexpr int qpn_c_column(int lane, int i) { return 8 * quad_pair(lane) + c_column(lane, i); }

#define SM70_MMA(a_layout, b_layout)                                                                                                \
    asm volatile("mma.sync.aligned.m8n8k4." a_layout "." b_layout ".f32.f16.f16.f32 {%0,%1,%2,%3,%4,%5,%6,%7}, {%8,%9}, {%10,%11}, " \
                 "{%0,%1,%2,%3,%4,%5,%6,%7};"                                                                                       \
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]), "+f"(c[4]), "+f"(c[5]), "+f"(c[6]), "+f"(c[7])                   \
                 : "r"(a0), "r"(a1), "r"(b0), "r"(b1))

// c += a · b. Registers hold two halves each, element 0 in the low half of the first. All 32 lanes must call it together.
template <Layout kA = Layout::kRow, Layout kB = Layout::kCol>
__device__ __forceinline__ void mma_884(float (&c)[8], unsigned a0, unsigned a1, unsigned b0, unsigned b1) {
    if constexpr (kA == Layout::kRow && kB == Layout::kCol) SM70_MMA("row", "col");
    if constexpr (kA == Layout::kRow && kB == Layout::kRow) SM70_MMA("row", "row");
    if constexpr (kA == Layout::kCol && kB == Layout::kCol) SM70_MMA("col", "col");
    if constexpr (kA == Layout::kCol && kB == Layout::kRow) SM70_MMA("col", "row");
}

#undef SM70_MMA

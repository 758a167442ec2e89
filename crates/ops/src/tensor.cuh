// Tensor cores of a Hopper or Ampere GPU by warp: products of 16 × 16 by 16 × 8 halves, or of 16 × 8 by 8 × 8 floats cut to TF32, in f32;
// the loads of their operands from shared memory, and copies into it that run beside the arithmetic. Nothing here is about one op.

// Copies 16 bytes, or writes zeros if they are not to be read. Both places lie on boundaries of 16.
__device__ __forceinline__ void copy_async(void *to, const void *from, bool reads) {
    const u32 address = (u32)__cvta_generic_to_shared(to);
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(address), "l"(from), "r"(reads ? 16 : 0) : "memory");
}
__device__ __forceinline__ void end_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Waits until all but the last LEFT groups of copies are done.
template <int LEFT> __device__ __forceinline__ void await_copies() { asm volatile("cp.async.wait_group %0;" ::"n"(LEFT) : "memory"); }

// Four matrices of 8 × 8 halves (or, not transposed, of 8 × 4 floats, one to a lane): lane 8·i + r gives the address of row r of matrix i. Of each matrix a lane gets the elements 2·(lane % 4)
// and the next of row lane / 4; transposed, of column lane / 4.
__device__ __forceinline__ void load_matrices(u32 (&to)[4], const void *row) {
    const u32 address = (u32)__cvta_generic_to_shared(row);
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3]) : "r"(address) : "memory");
}
__device__ __forceinline__ void load_transposed(u32 (&to)[4], const void *row) {
    const u32 address = (u32)__cvta_generic_to_shared(row);
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3]) : "r"(address) : "memory");
}

// c += a · b. A lane has of c the rows lane / 4 and lane / 4 + 8, of each the columns 2·(lane % 4) and the next.
template <typename H> __device__ __forceinline__ void multiply(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1);
template <> __device__ __forceinline__ void multiply<bf16>(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
template <> __device__ __forceinline__ void multiply<f16>(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Floats lose their lowest 13 bits on the way, as in the vendor's products in TF32. A lane has of a the columns lane % 4 and lane % 4 + 4 of
// the rows lane / 4 and lane / 4 + 8, of b the same rows of column lane / 4.
template <> __device__ __forceinline__ void multiply<float>(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Two numbers as halves, the first in the lower bits.
template <typename H> __device__ __forceinline__ u32 pack_pair(float first, float second);
template <> __device__ __forceinline__ u32 pack_pair<bf16>(float first, float second) {
    u32 pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(second), "f"(first));
    return pair;
}
template <> __device__ __forceinline__ u32 pack_pair<f16>(float first, float second) {
    u32 pair;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(second), "f"(first));
    return pair;
}

#if GROUPED
// Products by a group of four warps on a Hopper, 64 × 16 by 16 × 64 halves: each warp gives 16 rows of the left factor and gets those of the
// result as above, eight columns at a time. The right factor lies in shared memory in rows of 128 bytes from a boundary of 1024 on, of
// which row r has its pieces of 16 bytes at places exclusive-or r % 8.
constexpr int ROW_BYTES = 128;
__device__ __forceinline__ int piece_of_row(int row, int piece) { return row * (ROW_BYTES / 16) + (piece ^ row % 8); }

// Registers that products read or write are to hold their values before `begin_products`, and are not to be read before `end_products`: the
// compiler knows nothing of what goes on between. To be called right before the one and right after the other.
template <int N> __device__ __forceinline__ void settle(float (&values)[N][4]) {
    #pragma unroll
    for (int at = 0; at < N * 4; at++) asm volatile("" : "+f"(values[at / 4][at % 4])::"memory");
}
template <int N> __device__ __forceinline__ void settle(u32 (&values)[N][4]) {
    #pragma unroll
    for (int at = 0; at < N * 4; at++) asm volatile("" : "+r"(values[at / 4][at % 4])::"memory");
}

// Before products: what was copied is to be seen by them. By every thread, after it awaited its copies and before the block meets.
__device__ __forceinline__ void show_copies() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
__device__ __forceinline__ void begin_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
// Ends products: their results may be used, and the factors be written.
__device__ __forceinline__ void end_products() { asm volatile("wgmma.commit_group.sync.aligned;\nwgmma.wait_group.sync.aligned 0;" ::: "memory"); }

// Where a right factor begins: so many bytes into such rows, were they in order. Eight rows are 1024 bytes.
__device__ __forceinline__ u64 right_factor(const void *rows, int bytes) {
    const u32 address = (u32)__cvta_generic_to_shared(rows) + bytes;
    return (u64)((address & 0x3ffffu) >> 4) | 1ull << 16 | 64ull << 32 | 1ull << 62;
}

#define GROUP_PRODUCT(H) \
    asm volatile( \
        "{\n.reg .pred adds;\nsetp.ne.b32 adds, %37, 0;\n" \
        "wgmma.mma_async.sync.aligned.m64n64k16.f32." H "." H " {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, {%32, %33, %34, %35}, %36, adds, 1, 1, %38;\n}" \
        : "+f"(c[0][0]), "+f"(c[0][1]), "+f"(c[0][2]), "+f"(c[0][3]), "+f"(c[1][0]), "+f"(c[1][1]), "+f"(c[1][2]), "+f"(c[1][3]), \
          "+f"(c[2][0]), "+f"(c[2][1]), "+f"(c[2][2]), "+f"(c[2][3]), "+f"(c[3][0]), "+f"(c[3][1]), "+f"(c[3][2]), "+f"(c[3][3]), \
          "+f"(c[4][0]), "+f"(c[4][1]), "+f"(c[4][2]), "+f"(c[4][3]), "+f"(c[5][0]), "+f"(c[5][1]), "+f"(c[5][2]), "+f"(c[5][3]), \
          "+f"(c[6][0]), "+f"(c[6][1]), "+f"(c[6][2]), "+f"(c[6][3]), "+f"(c[7][0]), "+f"(c[7][1]), "+f"(c[7][2]), "+f"(c[7][3]) \
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(right), "r"((int)adds), "n"(ACROSS ? 1 : 0))

// c = a · b, or c += a · b: rows of the right factor's memory are columns of b, or (ACROSS) rows of b.
template <typename H, bool ACROSS> struct GroupProduct;
template <bool ACROSS> struct GroupProduct<bf16, ACROSS> {
    static __device__ __forceinline__ void run(float (*c)[4], const u32 (&a)[4], u64 right, bool adds) { GROUP_PRODUCT("bf16"); }
};
template <bool ACROSS> struct GroupProduct<f16, ACROSS> {
    static __device__ __forceinline__ void run(float (*c)[4], const u32 (&a)[4], u64 right, bool adds) { GROUP_PRODUCT("f16"); }
};
#else
__device__ __forceinline__ void show_copies() {}
__device__ __forceinline__ void begin_products() {}
__device__ __forceinline__ void end_products() {}
template <typename T> __device__ __forceinline__ void settle(T &) {}
#endif

// 2ˣ within two units in the last place.
__device__ __forceinline__ float power_of_two(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// Adds the parts of all ranks in the order that is promised: one balanced tree over ranks, the lower ones on the left. A counter of partial
// sums, a bit per level, as over grains; what is left in the end is added from the smallest run to the largest. `ELEMENT` is the type, `KERNEL`
// the name. Halves are rounded after every addition, and whole numbers wrap.

#define LEVELS 16

__device__ __forceinline__ float sum(float a, float b) { return a + b; }
__device__ __forceinline__ bf16 sum(bf16 a, bf16 b) { return from_float<bf16>(to_float(a) + to_float(b)); }
__device__ __forceinline__ f16 sum(f16 a, f16 b) { return from_float<f16>(to_float(a) + to_float(b)); }
__device__ __forceinline__ int sum(int a, int b) { return (int)((u32)a + (u32)b); }
__device__ __forceinline__ i64 sum(i64 a, i64 b) { return (i64)((u64)a + (u64)b); }

template <int N> __device__ __forceinline__ Pack<ELEMENT, N> sum_packs(const Pack<ELEMENT, N> &a, const Pack<ELEMENT, N> &b) {
    Pack<ELEMENT, N> both;
    #pragma unroll
    for (int lane = 0; lane < N; lane++) both.at[lane] = sum(a.at[lane], b.at[lane]);
    return both;
}

template <int N> __device__ __forceinline__ void add_pack(const ELEMENT *own, const ELEMENT *others, i64 slot, int rank, int ranks, ELEMENT *to) {
    Pack<ELEMENT, N> levels[LEVELS], all;
    for (int other = 0; other < ranks; other++) {
        Pack<ELEMENT, N> carry = load_pack<ELEMENT, N>(other == rank ? own : others + other * slot);
        bool placed = false;
        #pragma unroll
        for (int level = 0; level < LEVELS; level++) {
            if (!placed && (other >> level & 1)) carry = sum_packs<N>(levels[level], carry);
            else if (!placed) {
                levels[level] = carry;
                placed = true;
            }
        }
    }
    bool begun = false;
    #pragma unroll
    for (int level = 0; level < LEVELS; level++) {
        if (ranks >> level & 1) {
            all = begun ? sum_packs<N>(levels[level], all) : levels[level];
            begun = true;
        }
    }
    store_pack<ELEMENT, N>(to, all);
}

extern "C" __global__ void KERNEL(
    const ELEMENT *own,     // [elements], of this rank
    const ELEMENT *others,  // [ranks, slot], of which that of this rank is not read
    i64 slot, int rank, int ranks,
    ELEMENT *to,            // [elements], may be `own`
    i64 elements
) {
    constexpr int WIDE = 16 / sizeof(ELEMENT);
    const i64 stride = (i64)gridDim.x * blockDim.x, first = (i64)blockIdx.x * blockDim.x + threadIdx.x;
    const bool aligned = ((u64)own | (u64)others | (u64)to | (u64)slot * sizeof(ELEMENT)) % 16 == 0;
    const i64 packs = aligned ? elements / WIDE : 0;
    for (i64 at = first; at < packs; at += stride)
        add_pack<WIDE>(own + WIDE * at, others + WIDE * at, slot, rank, ranks, to + WIDE * at);
    for (i64 at = WIDE * packs + first; at < elements; at += stride)
        add_pack<1>(own + at, others + at, slot, rank, ranks, to + at);
}

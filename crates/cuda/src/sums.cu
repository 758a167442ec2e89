// Adds one grain's term to the partial sums over grains: a binary counter whose levels are `level_elements` apart. A grain closes as many
// runs as it has trailing one bits; runs of equal length are always added left to right.

template <int N> __device__ __forceinline__ void add_pack(const float *term, float *levels, i64 level_elements, int depth, int closes) {
    Pack<float, N> carry = load_pack<float, N>(term);
    for (int close = 0; close < closes; close++) {
        const Pack<float, N> before = load_pack<float, N>(levels + (depth - 1 - close) * level_elements);
        #pragma unroll
        for (int lane = 0; lane < N; lane++) carry.at[lane] = before.at[lane] + carry.at[lane];
    }
    store_pack<float, N>(levels + (depth - closes) * level_elements, carry);
}

extern "C" __global__ void add_term(
    const float *term,      // [elements]
    float *levels,          // [depth + 1, level_elements], where this sum starts
    i64 level_elements, int depth, int closes, i64 elements
) {
    const i64 stride = (i64)gridDim.x * blockDim.x, own = (i64)blockIdx.x * blockDim.x + threadIdx.x;
    const bool aligned = ((u64)term | (u64)levels | (u64)level_elements * sizeof(float)) % 16 == 0;
    const i64 packs = aligned ? elements / 4 : 0;
    for (i64 at = own; at < packs; at += stride) add_pack<4>(term + 4 * at, levels + 4 * at, level_elements, depth, closes);
    for (i64 at = 4 * packs + own; at < elements; at += stride) add_pack<1>(term + at, levels + at, level_elements, depth, closes);
}

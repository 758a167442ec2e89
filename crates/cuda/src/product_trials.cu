// Operands of products that are tried, and a checksum of what they make.

// A word that depends on all bits of three numbers.
__device__ __forceinline__ u64 mixed(u64 x) {
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBull;
    return x ^ (x >> 31);
}

// Numbers of both signs whose sizes spread over some powers of two.
__device__ __forceinline__ float number(u64 seed, i64 along, i64 other) {
    const u64 word = mixed(mixed(seed * 0x9E3779B97F4A7C15ull + (u64)along) + (u64)other);
    const float size = (float)(1 << (int)(word & 3)) * 0.25f;
    return (unit((u32)(word >> 32)) * 2.0f - 1.0f) * size;
}

// A matrix of a batch as it lies in memory. `depth` is the dim that a product sums over: 0 counts memory's rows, 1 its columns. With
// `half` above zero its second half has the terms of the first in another order, and `negate` their signs turned: such a product is zero
// but for what rounding makes of the order of its sum.
template <typename T> __device__ __forceinline__ void fill(
    T *to, i64 rows, i64 columns, i64 row_stride, i64 batch, i64 batch_stride, int depth, i64 half, i64 factor, int negate, u64 seed
) {
    for (i64 line = blockIdx.x; line < rows * batch; line += gridDim.x) {
        const i64 which = line / rows, row = line % rows;
        T *out = to + which * batch_stride + row * row_stride;
        for (i64 column = threadIdx.x; column < columns; column += blockDim.x) {
            const i64 along = depth ? column : row, other = depth ? row : column;
            const bool second = half > 0 && along >= half;
            const i64 term = second ? (along - half) * factor % half : along;
            const float x = half > 0 && along >= 2 * half ? 0.0f : number(seed + (u64)which, term, other);
            out[column] = from_float<T>(second && negate ? -x : x);
        }
    }
}

#define FILL(T)                                                                                                                     \
    extern "C" __global__ void fill_##T(                                                                                            \
        T *to, i64 rows, i64 columns, i64 row_stride, i64 batch, i64 batch_stride, int depth, i64 half, i64 factor, int negate,     \
        u64 seed                                                                                                                    \
    ) {                                                                                                                             \
        fill<T>(to, rows, columns, row_stride, batch, batch_stride, depth, half, factor, negate, seed);                             \
    }
FILL(float)
FILL(bf16)
FILL(f16)

// Adds a mix of every word and its place to `sum`, which is zero before. Whole numbers give the same sum in any order.
extern "C" __global__ void checksum(
    const u32 *words,       // [count]
    i64 count, u64 *sum
) {
    const i64 stride = (i64)gridDim.x * blockDim.x;
    u64 own = 0;
    for (i64 at = (i64)blockIdx.x * blockDim.x + threadIdx.x; at < count; at += stride) own += mixed(((u64)at << 32) | words[at]);
    atomicAdd(sum, own);
}

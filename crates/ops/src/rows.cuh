// Rows that belong to GROUP threads: a warp, or a whole block. `row_of_group` is past the last row in a warp without one.
#if GROUP == 32
#define ROWS_PER_BLOCK (blockDim.x / WARP)
__device__ __forceinline__ i64 row_of_group() { return (i64)blockIdx.x * ROWS_PER_BLOCK + threadIdx.x / WARP; }
__device__ __forceinline__ int place_in_group() { return threadIdx.x % WARP; }
__device__ __forceinline__ float group_sum(float x) { return warp_sum(x); }
__device__ __forceinline__ float group_max(float x) { return warp_max(x); }
#else
__device__ __forceinline__ i64 row_of_group() { return blockIdx.x; }
__device__ __forceinline__ int place_in_group() { return threadIdx.x; }
__device__ __forceinline__ float group_sum(float x) {
    __shared__ float shared[WARP + 1];
    return block_sum(x, shared);
}
__device__ __forceinline__ float group_max(float x) {
    __shared__ float shared[WARP + 1];
    return block_max(x, shared);
}
#endif

// Calls `f(at, row[at])` for the elements of a row that are this thread's, N of them read at once.
template <int N, typename T, typename F> __device__ __forceinline__ void for_row(const T *row, i64 width, F f) {
    for (i64 at = (i64)place_in_group() * N; at < width; at += GROUP * N) {
        const Pack<T, N> values = load_pack<T, N>(row + at);
        #pragma unroll
        for (int lane = 0; lane < N; lane++) f(at + lane, to_float(values.at[lane]));
    }
}

// `out[at] = f(at, row[at])` in the same way. `out` may be `row`.
template <int N, typename T, typename U, typename F>
__device__ __forceinline__ void map_row(const T *row, U *out, i64 width, F f) {
    for (i64 at = (i64)place_in_group() * N; at < width; at += GROUP * N) {
        const Pack<T, N> values = load_pack<T, N>(row + at);
        Pack<U, N> made;
        #pragma unroll
        for (int lane = 0; lane < N; lane++) made.at[lane] = from_float<U>(f(at + lane, to_float(values.at[lane])));
        store_pack<U, N>(out + at, made);
    }
}

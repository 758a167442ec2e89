// Largest values and where they are. With rows.cuh before it. NaN is larger than all else; among equals the lower index wins.

struct Best {
    float value;
    i64 place;
};

// Whether `a` comes before `b` in falling order.
__device__ __forceinline__ bool beats(float a, float b) { return a > b || (a != a && b == b); }
__device__ __forceinline__ bool comes_first(Best a, Best b) {
    if (a.place < 0 || b.place < 0) return b.place < 0 && a.place >= 0;
    return beats(a.value, b.value) || (!beats(b.value, a.value) && a.place < b.place);
}
__device__ __forceinline__ Best warp_best(Best own) {
    for (int step = WARP / 2; step > 0; step /= 2) {
        const Best other = {__shfl_xor_sync(ALL_LANES, own.value, step), __shfl_xor_sync(ALL_LANES, own.place, step)};
        if (comes_first(other, own)) own = other;
    }
    return own;
}

// The best of what GROUP threads have; all get it.
__device__ __forceinline__ Best group_best(Best own) {
    own = warp_best(own);
#if GROUP > 32
    __shared__ Best shared[WARP];
    if (threadIdx.x % WARP == 0) shared[threadIdx.x / WARP] = own;
    __syncthreads();
    const int lane = threadIdx.x % WARP;
    own = warp_best(lane < GROUP / WARP ? shared[lane] : Best{0.0f, -1});
#endif
    return own;
}

// GROUP threads to a row; a place of −1 is none.
__device__ __forceinline__ Best best_of_row(const I0 *x, i64 row, i64 size) {
    Best best = {0.0f, -1};
    for_row<PACK>(x + row * size, size, [&](i64 at, float value) {
        // Places rise, so an equal one does not win; nothing is larger than NaN.
        if (best.place < 0 || (best.value == best.value && !(value <= best.value))) best = {value, at};
    });
    return group_best(best);
}

// A thread to a column.
__device__ __forceinline__ Best best_of_column(const I0 *x, i64 at, i64 size, i64 inner) {
    const I0 *column = x + at / inner * size * inner + at % inner;
    Best best = {to_float(column[0]), 0};
    for (i64 row = 1; row < size; row++) {
        const float value = to_float(column[row * inner]);
        if (beats(value, best.value)) best = {value, row};
    }
    return best;
}

#define ROW ((i64)blockIdx.x * (blockDim.x / WARP) + threadIdx.x / WARP)
#define COLUMN ((i64)blockIdx.x * blockDim.x + threadIdx.x)

#ifdef O1
extern "C" __global__ void max_of_rows(const I0 *x, O0 *values, int *places, i64 count, i64 size, i64) {
    const i64 row = row_of_group();
    if (row >= count) return;
    const Best best = best_of_row(x, row, size);
    if (place_in_group() != 0) return;
    values[row] = from_float<O0>(best.value);
    places[row] = (int)best.place;
}
extern "C" __global__ void max_of_columns(const I0 *x, O0 *values, int *places, i64 count, i64 size, i64 inner) {
    if (COLUMN >= count) return;
    const Best best = best_of_column(x, COLUMN, size, inner);
    values[COLUMN] = from_float<O0>(best.value);
    places[COLUMN] = (int)best.place;
}

// The k largest of each row in falling order: each is the first of those that come after the one before. A warp to a row.
extern "C" __global__ void top_k(const I0 *x, O0 *values, int *places, i64 rows, i64 size, i64 k) {
    const i64 row = ROW;
    if (row >= rows) return;
    Best last = {0.0f, -1};
    for (i64 rank = 0; rank < k; rank++) {
        Best best = {0.0f, -1};
        for (i64 at = threadIdx.x % WARP; at < size; at += WARP) {
            const Best other = {to_float(x[row * size + at]), at};
            const bool is_left = rank == 0 || (comes_first(last, other) && other.place != last.place);
            if (is_left && comes_first(other, best)) best = other;
        }
        last = warp_best(best);
        if (threadIdx.x % WARP == 0) {
            values[row * k + rank] = from_float<O0>(last.value);
            places[row * k + rank] = (int)last.place;
        }
    }
}
#else
extern "C" __global__ void argmax_of_rows(const I0 *x, int *places, i64 count, i64 size, i64) {
    const i64 row = row_of_group();
    if (row >= count) return;
    const Best best = best_of_row(x, row, size);
    if (place_in_group() == 0) places[row] = (int)best.place;
}
extern "C" __global__ void argmax_of_columns(const I0 *x, int *places, i64 count, i64 size, i64 inner) {
    if (COLUMN < count) places[COLUMN] = (int)best_of_column(x, COLUMN, size, inner).place;
}
#endif

// Sums over dims. Where a sum is cut depends on the number of its terms alone.

// y[row] = Σ x[row, at]: a warp to a row.
extern "C" __global__ void sum_short_rows(const FROM *x, TO *y, i64 rows, i64 inner) {
    const i64 row = (i64)blockIdx.x * (blockDim.x / WARP) + threadIdx.x / WARP;
    const int lane = threadIdx.x % WARP;
    if (row >= rows) return;
    float sum = 0.0f;
    for (i64 at = lane; at < inner; at += WARP) sum += to_float(x[row * inner + at]);
    sum = warp_sum(sum);
    if (lane == 0) y[row] = from_float<TO>(sum);
}

// y[row, chunk] = Σ x[row, at] over the chunk: a block to each.
extern "C" __global__ void sum_long_rows(const FROM *x, TO *y, i64 inner, i64 chunks, i64 chunk_size) {
    __shared__ float shared[WARP + 1];
    const i64 row = blockIdx.x / chunks, start = blockIdx.x % chunks * chunk_size;
    const i64 end = start + chunk_size < inner ? start + chunk_size : inner;
    float sum = 0.0f;
    for (i64 at = start + threadIdx.x; at < end; at += blockDim.x) sum += to_float(x[row * inner + at]);
    sum = block_sum(sum, shared);
    if (threadIdx.x == 0) y[blockIdx.x] = from_float<TO>(sum);
}

#ifndef PACK
#define PACK 1
#endif
#define STRIP (WARP * PACK)
#define LINES 8

// y[outer, chunk, column] = Σ x[outer, row, column] over the chunk's rows. A block has STRIP columns, PACK to a thread, and LINES rows at
// a time. How columns are dealt out changes no sum.
extern "C" __global__ void sum_columns(
    const FROM *x, TO *y, i64 rows, i64 inner, i64 chunks, i64 chunk_size, i64 strips) {
    __shared__ float shared[LINES][STRIP];
    const i64 strip = blockIdx.x % strips, chunk = blockIdx.x / strips % chunks, outer = blockIdx.x / strips / chunks;
    const int lane = threadIdx.x % WARP, line = threadIdx.x / WARP;
    const i64 column = strip * STRIP + lane * PACK;
    const i64 start = chunk * chunk_size, end = start + chunk_size < rows ? start + chunk_size : rows;
    float sums[PACK] = {};
    if (column < inner)
        for (i64 row = start + line; row < end; row += LINES) {
            const Pack<FROM, PACK> values = load_pack<FROM, PACK>(x + (outer * rows + row) * inner + column);
            #pragma unroll
            for (int at = 0; at < PACK; at++) sums[at] += to_float(values.at[at]);
        }
    #pragma unroll
    for (int at = 0; at < PACK; at++) shared[line][at * WARP + lane] = sums[at];
    __syncthreads();
    for (int half = LINES / 2; half > 0; half /= 2) {
        if (line < half)
            #pragma unroll
            for (int at = 0; at < PACK; at++) shared[line][at * WARP + lane] += shared[line + half][at * WARP + lane];
        __syncthreads();
    }
    if (line == 0 && column < inner)
        #pragma unroll
        for (int at = 0; at < PACK; at++)
            y[(outer * chunks + chunk) * inner + column + at] = from_float<TO>(shared[0][at * WARP + lane]);
}

// y[row, chunk] = Σ x[outer, row, at] over all `at` and the chunk's `outer`: a block to each.
extern "C" __global__ void sum_middle(
    const FROM *x, TO *y, i64 outer, i64 rows, i64 inner, i64 chunks, i64 chunk_size) {
    __shared__ float shared[WARP + 1];
    const i64 row = blockIdx.x / chunks, start = blockIdx.x % chunks * chunk_size;
    const i64 end = start + chunk_size < outer ? start + chunk_size : outer;
    float sum = 0.0f;
    const i64 count = (end - start) * inner;
    for (i64 at = threadIdx.x; at < count; at += blockDim.x)
        sum += to_float(x[((start + at / inner) * rows + row) * inner + at % inner]);
    sum = block_sum(sum, shared);
    if (threadIdx.x == 0) y[blockIdx.x] = from_float<TO>(sum);
}

#define EIGHT(T, name) T name##0, T name##1, T name##2, T name##3, T name##4, T name##5, T name##6, T name##7
#define LIST(name) {name##0, name##1, name##2, name##3, name##4, name##5, name##6, name##7}

// Any other pattern: a thread to each of `outputs`, whose dims (the innermost first) are `kept` with strides `kept_step` in x,
// and which sums over the dims `summed`.
extern "C" __global__ void sum_any(
    const FROM *x, TO *y, i64 outputs, i64 terms, EIGHT(i64, kept), EIGHT(i64, kept_step), EIGHT(i64, summed),
    EIGHT(i64, summed_step)) {
    const i64 kept[8] = LIST(kept), kept_step[8] = LIST(kept_step);
    const i64 summed[8] = LIST(summed), summed_step[8] = LIST(summed_step);
    const i64 out = (i64)blockIdx.x * blockDim.x + threadIdx.x;
    if (out >= outputs) return;
    i64 start = 0, left = out;
    #pragma unroll
    for (int dim = 0; dim < 8; dim++) {
        start += left % kept[dim] * kept_step[dim];
        left /= kept[dim];
    }
    double sum = 0.0;
    for (i64 term = 0; term < terms; term++) {
        i64 from = start, rest = term;
        #pragma unroll
        for (int dim = 0; dim < 8; dim++) {
            from += rest % summed[dim] * summed_step[dim];
            rest /= summed[dim];
        }
        sum += (double)to_float(x[from]);
    }
    y[out] = from_float<TO>((float)sum);
}

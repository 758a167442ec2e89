// Layer norm (HAS_MEAN) and rms norm over rows of `n` elements, and their gradients. With rows.cuh before it.

template <typename T> __device__ __forceinline__ Pack<T, PACK> pack_at(const T *from) { return load_pack<T, PACK>(from); }
// Goes along a row, PACK elements at a time.
#define EACH_PACK for (i64 at = (i64)place_in_group() * PACK; at < n; at += GROUP * PACK)

#ifdef FORWARD
extern "C" __global__ void normalize(
    const I0 *x, const I1 *weight,
#if HAS_MEAN
    const I2 *bias,
#endif
    O0 *y,
#if HAS_MEAN
    O1 *means, O2 *rstds,
#else
    O1 *rstds,
#endif
    i64 rows, i64 n, float eps) {
    const i64 row = row_of_group();
    if (row >= rows) return;
    x += row * n;
    float mean = 0.0f;
#if HAS_MEAN
    float sum = 0.0f;
    for_row<PACK>(x, n, [&](i64, float value) { sum += value; });
    mean = group_sum(sum) / (float)n;
#endif
    float squares = 0.0f;
    for_row<PACK>(x, n, [&](i64, float value) { squares = fmaf(value - mean, value - mean, squares); });
    const float rstd = 1.0f / sqrtf(group_sum(squares) / (float)n + eps);
    if (place_in_group() == 0) {
#if HAS_MEAN
        means[row] = from_float<O1>(mean);
        rstds[row] = from_float<O2>(rstd);
#else
        rstds[row] = from_float<O1>(rstd);
#endif
    }
    EACH_PACK {
        const auto values = pack_at(x + at);
        const auto weights = pack_at(weight + at);
#if HAS_MEAN
        const auto biases = pack_at(bias + at);
#endif
        Pack<O0, PACK> made;
        #pragma unroll
        for (int lane = 0; lane < PACK; lane++) {
            const float normal = (to_float(values.at[lane]) - mean) * rstd;
#if HAS_MEAN
            made.at[lane] = from_float<O0>(fmaf(normal, to_float(weights.at[lane]), to_float(biases.at[lane])));
#else
            made.at[lane] = from_float<O0>(normal * to_float(weights.at[lane]));
#endif
        }
        store_pack<O0, PACK>(y + row * n + at, made);
    }
}
#else

// The operands of a gradient: x, weight, each row's mean (HAS_MEAN) and rstd, and g.
#if HAS_MEAN
#define STATISTICS const I2 *means, const I3 *rstds, const I4 *g
#define MEAN(row) to_float(means[row])
#else
#define STATISTICS const I2 *rstds, const I3 *g
#define MEAN(row) 0.0f
#endif

extern "C" __global__ void differentiate(const I0 *x, const I1 *weight, STATISTICS, O0 *dx, i64 rows, i64 n) {
    const i64 row = row_of_group();
    if (row >= rows) return;
    x += row * n;
    g += row * n;
    const float mean = MEAN(row), rstd = to_float(rstds[row]);
    float shift = 0.0f, slope = 0.0f;
    EACH_PACK {
        const auto values = pack_at(x + at);
        const auto gradients = pack_at(g + at);
        const auto weights = pack_at(weight + at);
        #pragma unroll
        for (int lane = 0; lane < PACK; lane++) {
            const float weighted = to_float(gradients.at[lane]) * to_float(weights.at[lane]);
            shift += weighted;
            slope = fmaf(weighted, (to_float(values.at[lane]) - mean) * rstd, slope);
        }
    }
#if HAS_MEAN
    shift = group_sum(shift) / (float)n;
#else
    shift = 0.0f;
#endif
    slope = group_sum(slope) / (float)n;
    EACH_PACK {
        const auto values = pack_at(x + at);
        const auto gradients = pack_at(g + at);
        const auto weights = pack_at(weight + at);
        Pack<O0, PACK> made;
        #pragma unroll
        for (int lane = 0; lane < PACK; lane++) {
            const float normal = (to_float(values.at[lane]) - mean) * rstd;
            const float weighted = to_float(gradients.at[lane]) * to_float(weights.at[lane]);
            made.at[lane] = from_float<O0>(rstd * fmaf(-normal, slope, weighted - shift));
        }
        store_pack<O0, PACK>(dx + row * n + at, made);
    }
}

#define STRIP (WARP * PACK)
#define LINES 8

// Adds what the lines of a block have of STRIP columns, always in the same order.
__device__ __forceinline__ void add_lines(float (*shared)[STRIP], const float *own, float *to, bool is_there) {
    const int lane = threadIdx.x % WARP, line = threadIdx.x / WARP;
    #pragma unroll
    for (int at = 0; at < PACK; at++) shared[line][at * WARP + lane] = own[at];
    __syncthreads();
    for (int half = LINES / 2; half > 0; half /= 2) {
        if (line < half)
            #pragma unroll
            for (int at = 0; at < PACK; at++) shared[line][at * WARP + lane] += shared[line + half][at * WARP + lane];
        __syncthreads();
    }
    if (line == 0 && is_there)
        #pragma unroll
        for (int at = 0; at < PACK; at++) to[at] = shared[0][at * WARP + lane];
    __syncthreads();
}

// What a chunk of rows adds to the gradients of weight and bias: `parts` is [chunks, n] of weights, then the same of biases. A block has
// STRIP columns, PACK to a thread, and LINES rows at a time.
extern "C" __global__ void parameter_parts(
    const I0 *x, STATISTICS, float *parts, i64 rows, i64 n, i64 chunk_size) {
    __shared__ float shared[LINES][STRIP];
    const int lane = threadIdx.x % WARP, line = threadIdx.x / WARP;
    const i64 column = (i64)blockIdx.x * STRIP + lane * PACK;
    const i64 start = blockIdx.y * chunk_size, end = start + chunk_size < rows ? start + chunk_size : rows;
    float dweight[PACK] = {}, dbias[PACK] = {};
    if (column < n)
        for (i64 row = start + line; row < end; row += LINES) {
            const float mean = MEAN(row), rstd = to_float(rstds[row]);
            const auto values = pack_at(x + row * n + column);
            const auto gradients = pack_at(g + row * n + column);
            #pragma unroll
            for (int at = 0; at < PACK; at++) {
                const float gradient = to_float(gradients.at[at]);
                dweight[at] = fmaf(gradient, (to_float(values.at[at]) - mean) * rstd, dweight[at]);
                dbias[at] += gradient;
            }
        }
    add_lines(shared, dweight, parts + blockIdx.y * n + column, column < n);
#if HAS_MEAN
    add_lines(shared, dbias, parts + (gridDim.y + blockIdx.y) * n + column, column < n);
#endif
}

#if GROUP == 32
// Both of the above in one pass over x and g, with the same bits: a block has a chunk of rows, a warp every LINES-th of them.
extern "C" __global__ void differentiate_all(
    const I0 *x, const I1 *weight, STATISTICS, O0 *dx, float *parts, i64 rows, i64 n, i64 chunk_size) {
    __shared__ float shared[LINES][STRIP];
    const int lane = threadIdx.x % WARP, line = threadIdx.x / WARP;
    const i64 start = blockIdx.x * chunk_size, end = start + chunk_size < rows ? start + chunk_size : rows;
    float dweight[STRIPS][PACK] = {}, dbias[STRIPS][PACK] = {};
    for (i64 row = start + line; row < end; row += LINES) {
        const float mean = MEAN(row), rstd = to_float(rstds[row]);
        float normal[STRIPS][PACK], weighted[STRIPS][PACK], shift = 0.0f, slope = 0.0f;
        #pragma unroll
        for (int strip = 0; strip < STRIPS; strip++) {
            const i64 column = strip * STRIP + lane * PACK;
            if (column >= n) continue;
            const auto values = pack_at(x + row * n + column);
            const auto gradients = pack_at(g + row * n + column);
            const auto weights = pack_at(weight + column);
            #pragma unroll
            for (int at = 0; at < PACK; at++) {
                const float gradient = to_float(gradients.at[at]);
                normal[strip][at] = (to_float(values.at[at]) - mean) * rstd;
                weighted[strip][at] = gradient * to_float(weights.at[at]);
                shift += weighted[strip][at];
                slope = fmaf(weighted[strip][at], normal[strip][at], slope);
                dweight[strip][at] = fmaf(gradient, normal[strip][at], dweight[strip][at]);
                dbias[strip][at] += gradient;
            }
        }
#if HAS_MEAN
        shift = group_sum(shift) / (float)n;
#else
        shift = 0.0f;
#endif
        slope = group_sum(slope) / (float)n;
        #pragma unroll
        for (int strip = 0; strip < STRIPS; strip++) {
            const i64 column = strip * STRIP + lane * PACK;
            if (column >= n) continue;
            Pack<O0, PACK> made;
            #pragma unroll
            for (int at = 0; at < PACK; at++)
                made.at[at] = from_float<O0>(rstd * fmaf(-normal[strip][at], slope, weighted[strip][at] - shift));
            store_pack<O0, PACK>(dx + row * n + column, made);
        }
    }
    #pragma unroll
    for (int strip = 0; strip < STRIPS; strip++) {
        const i64 column = strip * STRIP + lane * PACK;
        add_lines(shared, dweight[strip], parts + blockIdx.x * n + column, column < n);
#if HAS_MEAN
        add_lines(shared, dbias[strip], parts + (gridDim.x + blockIdx.x) * n + column, column < n);
#endif
    }
}
#endif
#endif

// Batch norm of x = [rows, channels], the channels of images last: one mean and variance to a channel.
//
// A block takes LANES packs of PACK channels, a slab of them, and LINES rows at a time of its chunk of rows. Loads of UNROLL rows are on
// their way at once.
//
// Elementwise neighbours run in the same pass. FOLLOW(value, a, b) makes y of a normalised value and of OTHERS more inputs;
// GRADIENT(a, b, c) makes the gradient of GIVEN inputs. Where there is no neighbour they are their first operand.

#define LINES (THREADS / LANES)
#define SLAB (LANES * PACK)
#define UNROLL 4

struct Part {
    i64 channel, start, end;
    int line;
    bool own;
};
__device__ __forceinline__ Part part_of_block(i64 rows, i64 channels, i64 chunks, i64 chunk_rows) {
    Part part;
    const i64 start = blockIdx.x % chunks * chunk_rows;
    part.channel = ((i64)(blockIdx.x / chunks) * LANES + threadIdx.x % LANES) * PACK;
    part.line = threadIdx.x / LANES;
    part.start = start;
    part.end = start + chunk_rows < rows ? start + chunk_rows : rows;
    part.own = part.channel < channels;
    return part;
}

// Adds up what the lines of a block have, each thread for PACK channels. `total(channel, first, second)` gets the sums of a channel.
template <typename F> __device__ __forceinline__ void add_lines(const float *first, const float *second, i64 channels, i64 chunks, F total) {
    __shared__ float shared[2][LINES][SLAB];
    const int lane = threadIdx.x % LANES, line = threadIdx.x / LANES;
    #pragma unroll
    for (int at = 0; at < PACK; at++) {
        shared[0][line][lane * PACK + at] = first[at];
        shared[1][line][lane * PACK + at] = second[at];
    }
    __syncthreads();
    for (int column = threadIdx.x; column < SLAB; column += THREADS) {
        const i64 channel = (i64)(blockIdx.x / chunks) * SLAB + column;
        if (channel >= channels) continue;
        float a = 0.0f, b = 0.0f;
        for (int at = 0; at < LINES; at++) {
            a += shared[0][at][column];
            b += shared[1][at][column];
        }
        total(channel, a, b);
    }
}

#ifdef FORWARD
__device__ __forceinline__ float finite_or_zero(float x) { return x - x == 0.0f ? x : 0.0f; }

// parts[chunk, channel] = the mean of the chunk's rows, then the same of Σ (x − mean)². Sums are of distances from the chunk's first
// row, so that nothing cancels that matters.
extern "C" __global__ void row_parts(const I0 *x, float *parts, i64 rows, i64 channels, i64 chunks, i64 chunk_rows) {
    const Part part = part_of_block(rows, channels, chunks, chunk_rows);
    float sums[PACK] = {}, squares[PACK] = {};
    if (part.own) {
        const I0 *from = x + part.channel;
        float shift[PACK];
        const Pack<I0, PACK> first = load_pack<I0, PACK>(from + part.start * channels);
        #pragma unroll
        for (int at = 0; at < PACK; at++) shift[at] = finite_or_zero(to_float(first.at[at]));
        for (i64 row = part.start + part.line; row < part.end; row += UNROLL * LINES) {
            Pack<I0, PACK> values[UNROLL];
            #pragma unroll
            for (int next = 0; next < UNROLL; next++)
                if (row + next * LINES < part.end) values[next] = load_pack<I0, PACK>(from + (row + next * LINES) * channels);
            #pragma unroll
            for (int next = 0; next < UNROLL; next++)
                if (row + next * LINES < part.end)
                    #pragma unroll
                    for (int at = 0; at < PACK; at++) {
                        const float value = to_float(values[next].at[at]) - shift[at];
                        sums[at] += value;
                        squares[at] = fmaf(value, value, squares[at]);
                    }
        }
    }
    const i64 chunk = blockIdx.x % chunks;
    const float count = (float)(part.end - part.start);
    add_lines(sums, squares, channels, chunks, [&](i64 channel, float sum, float square) {
        const float shift = finite_or_zero(to_float(x[part.start * channels + channel])), rest = square - sum * (sum / count);
        parts[chunk * channels + channel] = shift + sum / count;
        parts[(chunks + chunk) * channels + channel] = rest < 0.0f ? 0.0f : rest;
    });
}

// The statistics as outputs, and of each channel: mean, scale, bias. A block to WARP channels; its lines deal out the chunks.
extern "C" __global__ void row_statistics(
    const float *parts, const I1 *weight, const I2 *bias, O1 *mean, O2 *rstd, O3 *variance, float *numbers, i64 rows, i64 channels,
    i64 chunks, i64 chunk_rows, float eps) {
    __shared__ float shared[WARP][WARP + 1];
    const int lane = threadIdx.x % WARP, line = threadIdx.x / WARP, lines = blockDim.x / WARP;
    const i64 channel = (i64)blockIdx.x * WARP + lane;
    const bool own = channel < channels;
    float middle = 0.0f, spread = 0.0f;
    for (int pass = 0; pass < 2; pass++) {
        float sum = 0.0f;
        for (i64 chunk = line; own && chunk < chunks; chunk += lines) {
            const i64 left = rows - chunk * chunk_rows;
            const float count = (float)(left < chunk_rows ? left : chunk_rows), distance = parts[chunk * channels + channel] - middle;
            sum += pass == 0 ? count * distance : fmaf(count * distance, distance, parts[(chunks + chunk) * channels + channel]);
        }
        shared[line][lane] = sum;
        __syncthreads();
        float total = 0.0f;
        for (int at = 0; at < lines; at++) total += shared[at][lane];
        __syncthreads();
        if (pass == 0) middle = total / (float)rows;
        else spread = total / (float)rows;
    }
    if (!own || line != 0) return;
    const float own_rstd = 1.0f / sqrtf(spread + eps);
    mean[channel] = from_float<O1>(middle);
    rstd[channel] = from_float<O2>(own_rstd);
    variance[channel] = from_float<O3>(spread);
    numbers[channel] = middle;
    numbers[channels + channel] = own_rstd * to_float(weight[channel]);
    numbers[2 * channels + channel] = to_float(bias[channel]);
}
#endif

#if defined(FORWARD) || defined(EVALUATION)
// y = (x − mean)·scale + bias, and what follows.
extern "C" __global__ void scale_rows(
    const I0 *x, const J0 *other0, const J1 *other1, const float *numbers, O0 *y, i64 rows, i64 channels, i64 chunks, i64 chunk_rows) {
    const Part part = part_of_block(rows, channels, chunks, chunk_rows);
    if (!part.own) return;
    float mean[PACK], scale[PACK], bias[PACK];
    #pragma unroll
    for (int at = 0; at < PACK; at++) {
        mean[at] = numbers[part.channel + at];
        scale[at] = numbers[channels + part.channel + at];
        bias[at] = numbers[2 * channels + part.channel + at];
    }
    for (i64 row = part.start + part.line; row < part.end; row += UNROLL * LINES) {
        Pack<I0, PACK> values[UNROLL];
        Pack<J0, PACK> others0[UNROLL];
        Pack<J1, PACK> others1[UNROLL];
        #pragma unroll
        for (int next = 0; next < UNROLL; next++)
            if (row + next * LINES < part.end) {
                const i64 from = (row + next * LINES) * channels + part.channel;
                values[next] = load_pack<I0, PACK>(x + from);
                if (OTHERS > 0) others0[next] = load_pack<J0, PACK>(other0 + from);
                if (OTHERS > 1) others1[next] = load_pack<J1, PACK>(other1 + from);
            }
        #pragma unroll
        for (int next = 0; next < UNROLL; next++)
            if (row + next * LINES < part.end) {
                Pack<O0, PACK> made;
                #pragma unroll
                for (int at = 0; at < PACK; at++) {
                    const float value = fmaf(to_float(values[next].at[at]) - mean[at], scale[at], bias[at]);
                    made.at[at] = from_float<O0>(FOLLOW(value, to_float(others0[next].at[at]), to_float(others1[next].at[at])));
                }
                store_pack<O0, PACK>(y + (row + next * LINES) * channels + part.channel, made);
            }
    }
}
#endif

#ifdef BACKWARD
// The gradients of `y` at UNROLL rows from `row` on.
struct Gradients {
    Pack<G0, PACK> first[UNROLL];
    Pack<G1, PACK> second[UNROLL];
    Pack<G2, PACK> third[UNROLL];
    __device__ __forceinline__ void load(int next, const G0 *g0, const G1 *g1, const G2 *g2, i64 from) {
        first[next] = load_pack<G0, PACK>(g0 + from);
        if (GIVEN > 1) second[next] = load_pack<G1, PACK>(g1 + from);
        if (GIVEN > 2) third[next] = load_pack<G2, PACK>(g2 + from);
    }
    __device__ __forceinline__ float at(int next, int lane) const {
        return GRADIENT(to_float(first[next].at[lane]), to_float(second[next].at[lane]), to_float(third[next].at[lane]));
    }
};

// parts[chunk, channel] = Σ g, then the same of Σ g·(x − mean).
extern "C" __global__ void gradient_row_parts(
    const I0 *x, const G0 *g0, const G1 *g1, const G2 *g2, const I2 *means, float *parts, i64 rows, i64 channels, i64 chunks,
    i64 chunk_rows) {
    const Part part = part_of_block(rows, channels, chunks, chunk_rows);
    float shifts[PACK] = {}, slopes[PACK] = {};
    if (part.own) {
        float mean[PACK];
        #pragma unroll
        for (int at = 0; at < PACK; at++) mean[at] = to_float(means[part.channel + at]);
        for (i64 row = part.start + part.line; row < part.end; row += UNROLL * LINES) {
            Pack<I0, PACK> values[UNROLL];
            Gradients gradients;
            #pragma unroll
            for (int next = 0; next < UNROLL; next++)
                if (row + next * LINES < part.end) {
                    const i64 from = (row + next * LINES) * channels + part.channel;
                    values[next] = load_pack<I0, PACK>(x + from);
                    gradients.load(next, g0, g1, g2, from);
                }
            #pragma unroll
            for (int next = 0; next < UNROLL; next++)
                if (row + next * LINES < part.end)
                    #pragma unroll
                    for (int at = 0; at < PACK; at++) {
                        const float gradient = gradients.at(next, at);
                        shifts[at] += gradient;
                        slopes[at] = fmaf(gradient, to_float(values[next].at[at]) - mean[at], slopes[at]);
                    }
        }
    }
    const i64 chunk = blockIdx.x % chunks;
    add_lines(shifts, slopes, channels, chunks, [&](i64 channel, float shift, float slope) {
        parts[chunk * channels + channel] = shift;
        parts[(chunks + chunk) * channels + channel] = slope;
    });
}

// The gradients of weight and bias, and of each channel: mean, scale, shift, slope.
extern "C" __global__ void gradient_row_numbers(
    const float *parts, const I1 *weight, const I2 *mean, const I3 *rstd, O1 *dweight, O2 *dbias, float *numbers, i64 channels,
    i64 chunks, float count) {
    __shared__ float shared[2][WARP][WARP + 1];
    const int lane = threadIdx.x % WARP, line = threadIdx.x / WARP, lines = blockDim.x / WARP;
    const i64 channel = (i64)blockIdx.x * WARP + lane;
    const bool own = channel < channels;
    float shift = 0.0f, slope = 0.0f;
    for (i64 chunk = line; own && chunk < chunks; chunk += lines) {
        shift += parts[chunk * channels + channel];
        slope += parts[(chunks + chunk) * channels + channel];
    }
    shared[0][line][lane] = shift;
    shared[1][line][lane] = slope;
    __syncthreads();
    if (!own || line != 0) return;
    shift = slope = 0.0f;
    for (int at = 0; at < lines; at++) {
        shift += shared[0][at][lane];
        slope += shared[1][at][lane];
    }
    const float own_rstd = to_float(rstd[channel]);
    slope *= own_rstd;
    dweight[channel] = from_float<O1>(slope);
    dbias[channel] = from_float<O2>(shift);
    numbers[channel] = to_float(mean[channel]);
    numbers[channels + channel] = to_float(weight[channel]) * own_rstd;
    numbers[2 * channels + channel] = shift / count;
    numbers[3 * channels + channel] = slope * own_rstd / count;
}

// dx = scale·(g − shift − (x − mean)·slope).
extern "C" __global__ void differentiate_rows(
    const I0 *x, const G0 *g0, const G1 *g1, const G2 *g2, const float *numbers, O0 *dx, i64 rows, i64 channels, i64 chunks,
    i64 chunk_rows) {
    const Part part = part_of_block(rows, channels, chunks, chunk_rows);
    if (!part.own) return;
    float mean[PACK], scale[PACK], shift[PACK], slope[PACK];
    #pragma unroll
    for (int at = 0; at < PACK; at++) {
        mean[at] = numbers[part.channel + at];
        scale[at] = numbers[channels + part.channel + at];
        shift[at] = numbers[2 * channels + part.channel + at];
        slope[at] = numbers[3 * channels + part.channel + at];
    }
    for (i64 row = part.start + part.line; row < part.end; row += UNROLL * LINES) {
        Pack<I0, PACK> values[UNROLL];
        Gradients gradients;
        #pragma unroll
        for (int next = 0; next < UNROLL; next++)
            if (row + next * LINES < part.end) {
                const i64 from = (row + next * LINES) * channels + part.channel;
                values[next] = load_pack<I0, PACK>(x + from);
                gradients.load(next, g0, g1, g2, from);
            }
        #pragma unroll
        for (int next = 0; next < UNROLL; next++)
            if (row + next * LINES < part.end) {
                Pack<O0, PACK> made;
                #pragma unroll
                for (int at = 0; at < PACK; at++)
                    made.at[at] = from_float<O0>(scale[at] * fmaf(
                        mean[at] - to_float(values[next].at[at]), slope[at], gradients.at(next, at) - shift[at]));
                store_pack<O0, PACK>(dx + (row + next * LINES) * channels + part.channel, made);
            }
    }
}
#endif

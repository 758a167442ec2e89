// Pooling over [n, h, w, c], PACK channels to a thread. A window's numbers are those of `pool.cu`, and so is the order of every sum.

// The image, row, column and first channel of pack `at` of [n, rows, columns, c].
struct Pixel {
    i64 image, row, column, channel;
};
__device__ __forceinline__ Pixel pixel_of(u32 at, u32 packs, u32 rows, u32 columns) {
    Pixel pixel;
    pixel.channel = at % packs * PACK;
    at /= packs;
    pixel.column = at % columns;
    at /= columns;
    pixel.row = at % rows;
    pixel.image = at / rows;
    return pixel;
}

#ifdef O1
// Of equal values the first counts; NaN counts as largest; padding never wins.
extern "C" __global__ void max_windows(const I0 *x, O0 *values, O1 *taps, i64 count, i64 packs, WINDOW) {
    const i64 at = (i64)blockIdx.x * blockDim.x + threadIdx.x;
    if (at >= count) return;
    const Pixel own = pixel_of((u32)at, (u32)packs, (u32)out_height, (u32)out_width);
    const i64 channels = packs * PACK;
    const i64 top = (first_y + own.row) * stride_y - padding_y - begin_y, left = (first_x + own.column) * stride_x - padding_x - begin_x;
    const i64 y_end = smaller(top + kernel_y, height), x_end = smaller(left + kernel_x, width);
    float best[PACK];
    int tap[PACK];
    #pragma unroll
    for (int lane = 0; lane < PACK; lane++) {
        best[lane] = 0.0f;
        tap[lane] = -1;
    }
    for (i64 y = larger(top, 0); y < y_end; y++)
        for (i64 at_x = larger(left, 0); at_x < x_end; at_x++) {
            const Pack<I0, PACK> found = load_pack<I0, PACK>(x + ((own.image * height + y) * width + at_x) * channels + own.channel);
            const int here = (int)((y - top) * kernel_x + at_x - left);
            #pragma unroll
            for (int lane = 0; lane < PACK; lane++) {
                const float value = to_float(found.at[lane]);
                if (tap[lane] < 0 || value > best[lane] || (value != value && best[lane] == best[lane])) {
                    best[lane] = value;
                    tap[lane] = here;
                }
            }
        }
    Pack<O0, PACK> made;
    Pack<O1, PACK> made_taps;
    #pragma unroll
    for (int lane = 0; lane < PACK; lane++) {
        made.at[lane] = from_float<O0>(best[lane]);
        made_taps.at[lane] = (O1)tap[lane];
    }
    store_pack<O0, PACK>(values + at * PACK, made);
    store_pack<O1, PACK>(taps + at * PACK, made_taps);
}
#elif defined(I1)

// dx at a pixel: the sum of the gradients of the windows over it whose maximum was there, in their order.
extern "C" __global__ void collect_taps(const I0 *taps, const I1 *g, O0 *dx, i64 count, i64 packs, WINDOW) {
    const i64 at = (i64)blockIdx.x * blockDim.x + threadIdx.x;
    if (at >= count) return;
    const Pixel own = pixel_of((u32)at, (u32)packs, (u32)height, (u32)width);
    const i64 channels = packs * PACK;
    // Among all places of the whole plane and its padding.
    const i64 x = begin_x + own.column + padding_x, y = begin_y + own.row + padding_y;
    const i64 top = y < kernel_y ? 0 : quotient(y - kernel_y, stride_y) + 1;
    const i64 left = x < kernel_x ? 0 : quotient(x - kernel_x, stride_x) + 1;
    const i64 row_end = smaller(quotient(y, stride_y) - first_y, out_height - 1), column_end = smaller(quotient(x, stride_x) - first_x, out_width - 1);
    float sums[PACK] = {};
    for (i64 row = larger(top - first_y, 0); row <= row_end; row++)
        for (i64 column = larger(left - first_x, 0); column <= column_end; column++) {
            const i64 from = ((own.image * out_height + row) * out_width + column) * channels + own.channel;
            const int here = (int)((y - (first_y + row) * stride_y) * kernel_x + x - (first_x + column) * stride_x);
            const Pack<I0, PACK> found = load_pack<I0, PACK>(taps + from);
            const Pack<I1, PACK> gradients = load_pack<I1, PACK>(g + from);
            #pragma unroll
            for (int lane = 0; lane < PACK; lane++)
                if ((int)found.at[lane] == here) sums[lane] += to_float(gradients.at[lane]);
        }
    Pack<O0, PACK> made;
    #pragma unroll
    for (int lane = 0; lane < PACK; lane++) made.at[lane] = from_float<O0>(sums[lane]);
    store_pack<O0, PACK>(dx + at * PACK, made);
}
#else

extern "C" __global__ void mean_windows(const I0 *x, O0 *y, i64 count, i64 packs, int count_padding, WINDOW) {
    const i64 at = (i64)blockIdx.x * blockDim.x + threadIdx.x;
    if (at >= count) return;
    const Pixel own = pixel_of((u32)at, (u32)packs, (u32)out_height, (u32)out_width);
    const i64 channels = packs * PACK;
    const i64 top = (first_y + own.row) * stride_y - padding_y - begin_y, left = (first_x + own.column) * stride_x - padding_x - begin_x;
    float sums[PACK] = {};
    for (i64 at_y = larger(top, 0); at_y < smaller(top + kernel_y, height); at_y++)
        for (i64 at_x = larger(left, 0); at_x < smaller(left + kernel_x, width); at_x++) {
            const Pack<I0, PACK> found = load_pack<I0, PACK>(x + ((own.image * height + at_y) * width + at_x) * channels + own.channel);
            #pragma unroll
            for (int lane = 0; lane < PACK; lane++) sums[lane] += to_float(found.at[lane]);
        }
    const float places = (float)(divisor(first_y + own.row, whole_height, kernel_y, stride_y, padding_y, count_padding) *
                                 divisor(first_x + own.column, whole_width, kernel_x, stride_x, padding_x, count_padding));
    Pack<O0, PACK> made;
    #pragma unroll
    for (int lane = 0; lane < PACK; lane++) made.at[lane] = from_float<O0>(sums[lane] / places);
    store_pack<O0, PACK>(y + at * PACK, made);
}

// A pixel adds what the windows over it give, in their order.
extern "C" __global__ void spread_windows(const I0 *g, O0 *dx, i64 count, i64 packs, int count_padding, WINDOW) {
    const i64 at = (i64)blockIdx.x * blockDim.x + threadIdx.x;
    if (at >= count) return;
    const Pixel own = pixel_of((u32)at, (u32)packs, (u32)height, (u32)width);
    const i64 channels = packs * PACK;
    const i64 x = begin_x + own.column + padding_x, y = begin_y + own.row + padding_y;
    const i64 top = y < kernel_y ? 0 : quotient(y - kernel_y, stride_y) + 1;
    const i64 left = x < kernel_x ? 0 : quotient(x - kernel_x, stride_x) + 1;
    float sums[PACK] = {};
    for (i64 row = larger(top - first_y, 0); row <= smaller(quotient(y, stride_y) - first_y, out_height - 1); row++) {
        const i64 rows = divisor(first_y + row, whole_height, kernel_y, stride_y, padding_y, count_padding);
        for (i64 column = larger(left - first_x, 0); column <= smaller(quotient(x, stride_x) - first_x, out_width - 1); column++) {
            const i64 columns = divisor(first_x + column, whole_width, kernel_x, stride_x, padding_x, count_padding);
            const i64 from = ((own.image * out_height + row) * out_width + column) * channels + own.channel;
            const Pack<I0, PACK> gradients = load_pack<I0, PACK>(g + from);
            #pragma unroll
            for (int lane = 0; lane < PACK; lane++) sums[lane] += to_float(gradients.at[lane]) / (float)(rows * columns);
        }
    }
    Pack<O0, PACK> made;
    #pragma unroll
    for (int lane = 0; lane < PACK; lane++) made.at[lane] = from_float<O0>(sums[lane]);
    store_pack<O0, PACK>(dx + at * PACK, made);
}
#endif

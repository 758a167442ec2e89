// Pooling over the planes of [n, c, h, w]. A window's numbers come as pairs: vertical, horizontal. A plane here may be a tile of a whole
// one: it begins at place `begin` of that, and its first window is number `first`.

#ifdef O1
// A thread to a window. Of equal values the first counts; NaN counts as largest; padding never wins.
extern "C" __global__ void max_windows(const I0 *x, O0 *values, O1 *taps, i64 count, WINDOW) {
    const i64 at = (i64)blockIdx.x * blockDim.x + threadIdx.x;
    if (at >= count) return;
    const i64 column = at % out_width, row = at / out_width % out_height;
    const I0 *plane = x + at / out_width / out_height * height * width;
    const i64 top = (first_y + row) * stride_y - padding_y - begin_y, left = (first_x + column) * stride_x - padding_x - begin_x;
    float best = 0.0f;
    i64 tap = -1;
    for (i64 y = larger(top, 0); y < smaller(top + kernel_y, height); y++)
        for (i64 at_x = larger(left, 0); at_x < smaller(left + kernel_x, width); at_x++) {
            const float value = to_float(plane[y * width + at_x]);
            if (tap < 0 || value > best || (value != value && best == best)) {
                best = value;
                tap = (y - top) * kernel_x + at_x - left;
            }
        }
    values[at] = from_float<O0>(best);
    taps[at] = (O1)tap;
}
#elif !defined(I1)

extern "C" __global__ void mean_windows(const I0 *x, O0 *y, i64 count, int count_padding, WINDOW) {
    const i64 at = (i64)blockIdx.x * blockDim.x + threadIdx.x;
    if (at >= count) return;
    const i64 column = at % out_width, row = at / out_width % out_height;
    const I0 *plane = x + at / out_width / out_height * height * width;
    const i64 top = (first_y + row) * stride_y - padding_y - begin_y, left = (first_x + column) * stride_x - padding_x - begin_x;
    float sum = 0.0f;
    for (i64 at_y = larger(top, 0); at_y < smaller(top + kernel_y, height); at_y++)
        for (i64 at_x = larger(left, 0); at_x < smaller(left + kernel_x, width); at_x++)
            sum += to_float(plane[at_y * width + at_x]);
    const i64 places = divisor(first_y + row, whole_height, kernel_y, stride_y, padding_y, count_padding) *
                       divisor(first_x + column, whole_width, kernel_x, stride_x, padding_x, count_padding);
    y[at] = from_float<O0>(sum / (float)places);
}

// A thread to a pixel, which adds what the windows over it give, in their order.
extern "C" __global__ void spread_windows(const I0 *g, O0 *dx, i64 count, int count_padding, WINDOW) {
    const i64 at = (i64)blockIdx.x * blockDim.x + threadIdx.x;
    if (at >= count) return;
    // Among all places of the whole plane and its padding.
    const i64 x = begin_x + at % width + padding_x, y = begin_y + at / width % height + padding_y;
    const I0 *plane = g + at / width / height * out_height * out_width;
    const i64 top = y < kernel_y ? 0 : (y - kernel_y) / stride_y + 1, left = x < kernel_x ? 0 : (x - kernel_x) / stride_x + 1;
    float sum = 0.0f;
    for (i64 row = larger(top - first_y, 0); row <= smaller(y / stride_y - first_y, out_height - 1); row++) {
        const i64 rows = divisor(first_y + row, whole_height, kernel_y, stride_y, padding_y, count_padding);
        for (i64 column = larger(left - first_x, 0); column <= smaller(x / stride_x - first_x, out_width - 1); column++) {
            const i64 columns = divisor(first_x + column, whole_width, kernel_x, stride_x, padding_x, count_padding);
            sum += to_float(plane[row * out_width + column]) / (float)(rows * columns);
        }
    }
    dx[at] = from_float<O0>(sum);
}

__device__ __forceinline__ i64 bin_start(i64 at, i64 size, i64 out) { return at * size / out; }
__device__ __forceinline__ i64 bin_end(i64 at, i64 size, i64 out) { return ((at + 1) * size + out - 1) / out; }

// The mean of each bin: a warp to a bin.
extern "C" __global__ void mean_bins(const I0 *x, O0 *y, i64 count, i64 height, i64 width, i64 out_height, i64 out_width) {
    const i64 at = (i64)blockIdx.x * (blockDim.x / WARP) + threadIdx.x / WARP;
    if (at >= count) return;
    const i64 column = at % out_width, row = at / out_width % out_height;
    const I0 *plane = x + at / out_width / out_height * height * width;
    const i64 top = bin_start(row, height, out_height), left = bin_start(column, width, out_width);
    const i64 columns = bin_end(column, width, out_width) - left;
    const i64 places = (bin_end(row, height, out_height) - top) * columns;
    float sum = 0.0f;
    for (i64 place = threadIdx.x % WARP; place < places; place += WARP)
        sum += to_float(plane[(top + place / columns) * width + left + place % columns]);
    sum = warp_sum(sum);
    if (threadIdx.x % WARP == 0) y[at] = from_float<O0>(sum / (float)places);
}

// A thread to a pixel, which adds what the bins over it give, in their order.
extern "C" __global__ void spread_bins(const I0 *g, O0 *dx, i64 count, i64 height, i64 width, i64 out_height, i64 out_width) {
    const i64 at = (i64)blockIdx.x * blockDim.x + threadIdx.x;
    if (at >= count) return;
    const i64 x = at % width, y = at / width % height;
    const I0 *plane = g + at / width / height * out_height * out_width;
    i64 first_y = y * out_height / height, first_x = x * out_width / width;
    while (first_y > 0 && bin_end(first_y - 1, height, out_height) > y) first_y--;
    while (first_x > 0 && bin_end(first_x - 1, width, out_width) > x) first_x--;
    float sum = 0.0f;
    for (i64 row = first_y; row < out_height && bin_start(row, height, out_height) <= y; row++) {
        const i64 rows = bin_end(row, height, out_height) - bin_start(row, height, out_height);
        for (i64 column = first_x; column < out_width && bin_start(column, width, out_width) <= x; column++) {
            const i64 columns = bin_end(column, width, out_width) - bin_start(column, width, out_width);
            sum += to_float(plane[row * out_width + column]) / (float)(rows * columns);
        }
    }
    dx[at] = from_float<O0>(sum);
}
#else

// The place of a window's tap in the plane here, or -1 if that has it not.
__device__ __forceinline__ i64 place_of(i64 row, i64 column, i64 tap, WINDOW) {
    if (tap < 0 || tap >= kernel_y * kernel_x) return -1;
    const i64 dy = quotient(tap, kernel_x), dx = tap - dy * kernel_x;
    const i64 y = (first_y + row) * stride_y + dy - padding_y - begin_y, x = (first_x + column) * stride_x + dx - padding_x - begin_x;
    return y >= 0 && y < height && x >= 0 && x < width ? y * width + x : -1;
}

// dx[plane, place] = the sum of the gradients whose maximum was there, in their order. A warp to a plane; lanes that meet at one place
// take turns.
extern "C" __global__ void spread_taps(const I0 *taps, const I1 *g, O0 *dx, i64 planes, WINDOW) {
    const i64 plane = (i64)blockIdx.x * (blockDim.x / WARP) + threadIdx.x / WARP;
    if (plane >= planes) return;
    const int lane = threadIdx.x % WARP;
    const i64 from = out_height * out_width;
    taps += plane * from;
    g += plane * from;
    dx += plane * height * width;
    for (i64 at = lane; at < height * width; at += WARP) dx[at] = from_float<O0>(0.0f);
    __syncwarp();
    for (i64 start = 0; start < from; start += WARP) {
        const i64 at = start + lane, row = quotient(at, out_width);
        const i64 found = at < from ? place_of(row, at - row * out_width, (i64)taps[at], NUMBERS) : -1;
        const bool counts = found >= 0;
        const int place = counts ? (int)found : -1 - lane;
        const u32 same = __match_any_sync(ALL_LANES, place);
        const int turn = __popc(same & ((1u << lane) - 1));
        for (int now = 0; __any_sync(ALL_LANES, counts && turn >= now); now++) {
            if (counts && turn == now) dx[place] = from_float<O0>(to_float(dx[place]) + to_float(g[at]));
            __syncwarp();
        }
    }
}

// What x has at the tap of each window. A thread to a window.
extern "C" __global__ void pick_taps(const I0 *taps, const I1 *x, O0 *y, i64 count, WINDOW) {
    const i64 at = (i64)blockIdx.x * blockDim.x + threadIdx.x;
    if (at >= count) return;
    const i64 line = quotient(at, out_width), plane = quotient(line, out_height);
    const i64 place = place_of(line - plane * out_height, at - line * out_width, (i64)taps[at], NUMBERS);
    y[at] = place < 0 ? from_float<O0>(0.0f) : x[plane * height * width + place];
}
#endif

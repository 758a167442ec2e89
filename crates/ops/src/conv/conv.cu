// Convolution and its two gradients as matrix products whose operands are read straight from the images: c[m, n] = Σ_k a[m, k]·b[k, n]
// in tiles of TILE × TILE, DEPTH terms at a time, in order. PASS is FORWARD, INPUT or WEIGHT. OPERAND is the operands' element type, RESULT the
// result's. Padding counts as zeros that are multiplied, as the definition has it.

#define FORWARD 0
#define INPUT 1
#define WEIGHT 2

#define TILE 64
#define DEPTH 16
#define EACH 4
#define THREADS 256

struct Shape {
    int images, groups, inputs, outputs, height, width, kernel_y, kernel_x, grid_y, grid_x;
    int stride_y, stride_x, top, left, dilation_y, dilation_x;
};

// Taps of an axis that meet pixels of one phase: `first`, `first + step`, …, `count` of them.
struct Taps {
    int first, step, count;
};
__device__ __forceinline__ int divisor_of(int a, int b) {
    while (b != 0) {
        const int rest = a % b;
        a = b;
        b = rest;
    }
    return a;
}
__device__ __forceinline__ Taps taps_of(int phase, int kernel, int stride, int dilation) {
    Taps taps = {kernel, stride / divisor_of(stride, dilation), 0};
    for (int tap = kernel - 1; tap >= 0; tap--)
        if ((int)((i64)tap * dilation % stride) == phase) taps.first = tap;
    if (taps.first < kernel) taps.count = (kernel - taps.first + taps.step - 1) / taps.step;
    return taps;
}

__device__ __forceinline__ float pixel(const OPERAND *plane, int y, int x, int height, int width) {
    return y >= 0 && y < height && x >= 0 && x < width ? to_float(plane[(i64)y * width + x]) : 0.0f;
}

// A block to a tile of a group, and of a phase (INPUT) or of a chunk of terms (WEIGHT), which lie along z.
extern "C" __global__ void convolve(
    const OPERAND *first_operand, const OPERAND *second_operand, const BIAS *bias, RESULT *result, int has_bias, i64 chunk_size, int images, int groups,
    int inputs, int outputs, int height, int width, int kernel_y, int kernel_x, int grid_y, int grid_x, int stride_y, int stride_x,
    int top, int left, int dilation_y, int dilation_x, int column_tiles) {
    __shared__ __align__(16) float a_tile[DEPTH][TILE + 4], b_tile[DEPTH][TILE + 4];
    const Shape s = {images, groups, inputs, outputs, height, width, kernel_y, kernel_x, grid_y, grid_x,
                     stride_y, stride_x, top, left, dilation_y, dilation_x};
    const int group = blockIdx.y, taps = s.kernel_y * s.kernel_x, pixels = s.grid_y * s.grid_x;
    const int tile_n = blockIdx.x % column_tiles, tile_m = blockIdx.x / column_tiles;
    const i64 image_channels = (i64)s.groups * s.inputs, grid_channels = (i64)s.groups * s.outputs;
#if PASS == FORWARD
    const OPERAND *image = first_operand, *weight = second_operand;
    const i64 rows = s.outputs, columns = (i64)s.images * pixels, begin = 0, end = (i64)s.inputs * taps;
#elif PASS == INPUT
    const OPERAND *weight = first_operand, *grad = second_operand;
    const int phase_y = blockIdx.z / s.stride_x, phase_x = blockIdx.z % s.stride_x;
    const Taps taps_y = taps_of(phase_y, s.kernel_y, s.stride_y, s.dilation_y);
    const Taps taps_x = taps_of(phase_x, s.kernel_x, s.stride_x, s.dilation_x);
    // The first pixel of the phase, and how many there are.
    const int start_y = ((phase_y - s.top) % s.stride_y + s.stride_y) % s.stride_y;
    const int start_x = ((phase_x - s.left) % s.stride_x + s.stride_x) % s.stride_x;
    const int pixels_y = start_y < s.height ? (s.height - start_y - 1) / s.stride_y + 1 : 0;
    const int pixels_x = start_x < s.width ? (s.width - start_x - 1) / s.stride_x + 1 : 0;
    const int phase_taps = taps_y.count * taps_x.count;
    const i64 rows = s.inputs, columns = (i64)s.images * pixels_y * pixels_x, begin = 0, end = (i64)s.outputs * phase_taps;
#else
    const OPERAND *image = first_operand, *grad = second_operand;
    const i64 rows = s.outputs, columns = (i64)s.inputs * taps, all = (i64)s.images * pixels;
    const i64 begin = blockIdx.z * chunk_size, end = begin + chunk_size < all ? begin + chunk_size : all;
#endif
    const i64 first_m = (i64)tile_m * TILE, first_n = (i64)tile_n * TILE;
    if (first_m >= rows || first_n >= columns) return;
    const int thread = threadIdx.x, own_m = thread / 16 * EACH, own_n = thread % 16 * EACH;
    float sums[EACH][EACH] = {};
    for (i64 start = begin; start < end; start += DEPTH) {
        __syncthreads();
        #pragma unroll
        for (int part = 0; part < TILE * DEPTH / THREADS; part++) {
            const int at = part * THREADS + thread;
            // Neighbouring threads read neighbouring elements: terms of `a` lie together, and so do columns of `b` but for WEIGHT.
            const int a_k = at % DEPTH, a_m = at / DEPTH;
            const int b_k = PASS == WEIGHT ? at % DEPTH : at / TILE, b_n = PASS == WEIGHT ? at / DEPTH : at % TILE;
            const i64 m = first_m + a_m, ka = start + a_k, n = first_n + b_n, kb = start + b_k;
            float a = 0.0f, b = 0.0f;
            if (m < rows && ka < end) {
#if PASS == FORWARD
                a = to_float(weight[((i64)group * s.outputs + m) * end + ka]);
#elif PASS == INPUT
                const int o = (int)(ka / phase_taps), tap = (int)(ka % phase_taps);
                const int ky = taps_y.first + tap / taps_x.count * taps_y.step, kx = taps_x.first + tap % taps_x.count * taps_x.step;
                a = to_float(weight[(((i64)group * s.outputs + o) * s.inputs + m) * taps + ky * s.kernel_x + kx]);
#else
                a = to_float(grad[(ka / pixels * grid_channels + (i64)group * s.outputs + m) * pixels + ka % pixels]);
#endif
            }
            if (n < columns && kb < end) {
#if PASS == INPUT
                const int o = (int)(kb / phase_taps), tap = (int)(kb % phase_taps);
                const int ky = taps_y.first + tap / taps_x.count * taps_y.step, kx = taps_x.first + tap % taps_x.count * taps_x.step;
                const i64 picture = n / (pixels_y * pixels_x);
                const int place = (int)(n % (pixels_y * pixels_x));
                const int y = start_y + place / pixels_x * s.stride_y, x = start_x + place % pixels_x * s.stride_x;
                const OPERAND *plane = grad + (picture * grid_channels + (i64)group * s.outputs + o) * pixels;
                // Both differences are multiples of the stride; a place before the grid must not be rounded up to its first.
                const int from_y = y + s.top - ky * s.dilation_y, from_x = x + s.left - kx * s.dilation_x;
                if (from_y >= 0 && from_x >= 0) b = pixel(plane, from_y / s.stride_y, from_x / s.stride_x, s.grid_y, s.grid_x);
#else
                const i64 k = PASS == FORWARD ? kb : n, place = PASS == FORWARD ? n : kb;
                const int c = (int)(k / taps), tap = (int)(k % taps), of_grid = (int)(place % pixels);
                const int y = of_grid / s.grid_x * s.stride_y - s.top + tap / s.kernel_x * s.dilation_y;
                const int x = of_grid % s.grid_x * s.stride_x - s.left + tap % s.kernel_x * s.dilation_x;
                const OPERAND *plane = image + (place / pixels * image_channels + (i64)group * s.inputs + c) * s.height * s.width;
                b = pixel(plane, y, x, s.height, s.width);
#endif
            }
            a_tile[a_k][a_m] = a;
            b_tile[b_k][b_n] = b;
        }
        __syncthreads();
        #pragma unroll
        for (int k = 0; k < DEPTH; k++) {
            const float4 a = *reinterpret_cast<const float4 *>(&a_tile[k][own_m]);
            const float4 b = *reinterpret_cast<const float4 *>(&b_tile[k][own_n]);
            const float left_factor[EACH] = {a.x, a.y, a.z, a.w}, right_factor[EACH] = {b.x, b.y, b.z, b.w};
            #pragma unroll
            for (int i = 0; i < EACH; i++)
                #pragma unroll
                for (int j = 0; j < EACH; j++) sums[i][j] = fmaf(left_factor[i], right_factor[j], sums[i][j]);
        }
    }
    #pragma unroll
    for (int i = 0; i < EACH; i++)
        #pragma unroll
        for (int j = 0; j < EACH; j++) {
            const i64 m = first_m + own_m + i, n = first_n + own_n + j;
            if (m >= rows || n >= columns) continue;
#if PASS == FORWARD
            const i64 channel = (i64)group * s.outputs + m, to = (n / pixels * grid_channels + channel) * pixels + n % pixels;
            const float start = has_bias ? to_float(bias[channel]) : 0.0f;
            result[to] = from_float<RESULT>(sums[i][j] + start);
#elif PASS == INPUT
            const int per_image = pixels_y * pixels_x, place = (int)(n % per_image);
            const int y = start_y + place / pixels_x * s.stride_y, x = start_x + place % pixels_x * s.stride_x;
            const i64 channel = (i64)group * s.inputs + m;
            const float start = has_bias ? to_float(bias[channel]) : 0.0f;
            result[((n / per_image * image_channels + channel) * s.height + y) * s.width + x] = from_float<RESULT>(sums[i][j] + start);
#else
            const i64 chunk = blockIdx.z * grid_channels * columns;
            result[chunk + ((i64)group * s.outputs + m) * columns + n] = from_float<RESULT>(sums[i][j]);
#endif
        }
}

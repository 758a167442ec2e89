// What the rows of a cross-entropy have in common: the mean of their losses, and the scale of their gradients. One block.

__device__ __forceinline__ float divisor(const int *targets, i64 rows, i64 ignore, int mean, float *shared) {
    if (!mean) return 1.0f;
    // Whole numbers: halves of them, because a float holds them up to 2²⁴ only.
    i64 count = 0;
    for (i64 row = threadIdx.x; row < rows; row += blockDim.x) count += targets[row] != ignore;
    const float high = block_sum((float)(count >> 12), shared), low = block_sum((float)(count & 4095), shared);
    const i64 all = ((i64)high << 12) + (i64)low;
    return (float)(all > 0 ? all : 1);
}

// loss = Σ losses / divisor
extern "C" __global__ void mean_loss(const float *losses, const int *targets, float *loss, i64 rows, i64 ignore, int mean) {
    __shared__ float shared[WARP + 1];
    const float by = divisor(targets, rows, ignore, mean, shared);
    float sum = 0.0f;
    for (i64 row = threadIdx.x; row < rows; row += blockDim.x) sum += losses[row];
    sum = block_sum(sum, shared);
    if (threadIdx.x == 0) loss[0] = sum / by;
}

// scale = g / divisor
extern "C" __global__ void gradient_scale(const int *targets, const float *g, float *scale, i64 rows, i64 ignore, int mean) {
    __shared__ float shared[WARP + 1];
    const float by = divisor(targets, rows, ignore, mean, shared);
    if (threadIdx.x == 0) scale[0] = g[0] / by;
}

#define NUMBERS 4
#define SLICES_MAX 64

__device__ __forceinline__ float shifted(float own, float sum, float largest) {
    return own == -INFINITY ? 0.0f : sum * expf(own - largest);
}

#ifdef SIZES
// Loss and log-sum-exp of each row from what slices of the classes, of SIZES each, say of it: joined as a balanced tree. A
// thread to a row.
extern "C" __global__ void join_slices(
    const float *numbers, const int *targets, float *lse, float *losses, i64 rows, i64 classes, i64 ignore, float smoothing) {
    const int sizes[] = SIZES, slices = sizeof(sizes) / sizeof(int);
    const i64 row = (i64)blockIdx.x * blockDim.x + threadIdx.x;
    if (row >= rows) return;
    float largest[SLICES_MAX], sum[SLICES_MAX], hit[SLICES_MAX];
    for (int slice = 0; slice < slices; slice++) {
        const float *own = numbers + (slice * rows + row) * NUMBERS;
        largest[slice] = own[0];
        sum[slice] = own[1];
        hit[slice] = own[2];
    }
    for (int width = 1; width < slices; width *= 2) {
        for (int low = 0; low + width < slices; low += 2 * width) {
            const float a = largest[low], b = largest[low + width];
            const float most = (a >= b || a != a) ? a : b;
            sum[low] = shifted(a, sum[low], most) + shifted(b, sum[low + width], most);
            hit[low] += hit[low + width];
            largest[low] = most;
        }
    }
    const float most = largest[0], logarithm = logf(sum[0]);
    float smooth = 0.0f;
    if (smoothing != 0.0f) {
        for (int slice = 0; slice < slices; slice++) {
            const float *own = numbers + (slice * rows + row) * NUMBERS;
            sum[slice] = own[3] + (float)sizes[slice] * (own[0] - most);
        }
        for (int width = 1; width < slices; width *= 2)
            for (int low = 0; low + width < slices; low += 2 * width) sum[low] += sum[low + width];
        smooth = smoothing / (float)classes * sum[0];
    }
    const i64 target = targets[row];
    float loss = NAN;
    if (target == ignore) loss = 0.0f;
    else if (target >= 0 && target < classes) loss = logarithm - (1.0f - smoothing) * (hit[0] - most) - smooth;
    lse[row] = most + logarithm;
    losses[row] = loss;
}
#endif

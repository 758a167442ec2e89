// Norms of whole tensors: sums of squares of runs of RUN elements, added up in an order that depends on their number alone.

#define RUN 4096

// A block to a run. The run may lie anywhere, so nothing is read in packs.
extern "C" __global__ void square_runs(const I0 *x, float *sums, i64 count) {
    __shared__ float shared[WARP + 1];
    const i64 start = (i64)blockIdx.x * RUN, end = start + RUN < count ? start + RUN : count;
    float sum = 0.0f;
    for (i64 at = start + threadIdx.x; at < end; at += blockDim.x) {
        const float value = to_float(x[at]);
        sum = fmaf(value, value, sum);
    }
    sum = block_sum(sum, shared);
    if (threadIdx.x == 0) sums[blockIdx.x] = sum;
}

// One block of 1024 threads, in double precision: a gradient has thousands of runs.
extern "C" __global__ void add_runs(const I0 *sums, float *total, i64 count) {
    __shared__ double shared[1024];
    double sum = 0.0;
    for (i64 at = threadIdx.x; at < count; at += 1024) sum += (double)to_float(sums[at]);
    shared[threadIdx.x] = sum;
    __syncthreads();
    for (int half = 512; half > 0; half /= 2) {
        if ((int)threadIdx.x < half) shared[threadIdx.x] += shared[threadIdx.x + half];
        __syncthreads();
    }
    if (threadIdx.x == 0) total[0] = (float)shared[0];
}

// min(1, max_norm / (√total + 10⁻⁶)); NaN stays NaN.
extern "C" __global__ void clip_scale(const I0 *total, float *scale, u64 max_norm) {
    const double value = __longlong_as_double((i64)max_norm) / (sqrt((double)to_float(total[0])) + 1e-6);
    scale[0] = (float)(value < 1.0 || value != value ? value : 1.0);
}

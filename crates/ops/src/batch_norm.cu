// Batch norm of x = [images, channels, size]: one mean and variance to a channel. A channel's sums are over chunks of images.


#if defined(FORWARD) || defined(SQUARES)
// parts[channel, chunk] = Σ x, or Σ (x − mean)² if `means` are given.
extern "C" __global__ void channel_parts(
    const I0 *x, const float *means, float *parts, i64 images, i64 channels, i64 size, i64 chunks, i64 chunk_size, int centred) {
    __shared__ float shared[WARP + 1];
    const i64 channel = blockIdx.x / chunks, start = blockIdx.x % chunks * chunk_size;
    const i64 end = start + chunk_size < images ? start + chunk_size : images, packs = size / PACK;
    const float mean = centred ? means[channel] : 0.0f;
    float sum = 0.0f;
    for (i64 at = threadIdx.x; at < (end - start) * packs; at += blockDim.x) {
        const I0 *from = x + ((start + at / packs) * channels + channel) * size + at % packs * PACK;
        const Pack<I0, PACK> values = load_pack<I0, PACK>(from);
        #pragma unroll
        for (int lane = 0; lane < PACK; lane++) {
            const float value = to_float(values.at[lane]);
            sum = centred ? fmaf(value - mean, value - mean, sum) : sum + value;
        }
    }
    sum = block_sum(sum, shared);
    if (threadIdx.x == 0) parts[blockIdx.x] = sum;
}

#endif

#ifdef FORWARD
// A warp to a channel: the mean of its parts.
extern "C" __global__ void channel_means(const float *parts, float *means, i64 channels, i64 chunks, float count) {
    const i64 channel = (i64)blockIdx.x * (blockDim.x / WARP) + threadIdx.x / WARP;
    if (channel >= channels) return;
    float sum = 0.0f;
    for (i64 chunk = threadIdx.x % WARP; chunk < chunks; chunk += WARP) sum += parts[channel * chunks + chunk];
    sum = warp_sum(sum);
    if (threadIdx.x % WARP == 0) means[channel] = sum / count;
}

// The statistics as outputs, and of each channel: mean, scale, bias.
extern "C" __global__ void channel_statistics(
    const float *means, const float *variances, const I1 *weight, const I2 *bias, O1 *mean, O2 *rstd, O3 *variance,
    float *numbers, i64 channels, float eps) {
    const i64 channel = (i64)blockIdx.x * blockDim.x + threadIdx.x;
    if (channel >= channels) return;
    const float own = 1.0f / sqrtf(variances[channel] + eps);
    mean[channel] = from_float<O1>(means[channel]);
    rstd[channel] = from_float<O2>(own);
    variance[channel] = from_float<O3>(variances[channel]);
    numbers[channel] = means[channel];
    numbers[channels + channel] = own * to_float(weight[channel]);
    numbers[2 * channels + channel] = to_float(bias[channel]);
}
#endif

#ifdef EVALUATION
extern "C" __global__ void known_statistics(
    const I1 *weight, const I2 *bias, const I3 *mean, const I4 *variance, float *numbers, i64 channels, float eps) {
    const i64 channel = (i64)blockIdx.x * blockDim.x + threadIdx.x;
    if (channel >= channels) return;
    numbers[channel] = to_float(mean[channel]);
    numbers[channels + channel] = to_float(weight[channel]) * (1.0f / sqrtf(to_float(variance[channel]) + eps));
    numbers[2 * channels + channel] = to_float(bias[channel]);
}
#endif

#if defined(GRADIENT) || defined(SUMS)
// parts[channel, chunk] = Σ g, then the same of Σ g·(x − mean).
extern "C" __global__ void gradient_parts(
    const I0 *x, const I4 *g, const I2 *means, float *parts, i64 images, i64 channels, i64 size, i64 chunks, i64 chunk_size) {
    __shared__ float shared[WARP + 1];
    const i64 channel = blockIdx.x / chunks, start = blockIdx.x % chunks * chunk_size;
    const i64 end = start + chunk_size < images ? start + chunk_size : images, packs = size / PACK;
    const float mean = to_float(means[channel]);
    float shift = 0.0f, slope = 0.0f;
    for (i64 at = threadIdx.x; at < (end - start) * packs; at += blockDim.x) {
        const i64 from = ((start + at / packs) * channels + channel) * size + at % packs * PACK;
        const Pack<I0, PACK> values = load_pack<I0, PACK>(x + from);
        const Pack<I4, PACK> gradients = load_pack<I4, PACK>(g + from);
        #pragma unroll
        for (int lane = 0; lane < PACK; lane++) {
            const float gradient = to_float(gradients.at[lane]);
            shift += gradient;
            slope = fmaf(gradient, to_float(values.at[lane]) - mean, slope);
        }
    }
    shift = block_sum(shift, shared);
    slope = block_sum(slope, shared);
    if (threadIdx.x == 0) {
        parts[blockIdx.x] = shift;
        parts[gridDim.x + blockIdx.x] = slope;
    }
}

#endif

#ifdef GRADIENT
// The gradients of weight and bias, and of each channel: mean, scale, shift, slope. A warp to a channel.
extern "C" __global__ void gradient_numbers(
    const float *parts, const I1 *weight, const I2 *mean, const I3 *rstd, O1 *dweight, O2 *dbias, float *numbers, i64 channels,
    i64 chunks, float count) {
    const i64 channel = (i64)blockIdx.x * (blockDim.x / WARP) + threadIdx.x / WARP;
    if (channel >= channels) return;
    float shift = 0.0f, slope = 0.0f;
    for (i64 chunk = threadIdx.x % WARP; chunk < chunks; chunk += WARP) {
        shift += parts[channel * chunks + chunk];
        slope += parts[(channels + channel) * chunks + chunk];
    }
    shift = warp_sum(shift);
    slope = warp_sum(slope) * to_float(rstd[channel]);
    if (threadIdx.x % WARP != 0) return;
    dweight[channel] = from_float<O1>(slope);
    dbias[channel] = from_float<O2>(shift);
    numbers[channel] = to_float(mean[channel]);
    numbers[channels + channel] = to_float(weight[channel]) * to_float(rstd[channel]);
    numbers[2 * channels + channel] = shift / count;
    numbers[3 * channels + channel] = slope * to_float(rstd[channel]) / count;
}

#endif

#ifdef GIVEN
// The same numbers from sums that are given.
extern "C" __global__ void given_numbers(
    const I1 *weight, const I2 *mean, const I3 *rstd, const I5 *shift, const I6 *slope, float *numbers, i64 channels, float count) {
    const i64 channel = (i64)blockIdx.x * blockDim.x + threadIdx.x;
    if (channel >= channels) return;
    const float own = to_float(rstd[channel]);
    numbers[channel] = to_float(mean[channel]);
    numbers[channels + channel] = to_float(weight[channel]) * own;
    numbers[2 * channels + channel] = to_float(shift[channel]) / count;
    numbers[3 * channels + channel] = to_float(slope[channel]) * own * own / count;
}
#endif

#if defined(GRADIENT) || defined(GIVEN)
// dx = scale·(g − shift − (x − mean)·slope): a thread to a pack.
extern "C" __global__ void differentiate(
    const I0 *x, const I4 *g, const float *numbers, O0 *dx, i64 packs, i64 channels, i64 size) {
    const i64 at = (i64)blockIdx.x * blockDim.x + threadIdx.x;
    if (at >= packs) return;
    const i64 channel = at * PACK / size % channels;
    const float mean = numbers[channel], scale = numbers[channels + channel];
    const float shift = numbers[2 * channels + channel], slope = numbers[3 * channels + channel];
    const Pack<I0, PACK> values = load_pack<I0, PACK>(x + at * PACK);
    const Pack<I4, PACK> gradients = load_pack<I4, PACK>(g + at * PACK);
    Pack<O0, PACK> made;
    #pragma unroll
    for (int lane = 0; lane < PACK; lane++)
        made.at[lane] = from_float<O0>(
            scale * fmaf(mean - to_float(values.at[lane]), slope, to_float(gradients.at[lane]) - shift));
    store_pack<O0, PACK>(dx + at * PACK, made);
}
#endif

#if defined(FORWARD) || defined(EVALUATION)
// y = (x − mean)·scale + bias: a thread to a pack.
extern "C" __global__ void scale_planes(const I0 *x, const float *numbers, O0 *y, i64 packs, i64 channels, i64 size) {
    const i64 at = (i64)blockIdx.x * blockDim.x + threadIdx.x;
    if (at >= packs) return;
    const i64 channel = at * PACK / size % channels;
    const float mean = numbers[channel], scale = numbers[channels + channel], bias = numbers[2 * channels + channel];
    const Pack<I0, PACK> values = load_pack<I0, PACK>(x + at * PACK);
    Pack<O0, PACK> made;
    #pragma unroll
    for (int lane = 0; lane < PACK; lane++) made.at[lane] = from_float<O0>(fmaf(to_float(values.at[lane]) - mean, scale, bias));
    store_pack<O0, PACK>(y + at * PACK, made);
}
#endif

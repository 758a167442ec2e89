// Dropout by the random numbers of the CPU: four neighbouring elements of a sample share a counter. A thread to each counter.
extern "C" __global__ void dropout(
    const I0 *x, const int *rng, O0 *y, i64 samples, i64 inner, i64 before, i64 quads, i64 stream, float p, float scale) {
    const i64 at = (i64)blockIdx.x * blockDim.x + threadIdx.x;
    if (at >= samples * quads) return;
    const i64 sample = at / quads, quad = before / 4 + at % quads;
    const u32 key0 = (u32)rng[0] ^ (u32)stream, key1 = (u32)rng[1] ^ (u32)((u64)stream >> 32);
    const u64 high = (u64)(u32)rng[2] << 32 | (u32)((u32)rng[3] + (u32)sample);
    const uint4 block = philox(key0, key1, high, (u64)quad);
    const u32 words[4] = {block.x, block.y, block.z, block.w};
    #pragma unroll
    for (int word = 0; word < 4; word++) {
        const i64 element = quad * 4 + word - before;
        // A dropped element is zero even if it was NaN.
        if (element >= 0 && element < inner)
            y[sample * inner + element] =
                from_float<O0>(unit(words[word]) >= p ? to_float(x[sample * inner + element]) * scale : 0.0f);
    }
}

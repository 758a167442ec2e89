// Rounds values to neighbours of bf16 by the random numbers of the CPU: four neighbouring elements of the parameter share a counter. A
// thread to four elements of the shard.
extern "C" __global__ void round_bf16(
    const float *x, const float *step, float *y, i64 key, i64 count, i64 start, i64 run, i64 stride, i64 first) {
    const i64 begin = ((i64)blockIdx.x * blockDim.x + threadIdx.x) * 4;
    const i64 end = begin + 4 < count ? begin + 4 : count;
    i64 quad = -1;
    u32 words[4];
    for (i64 at = begin; at < end; at++) {
        const i64 number = first + at, place = start + number / run * stride + number % run;
        if (place / 4 != quad) {
            quad = place / 4;
            const uint4 block = philox((u32)key, (u32)((u64)key >> 32), (u64)step[0], (u64)quad);
            words[0] = block.x; words[1] = block.y; words[2] = block.z; words[3] = block.w;
        }
        const u32 bits = __float_as_uint(x[at]);
        const u32 finite = (bits + (words[place % 4] & 0xffffu)) & 0xffff0000u;
        // NaN stays NaN, whatever bits it is cut to.
        const u32 special = (bits & 0xffff0000u) | ((bits & 0x007fffffu) == 0u ? 0u : 0x00400000u);
        y[at] = __uint_as_float((bits & 0x7f800000u) == 0x7f800000u ? special : finite);
    }
}

// Products of tensor cores, for the emulator: every lane gives its parts of both factors, and gets its part of the result.
template <typename H> static inline float number_at(u32 pair, int at) {
    H half;
    half.bits = (unsigned short)(pair >> 16 * at);
    return to_float(half);
}
// Of halves a register has two along the depth, of floats one, cut to TF32.
template <> inline float number_at<float>(u32 bits, int) { return __uint_as_float(bits & 0xffffe000u); }
template <typename H> static inline void multiply(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    constexpr int NUMBERS = 4 / sizeof(H);
    static u32 left[32][32][4], right[32][32][2];
    const int lane = emulator::lane(), warp = emulator::current / 32;
    for (int at = 0; at < 4; at++) left[warp][lane][at] = a[at];
    right[warp][lane][0] = b0;
    right[warp][lane][1] = b1;
    __syncwarp();
    for (int at = 0; at < 4; at++) {
        const int row = lane / 4 + at / 2 * 8, column = lane % 4 * 2 + at % 2;
        float sum = c[at];
        for (int k = 0; k < 8 * NUMBERS; k++) {
            const int pair = k / NUMBERS;
            const u32 own = left[warp][row % 8 * 4 + pair % 4][row / 8 + pair / 4 * 2];
            const u32 other = right[warp][column * 4 + pair % 4][pair / 4];
            sum = fmaf(number_at<H>(own, k % NUMBERS), number_at<H>(other, k % NUMBERS), sum);
        }
        c[at] = sum;
    }
    __syncwarp();
}
template <typename H> static inline u32 pack_pair(float first, float second) {
    return (u32)from_float<H>(first).bits | (u32)from_float<H>(second).bits << 16;
}

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

// Products by groups of four warps: a warp's rows of the result depend on its own rows and the right factor alone, which lies with its
// pieces of 16 bytes changed about.
constexpr int ROW_BYTES = 128;
static inline int piece_of_row(int row, int piece) { return row * (ROW_BYTES / 16) + (piece ^ row % 8); }
static inline void show_copies() {}
static inline void begin_products() {}
static inline void end_products() {}
template <typename T> static inline void settle(T &) {}
static inline u64 right_factor(const void *rows, int bytes) { return (u64)rows + bytes; }
template <typename H, bool ACROSS> struct GroupProduct {
    static void run(float (*c)[4], const u32 (&a)[4], u64 right, bool adds) {
        static u32 left[32][32][4];
        const int lane = emulator::lane(), warp = emulator::current / 32;
        for (int at = 0; at < 4; at++) left[warp][lane][at] = a[at];
        __syncwarp();
        for (int column = 0; column < 64; column++)
            for (int at = 0; at < 4; at++) {
                if (column % 2 != at % 2 || column % 8 / 2 != lane % 4) continue;
                const int row = lane / 4 + at / 2 * 8;
                float sum = adds ? c[column / 8][at] : 0.0f;
                for (int k = 0; k < 16; k++) {
                    const u64 place = right + (ACROSS ? k * ROW_BYTES + column * 2 : column * ROW_BYTES + k * 2);
                    const H other = *reinterpret_cast<const H *>(place ^ (place >> 7 & 7) << 4);
                    sum = fmaf(number_at<H>(left[warp][row % 8 * 4 + k % 8 / 2][row / 8 + k / 8 * 2], k % 2), to_float(other), sum);
                }
                c[column / 8][at] = sum;
            }
        __syncwarp();
    }
};

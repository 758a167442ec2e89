// Rotary position embedding: pairs (i, i + half) turn by an angle that grows with the position.

// cos, then sin, of [positions, half]. Angles are in double precision, which long sequences need.
extern "C" __global__ void fill_table(float *table, i64 positions, i64 half, i64 first, float base, int inverse) {
    const i64 at = (i64)blockIdx.x * blockDim.x + threadIdx.x;
    if (at >= positions * half) return;
    const double speed = exp(-log((double)base) * (double)(at % half) / (double)half);
    double sine, cosine;
    sincos((double)(first + at / half) * speed, &sine, &cosine);
    table[at] = (float)cosine;
    table[positions * half + at] = (float)(inverse ? -sine : sine);
}

// A thread to a pair.
extern "C" __global__ void rotate(const I0 *x, const float *table, O0 *y, i64 pairs, i64 positions, i64 half) {
    const i64 at = (i64)blockIdx.x * blockDim.x + threadIdx.x;
    if (at >= pairs) return;
    const i64 row = at / half, pair = at % half, entry = row % positions * half + pair;
    const float cosine = table[entry], sine = table[positions * half + entry];
    const float first = to_float(x[row * 2 * half + pair]), second = to_float(x[row * 2 * half + half + pair]);
    y[row * 2 * half + pair] = from_float<O0>(fmaf(first, cosine, -(second * sine)));
    y[row * 2 * half + half + pair] = from_float<O0>(fmaf(second, cosine, first * sine));
}

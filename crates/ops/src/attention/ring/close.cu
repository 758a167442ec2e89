// The beginning and the end of attention in rounds.

// Of every row the largest score, −∞, and the sum of exponentials, 0.
extern "C" __global__ void begin_numbers(float *numbers, i64 rows) {
    const i64 row = (i64)blockIdx.x * blockDim.x + threadIdx.x;
    if (row >= rows) return;
    numbers[2 * row] = -INFINITY;
    numbers[2 * row + 1] = 0.0f;
}

// y = o / sum and lse = largest + ln sum; a query that has seen nothing gives zero. A thread to an element.
extern "C" __global__ void close(const float *o, const float *numbers, float *y, float *lse, i64 count, i64 tokens, i64 heads, i64 d) {
    const i64 at = (i64)blockIdx.x * blockDim.x + threadIdx.x;
    if (at >= count) return;
    const i64 column = at % d, h = at / d % heads, token = at / d / heads % tokens, b = at / d / heads / tokens;
    const i64 row = (b * heads + h) * tokens + token;
    const float largest = numbers[2 * row], sum = numbers[2 * row + 1];
    const bool blind = largest == -INFINITY;
    y[at] = blind ? 0.0f : o[at] / sum;
    if (column == 0) lse[row] = blind ? -INFINITY : largest + logf(sum);
}

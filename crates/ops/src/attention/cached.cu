// Attention of a few new tokens over a cache. Keys lie in blocks of KEYS, dims outermost within a block; values row by row.

#define KEYS 16
#define THREADS 256

__device__ __forceinline__ i64 key_place(i64 position, i64 column, i64 d) {
    return (position / KEYS * d + column) * KEYS + position % KEYS;
}

// The cache as it was, unless it stays where it is.
extern "C" __global__ void keep(const float *from, float *to, i64 count) {
    const i64 at = (i64)blockIdx.x * blockDim.x + threadIdx.x;
    if (from != to && at < count) to[at] = from[at];
}

// New keys and values at their positions, later tokens over earlier ones: a thread to a column of a head of a sample.
extern "C" __global__ void write_tokens(
    const float *qkv, const int *positions, float *keys, float *values, i64 count, i64 tokens, i64 heads, i64 d, i64 context,
    i64 keys_len) {
    const i64 at = (i64)blockIdx.x * blockDim.x + threadIdx.x;
    if (at >= count) return;
    const i64 column = at % d, head = at / d, h = head % heads, b = head / heads, width = heads * d;
    for (i64 token = 0; token < tokens; token++) {
        const i64 position = positions[b * tokens + token];
        if (position < 0 || position >= context) continue;
        const float *own = qkv + (b * tokens + token) * 3 * width + h * d + column;
        keys[head * keys_len + key_place(position, column, d)] = own[width];
        values[(head * context + position) * d + column] = own[2 * width];
    }
}

// A block to a head of a token, which sees the keys up to its own position. `dynamic` holds THREADS shares and d sums.
extern __shared__ __align__(1024) unsigned char dynamic[];
extern "C" __global__ void attend_cached(
    const float *qkv, const int *positions, const float *keys, const float *values, float *y, i64 tokens, i64 heads, i64 d,
    i64 context, i64 keys_len, float scale) {
    __shared__ float shared[WARP + 1];
    float *shares = reinterpret_cast<float *>(dynamic), *sums = shares + THREADS;
    const i64 h = blockIdx.x % heads, row = blockIdx.x / heads, b = row / tokens, width = heads * d, head = b * heads + h;
    const i64 last = positions[row];
    const float *q = qkv + row * 3 * width + h * d;
    y += row * width + h * d;
    if (last < 0 || last >= context) {
        for (i64 column = threadIdx.x; column < d; column += THREADS) y[column] = NAN;
        return;
    }
    keys += head * keys_len;
    values += head * context * d;
    for (i64 column = threadIdx.x; column < d; column += THREADS) sums[column] = 0.0f;
    float largest = -INFINITY, total = 0.0f;
    for (i64 start = 0; start <= last; start += THREADS) {
        const i64 key = start + threadIdx.x;
        float score = -INFINITY;
        if (key <= last) {
            score = 0.0f;
            for (i64 column = 0; column < d; column++) score = fmaf(q[column], keys[key_place(key, column, d)], score);
            score *= scale;
        }
        const float most = max_or_nan(largest, block_max(score, shared));
        const float share = most == -INFINITY ? 0.0f : expf(score - most);
        const float factor = most == -INFINITY ? 1.0f : expf(largest - most);
        total = fmaf(total, factor, block_sum(share, shared));
        largest = most;
        shares[threadIdx.x] = share;
        __syncthreads();
        const int count = (int)(last + 1 - start < THREADS ? last + 1 - start : THREADS);
        for (i64 column = threadIdx.x; column < d; column += THREADS) {
            float sum = 0.0f;
            for (int at = 0; at < count; at++) sum = fmaf(shares[at], values[(start + at) * d + column], sum);
            sums[column] = fmaf(sums[column], factor, sum);
        }
        __syncthreads();
    }
    const float part = largest == -INFINITY ? 0.0f : 1.0f / total;
    for (i64 column = threadIdx.x; column < d; column += THREADS) y[column] = sums[column] * part;
}

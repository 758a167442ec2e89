// Attention of any size, tile by tile: scores live in shared memory and are never stored. Legend: QB queries and KB keys of a tile, d
// dim of a head. Operands lie as [b, t, heads·d] with rows of some stride; sums over keys or queries go tile by tile in order, so
// they depend on the sizes alone.
//
// OPERAND is the element type of q, k, v, y and g, BIAS that of the additive mask (if there is one), RESULT that of running results.

extern __shared__ __align__(1024) unsigned char dynamic[];

// Where the operands lie, and the sizes.
#define OPERANDS \
    const OPERAND *q, const OPERAND *k, const OPERAND *v, i64 q_stride, i64 kv_stride, i64 q_rows, i64 kv_rows, i64 queries, i64 keys, i64 heads, i64 d, \
    float scale, i64 offset
// With `offset`, query i sees the keys up to i + offset: a causal mask; without (CAUSAL 0) all.
#if CAUSAL
#define HIDDEN(query, key) ((key) > (query) + offset)
// Keys that any query before `end` may see.
#define VISIBLE(end) ((end) + offset < 0 ? 0 : ((end) + offset < keys ? (end) + offset : keys))
#else
#define HIDDEN(query, key) false
#define VISIBLE(end) keys
#endif

#ifdef BIAS
#define MASK const BIAS *bias, i64 bias_batch, i64 bias_head,
#define BIAS_AT(query, key) to_float(bias[b * bias_batch + h * bias_head + (query) * keys + (key)])
#else
#define MASK
#define BIAS_AT(query, key) 0.0f
#endif

#define THREADS 256
#define WARPS (THREADS / WARP)

// Rows `first..first + count` of a head as floats, `stride` apart in shared memory; zeros beyond `rows`.
__device__ __forceinline__ void load_rows(float *to, int stride, const OPERAND *from, i64 from_stride, i64 first, int count, i64 rows, i64 d) {
    for (i64 at = threadIdx.x; at < count * d; at += THREADS) {
        const i64 row = at / d, column = at % d;
        to[row * stride + column] = first + row < rows ? to_float(from[(first + row) * from_stride + column]) : 0.0f;
    }
}

__device__ __forceinline__ float dot(const float *a, const float *b, i64 d) {
    float sum = 0.0f;
    for (i64 at = 0; at < d; at++) sum = fmaf(a[at], b[at], sum);
    return sum;
}

#ifdef FORWARD
// A block to QB queries of a head. With RUNNING, results go on from `y` and `numbers` (the largest score and the sum of exponentials
// of each row) and stay undivided; else they are divided, and `lse` gets the log-sum-exp.
extern "C" __global__ void attend(
    OPERANDS, MASK RESULT *y, i64 y_stride, float *lse, i64 lse_rows) {
    const i64 tiles = (queries + QB - 1) / QB;
    const i64 first = blockIdx.x % tiles * QB, h = blockIdx.x / tiles % heads, b = blockIdx.x / tiles / heads;
    const int stride = (int)d + 1;
    float *q_tile = reinterpret_cast<float *>(dynamic), *k_tile = q_tile + QB * stride, *v_tile = k_tile + KB * stride;
    float *o_tile = v_tile + KB * stride, *p_tile = o_tile + QB * stride, *rows = p_tile + QB * (KB + 1);
    float *largest = rows, *sums = rows + QB, *factors = rows + 2 * QB;
    q += b * q_rows * q_stride + h * d;
    k += b * kv_rows * kv_stride + h * d;
    v += b * kv_rows * kv_stride + h * d;
    y += b * q_rows * y_stride + h * d;
    lse += (b * heads + h) * lse_rows * (1 + RUNNING);
    load_rows(q_tile, stride, q, q_stride, first, QB, queries, d);
    for (i64 at = threadIdx.x; at < QB * d; at += THREADS) {
        const i64 row = at / d, column = at % d;
        o_tile[row * stride + column] = RUNNING && first + row < queries ? to_float(y[(first + row) * y_stride + column]) : 0.0f;
    }
    for (int row = threadIdx.x; row < QB; row += THREADS) {
        const bool goes_on = RUNNING && first + row < queries;
        largest[row] = goes_on ? lse[2 * (first + row)] : -INFINITY;
        sums[row] = goes_on ? lse[2 * (first + row) + 1] : 0.0f;
    }
    const i64 visible = VISIBLE(first + QB < queries ? first + QB : queries);
    for (i64 start = 0; start < visible; start += KB) {
        __syncthreads();
        load_rows(k_tile, stride, k, kv_stride, start, KB, keys, d);
        load_rows(v_tile, stride, v, kv_stride, start, KB, keys, d);
        __syncthreads();
        for (int at = threadIdx.x; at < QB * KB; at += THREADS) {
            const int row = at / KB, column = at % KB;
            const i64 query = first + row, key = start + column;
            float score = -INFINITY;
            if (query < queries && key < keys && !HIDDEN(query, key))
                score = fmaf(dot(q_tile + row * stride, k_tile + column * stride, d), scale, BIAS_AT(query, key));
            p_tile[row * (KB + 1) + column] = score;
        }
        __syncthreads();
        for (int row = threadIdx.x / WARP; row < QB; row += WARPS) {
            const int lane = threadIdx.x % WARP;
            float most = largest[row];
            for (int column = lane; column < KB; column += WARP) most = max_or_nan(most, p_tile[row * (KB + 1) + column]);
            most = warp_max(most);
            float sum = 0.0f;
            for (int column = lane; column < KB; column += WARP) {
                float *p = p_tile + row * (KB + 1) + column;
                // Of a query that has seen nothing so far, nothing counts.
                *p = most == -INFINITY ? 0.0f : expf(*p - most);
                sum += *p;
            }
            sum = warp_sum(sum);
            const float factor = most == -INFINITY ? 1.0f : expf(largest[row] - most);
            __syncwarp();
            if (lane == 0) {
                sums[row] = fmaf(sums[row], factor, sum);
                largest[row] = most;
                factors[row] = factor;
            }
        }
        __syncthreads();
        const int count = (int)(keys - start < KB ? keys - start : KB);
        for (i64 at = threadIdx.x; at < QB * d; at += THREADS) {
            const int row = (int)(at / d), column = (int)(at % d);
            float sum = 0.0f;
            for (int key = 0; key < count; key++)
                sum = fmaf(p_tile[row * (KB + 1) + key], v_tile[key * stride + column], sum);
            o_tile[row * stride + column] = fmaf(o_tile[row * stride + column], factors[row], sum);
        }
    }
    __syncthreads();
    for (i64 at = threadIdx.x; at < QB * d; at += THREADS) {
        const i64 row = at / d, column = at % d;
        if (first + row >= queries) continue;
        const bool blind = largest[row] == -INFINITY;
        const float share = RUNNING ? 1.0f : (blind ? 0.0f : 1.0f / sums[row]);
        // A query that sees no key gives zero; what its keys' values are still comes through where they are not numbers.
        y[(first + row) * y_stride + column] = from_float<RESULT>(o_tile[row * stride + column] * share);
    }
    for (int row = threadIdx.x; row < QB; row += THREADS) {
        if (first + row >= queries) continue;
        if (RUNNING) {
            lse[2 * (first + row)] = largest[row];
            lse[2 * (first + row) + 1] = sums[row];
        } else {
            lse[first + row] = largest[row] == -INFINITY ? -INFINITY : largest[row] + logf(sums[row]);
        }
    }
}
#endif

#ifdef BACKWARD
// delta[b, h, query] = Σ y·g: a warp to a row.
extern "C" __global__ void row_deltas(const OPERAND *y, const OPERAND *g, float *delta, i64 rows, i64 queries, i64 batch_rows, i64 heads, i64 d) {
    const i64 row = (i64)blockIdx.x * (blockDim.x / WARP) + threadIdx.x / WARP;
    if (row >= rows) return;
    const i64 query = row % queries, h = row / queries % heads, b = row / queries / heads;
    const i64 from = ((b * batch_rows + query) * heads + h) * d;
    float sum = 0.0f;
    for (i64 at = threadIdx.x % WARP; at < d; at += WARP) sum = fmaf(to_float(y[from + at]), to_float(g[from + at]), sum);
    sum = warp_sum(sum);
    if (threadIdx.x % WARP == 0) delta[row] = sum;
}

// The probabilities of a tile again, and the gradients of its scores times `scale`.
__device__ __forceinline__ void tile_scores(
    OPERANDS, MASK const float *lse, const float *delta, i64 b, i64 h, i64 first, i64 start, const float *q_tile, const float *k_tile,
    const float *v_tile, const float *g_tile, float *p_tile, float *ds_tile) {
    const int stride = (int)d + 1;
    for (int at = threadIdx.x; at < QB * KB; at += THREADS) {
        const int row = at / KB, column = at % KB;
        const i64 query = first + row, key = start + column;
        float p = 0.0f, ds = 0.0f;
        if (query < queries && key < keys) {
            float score = -INFINITY;
            if (!HIDDEN(query, key))
                score = fmaf(dot(q_tile + row * stride, k_tile + column * stride, d), scale, BIAS_AT(query, key));
            const float sum = lse[query];
            p = sum == -INFINITY ? 0.0f : expf(score - sum);
            ds = p * (dot(g_tile + row * stride, v_tile + column * stride, d) - delta[query]) * scale;
        }
        p_tile[row * (KB + 1) + column] = p;
        ds_tile[row * (KB + 1) + column] = ds;
    }
}

#define TILES \
    const int stride = (int)d + 1; \
    float *q_tile = reinterpret_cast<float *>(dynamic), *g_tile = q_tile + QB * stride, *k_tile = g_tile + QB * stride; \
    float *v_tile = k_tile + KB * stride, *p_tile = v_tile + KB * stride, *ds_tile = p_tile + QB * (KB + 1); \
    float *sum_tile = ds_tile + QB * (KB + 1); \
    q += b * q_rows * q_stride + h * d; \
    g += b * q_rows * g_stride + h * d; \
    k += b * kv_rows * kv_stride + h * d; \
    v += b * kv_rows * kv_stride + h * d; \
    lse += (b * heads + h) * lse_rows; \
    delta += (b * heads + h) * lse_rows;

#ifdef BIAS
#define MASK_ARGS bias, bias_batch, bias_head,
#else
#define MASK_ARGS
#endif
#define SCORES \
    tile_scores( \
        q, k, v, q_stride, kv_stride, q_rows, kv_rows, queries, keys, heads, d, scale, offset, MASK_ARGS lse, delta, b, h, first, start, q_tile, \
        k_tile, v_tile, g_tile, p_tile, ds_tile)

// A block to QB queries of a head: dq = Σ_k ds·k. With RUNNING it is added to what is there.
extern "C" __global__ void query_gradients(
    OPERANDS, MASK const OPERAND *g, i64 g_stride, const float *lse, const float *delta, i64 lse_rows, RESULT *dq, i64 dq_stride) {
    const i64 tiles = (queries + QB - 1) / QB;
    const i64 first = blockIdx.x % tiles * QB, h = blockIdx.x / tiles % heads, b = blockIdx.x / tiles / heads;
    TILES
    dq += b * q_rows * dq_stride + h * d;
    load_rows(q_tile, stride, q, q_stride, first, QB, queries, d);
    load_rows(g_tile, stride, g, g_stride, first, QB, queries, d);
    for (i64 at = threadIdx.x; at < QB * d; at += THREADS) {
        const i64 row = at / d, column = at % d;
        const bool goes_on = RUNNING && first + row < queries;
        sum_tile[row * stride + column] = goes_on ? to_float(dq[(first + row) * dq_stride + column]) : 0.0f;
    }
    const i64 visible = VISIBLE(first + QB < queries ? first + QB : queries);
    for (i64 start = 0; start < visible; start += KB) {
        __syncthreads();
        load_rows(k_tile, stride, k, kv_stride, start, KB, keys, d);
        load_rows(v_tile, stride, v, kv_stride, start, KB, keys, d);
        __syncthreads();
        SCORES;
        __syncthreads();
        const int count = (int)(keys - start < KB ? keys - start : KB);
        for (i64 at = threadIdx.x; at < QB * d; at += THREADS) {
            const int row = (int)(at / d), column = (int)(at % d);
            float sum = sum_tile[row * stride + column];
            for (int key = 0; key < count; key++)
                sum = fmaf(ds_tile[row * (KB + 1) + key], k_tile[key * stride + column], sum);
            sum_tile[row * stride + column] = sum;
        }
    }
    __syncthreads();
    for (i64 at = threadIdx.x; at < QB * d; at += THREADS) {
        const i64 row = at / d, column = at % d;
        if (first + row < queries) dq[(first + row) * dq_stride + column] = from_float<RESULT>(sum_tile[row * stride + column]);
    }
}

// A block to KB keys of a head: dk = Σ_q ds·q and dv = Σ_q p·g.
extern "C" __global__ void key_gradients(
    OPERANDS, MASK const OPERAND *g, i64 g_stride, const float *lse, const float *delta, i64 lse_rows, RESULT *dk, RESULT *dv, i64 dkv_stride) {
    const i64 tiles = (keys + KB - 1) / KB;
    const i64 start = blockIdx.x % tiles * KB, h = blockIdx.x / tiles % heads, b = blockIdx.x / tiles / heads;
    TILES
    float *dv_tile = sum_tile + KB * stride;
    dk += b * kv_rows * dkv_stride + h * d;
    dv += b * kv_rows * dkv_stride + h * d;
    load_rows(k_tile, stride, k, kv_stride, start, KB, keys, d);
    load_rows(v_tile, stride, v, kv_stride, start, KB, keys, d);
    for (i64 at = threadIdx.x; at < KB * d; at += THREADS) {
        const i64 row = at / d, column = at % d;
        const bool goes_on = RUNNING && start + row < keys;
        sum_tile[row * stride + column] = goes_on ? to_float(dk[(start + row) * dkv_stride + column]) : 0.0f;
        dv_tile[row * stride + column] = goes_on ? to_float(dv[(start + row) * dkv_stride + column]) : 0.0f;
    }
    for (i64 first = 0; first < queries; first += QB) {
        // Of a tile of queries that see none of these keys, nothing comes.
        if (VISIBLE(first + QB < queries ? first + QB : queries) <= start) continue;
        __syncthreads();
        load_rows(q_tile, stride, q, q_stride, first, QB, queries, d);
        load_rows(g_tile, stride, g, g_stride, first, QB, queries, d);
        __syncthreads();
        SCORES;
        __syncthreads();
        const int count = (int)(queries - first < QB ? queries - first : QB);
        for (i64 at = threadIdx.x; at < KB * d; at += THREADS) {
            const int row = (int)(at / d), column = (int)(at % d);
            float key = sum_tile[row * stride + column], value = dv_tile[row * stride + column];
            for (int query = 0; query < count; query++) {
                key = fmaf(ds_tile[query * (KB + 1) + row], q_tile[query * stride + column], key);
                value = fmaf(p_tile[query * (KB + 1) + row], g_tile[query * stride + column], value);
            }
            sum_tile[row * stride + column] = key;
            dv_tile[row * stride + column] = value;
        }
    }
    __syncthreads();
    for (i64 at = threadIdx.x; at < KB * d; at += THREADS) {
        const i64 row = at / d, column = at % d;
        if (start + row >= keys) continue;
        dk[(start + row) * dkv_stride + column] = from_float<RESULT>(sum_tile[row * stride + column]);
        dv[(start + row) * dkv_stride + column] = from_float<RESULT>(dv_tile[row * stride + column]);
    }
}

#ifdef BIAS
// The gradient of the scores, [b, h, query, key]: a thread to each. Only learnt biases need it.
extern "C" __global__ void bias_gradients(
    OPERANDS, MASK const OPERAND *g, i64 g_stride, const float *lse, const float *delta, RESULT *dbias, i64 count) {
    const i64 at = (i64)blockIdx.x * blockDim.x + threadIdx.x;
    if (at >= count) return;
    const i64 key = at % keys, row = at / keys, query = row % queries, h = row / queries % heads, b = row / queries / heads;
    q += (b * queries + query) * q_stride + h * d;
    g += (b * queries + query) * g_stride + h * d;
    k += (b * keys + key) * kv_stride + h * d;
    v += (b * keys + key) * kv_stride + h * d;
    float score = 0.0f, dp = 0.0f;
    for (i64 column = 0; column < d; column++) {
        score = fmaf(to_float(q[column]), to_float(k[column]), score);
        dp = fmaf(to_float(g[column]), to_float(v[column]), dp);
    }
    score = HIDDEN(query, key) ? -INFINITY : fmaf(score, scale, BIAS_AT(query, key));
    const float p = lse[row] == -INFINITY ? 0.0f : expf(score - lse[row]);
    dbias[at] = from_float<RESULT>(p * (dp - delta[row]));
}
#endif
#endif

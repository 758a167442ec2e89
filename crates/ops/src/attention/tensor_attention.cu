// Attention on tensor cores, for halves and heads of D dims (a multiple of 16, at most 128). A warp has 16 rows; the other side of the
// product passes in tiles of OTHERS rows, of which the next is copied while one is used. Scores stay in registers. With tensor.cuh
// before it; what the operands mean is in attention.cu.

extern __shared__ __align__(1024) unsigned char dynamic[];

#define WARPS 8
#define THREADS (WARPS * WARP)
#define OWN (WARPS * 16)
#define STRIDE (D + 8)
#define STEPS (D / 16)
#define LOG2_E 1.4426950408889634f

#define OPERANDS \
    const OPERAND *q, const OPERAND *k, const OPERAND *v, i64 q_stride, i64 kv_stride, i64 q_rows, i64 kv_rows, i64 queries, i64 keys, i64 heads, \
    i64 batch, float scale, i64 offset
#if CAUSAL
#define VISIBLE(end) ((end) + offset < 0 ? 0 : ((end) + offset < keys ? (end) + offset : keys))
#else
#define VISIBLE(end) keys
#endif

__device__ __forceinline__ i64 least(i64 a, i64 b) { return a < b ? a : b; }

// Starts the copy of rows `first..first + count` of a head; zeros beyond `rows`.
__device__ __forceinline__ void copy_rows(OPERAND *to, const OPERAND *from, i64 stride, i64 first, int count, i64 rows) {
    for (int at = threadIdx.x; at < count * (D / 8); at += THREADS) {
        const int row = at / (D / 8), column = at % (D / 8) * 8;
        const bool reads = first + row < rows;
        copy_async(to + row * STRIDE + column, from + (reads ? (first + row) * stride : 0) + column, reads);
    }
}

// The warp's 16 rows of a tile as a left factor, dims 16·step to 16·step + 15.
__device__ __forceinline__ void left_rows(u32 (&a)[4], const OPERAND *tile, int step) {
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    load_matrices(a, tile + (warp * 16 + lane % 16) * STRIDE + step * 16 + lane / 16 * 8);
}

// s = own rows · other rows, over their dims.
__device__ __forceinline__ void score(float (&s)[OTHERS / 8][4], const OPERAND *own, const OPERAND *others) {
    const int lane = threadIdx.x % WARP;
    #pragma unroll
    for (int column = 0; column < OTHERS / 8; column++)
        #pragma unroll
        for (int at = 0; at < 4; at++) s[column][at] = 0.0f;
    #pragma unroll
    for (int step = 0; step < STEPS; step++) {
        u32 a[4];
        left_rows(a, own, step);
        #pragma unroll
        for (int column = 0; column < OTHERS / 8; column += 2) {
            u32 b[4];
            load_matrices(b, others + (column * 8 + lane / 16 * 8 + lane % 8) * STRIDE + step * 16 + lane / 8 % 2 * 8);
            multiply<OPERAND>(s[column], a, b[0], b[1]);
            multiply<OPERAND>(s[column + 1], a, b[2], b[3]);
        }
    }
}

// sums += p · other rows: p is [own, others] as `score` leaves it, rounded to halves.
__device__ __forceinline__ void weigh(float (&sums)[D / 8][4], const float (&p)[OTHERS / 8][4], const OPERAND *others) {
    const int lane = threadIdx.x % WARP;
    #pragma unroll
    for (int step = 0; step < OTHERS / 16; step++) {
        const u32 a[4] = {
            pack_pair<OPERAND>(p[2 * step][0], p[2 * step][1]), pack_pair<OPERAND>(p[2 * step][2], p[2 * step][3]),
            pack_pair<OPERAND>(p[2 * step + 1][0], p[2 * step + 1][1]), pack_pair<OPERAND>(p[2 * step + 1][2], p[2 * step + 1][3])};
        #pragma unroll
        for (int column = 0; column < D / 8; column += 2) {
            u32 b[4];
            load_transposed(b, others + (step * 16 + lane % 16) * STRIDE + column * 8 + lane / 16 * 8);
            multiply<OPERAND>(sums[column], a, b[0], b[1]);
            multiply<OPERAND>(sums[column + 1], a, b[2], b[3]);
        }
    }
}

// The warp's rows of sums times a factor for each of a lane's two, as rows of a head from `first` on.
__device__ __forceinline__ void store_rows(
    RESULT *to, i64 stride, i64 first, i64 rows, const float (&sums)[D / 8][4], float upper, float lower) {
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    #pragma unroll
    for (int half = 0; half < 2; half++) {
        const i64 row = first + warp * 16 + lane / 4 + half * 8;
        const float factor = half == 0 ? upper : lower;
        if (row < rows)
            #pragma unroll
            for (int column = 0; column < D / 8; column++) {
                Pack<RESULT, 2> pair;
                pair.at[0] = from_float<RESULT>(sums[column][2 * half] * factor);
                pair.at[1] = from_float<RESULT>(sums[column][2 * half + 1] * factor);
                store_pack<RESULT, 2>(to + row * stride + column * 8 + lane % 4 * 2, pair);
            }
    }
}

// Which rows a block has: all heads of the last tile come first, since causal ones take longest.
#define PLACE(count) \
    const i64 tiles = ((count) + OWN - 1) / OWN, pairs = heads * batch; \
    const i64 h = blockIdx.x % pairs % heads, b = blockIdx.x % pairs / heads;

#ifdef FORWARD
extern "C" __global__ void __launch_bounds__(THREADS) attend_on_tensor_cores(
    OPERANDS, RESULT *y, i64 y_stride, float *lse, i64 lse_rows) {
    PLACE(queries)
    const i64 first = (tiles - 1 - blockIdx.x / pairs) * OWN;
    OPERAND *q_tile = reinterpret_cast<OPERAND *>(dynamic), *k_tiles = q_tile + OWN * STRIDE, *v_tiles = k_tiles + 2 * OTHERS * STRIDE;
    q += b * q_rows * q_stride + h * D;
    k += b * kv_rows * kv_stride + h * D;
    v += b * kv_rows * kv_stride + h * D;
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    const i64 query = first + warp * 16 + lane / 4, visible = VISIBLE(least(first + OWN, queries));
    const int count = (int)((visible + OTHERS - 1) / OTHERS);
    copy_rows(q_tile, q, q_stride, first, OWN, queries);
    if (count > 0) {
        copy_rows(k_tiles, k, kv_stride, 0, OTHERS, keys);
        copy_rows(v_tiles, v, kv_stride, 0, OTHERS, keys);
    }
    end_copies();
    float o[D / 8][4] = {}, s[OTHERS / 8][4], largest[2] = {-INFINITY, -INFINITY}, sums[2] = {};
    const float slope = scale * LOG2_E;
    for (int tile = 0; tile < count; tile++) {
        const i64 start = (i64)tile * OTHERS;
        const OPERAND *k_tile = k_tiles + tile % 2 * OTHERS * STRIDE, *v_tile = v_tiles + tile % 2 * OTHERS * STRIDE;
        if (tile + 1 < count) {
            copy_rows(k_tiles + (tile + 1) % 2 * OTHERS * STRIDE, k, kv_stride, start + OTHERS, OTHERS, keys);
            copy_rows(v_tiles + (tile + 1) % 2 * OTHERS * STRIDE, v, kv_stride, start + OTHERS, OTHERS, keys);
        }
        end_copies();
        await_copies<1>();
        __syncthreads();
        score(s, q_tile, k_tile);
        // Only tiles at the border have keys that some query may not see.
        if (start + OTHERS > keys || (CAUSAL && start + OTHERS - 1 > first + offset)) {
            #pragma unroll
            for (int column = 0; column < OTHERS / 8; column++)
                #pragma unroll
                for (int at = 0; at < 4; at++) {
                    const i64 key = start + column * 8 + lane % 4 * 2 + at % 2;
                    if (key >= keys || (CAUSAL && key > query + at / 2 * 8 + offset)) s[column][at] = -INFINITY;
                }
        }
        #pragma unroll
        for (int half = 0; half < 2; half++) {
            float most = largest[half];
            #pragma unroll
            for (int column = 0; column < OTHERS / 8; column++)
                most = fmaxf(most, fmaxf(s[column][2 * half], s[column][2 * half + 1]));
            most = fmaxf(most, __shfl_xor_sync(ALL_LANES, most, 1));
            most = fmaxf(most, __shfl_xor_sync(ALL_LANES, most, 2));
            // Of a query that has seen nothing so far, everything stays zero.
            const float from = most == -INFINITY ? 0.0f : most, factor = power_of_two((largest[half] - from) * slope);
            float sum = 0.0f;
            #pragma unroll
            for (int column = 0; column < OTHERS / 8; column++)
                #pragma unroll
                for (int at = 2 * half; at < 2 * half + 2; at++) {
                    s[column][at] = power_of_two(fmaf(s[column][at], slope, -from * slope));
                    sum += s[column][at];
                }
            sums[half] = fmaf(sums[half], factor, sum);
            largest[half] = most;
            #pragma unroll
            for (int column = 0; column < D / 8; column++) {
                o[column][2 * half] *= factor;
                o[column][2 * half + 1] *= factor;
            }
        }
        weigh(o, s, v_tile);
        __syncthreads();
    }
    await_copies<0>();
    float shares[2];
    #pragma unroll
    for (int half = 0; half < 2; half++) {
        sums[half] += __shfl_xor_sync(ALL_LANES, sums[half], 1);
        sums[half] += __shfl_xor_sync(ALL_LANES, sums[half], 2);
        const bool blind = largest[half] == -INFINITY;
        shares[half] = blind ? 0.0f : 1.0f / sums[half];
        if (lane % 4 == 0 && query + half * 8 < queries)
            lse[(b * heads + h) * lse_rows + query + half * 8] = blind ? -INFINITY : fmaf(largest[half], scale, logf(sums[half]));
    }
    store_rows(y + b * q_rows * y_stride + h * D, y_stride, first, queries, o, shares[0], shares[1]);
}
#endif

#ifdef BACKWARD
#define SAVED const OPERAND *g, i64 g_stride, const float *lse, const float *delta, i64 lse_rows
#define HEAD \
    q += b * q_rows * q_stride + h * D; \
    g += b * q_rows * g_stride + h * D; \
    k += b * kv_rows * kv_stride + h * D; \
    v += b * kv_rows * kv_stride + h * D; \
    lse += (b * heads + h) * lse_rows; \
    delta += (b * heads + h) * lse_rows;

// What a query's scores are lowered by, in powers of two. One that sees nothing has no probabilities.
__device__ __forceinline__ float lowered(float lse) { return lse == -INFINITY ? INFINITY : lse * LOG2_E; }

// A block to OWN queries: dq = scale · Σ ds·k.
extern "C" __global__ void __launch_bounds__(THREADS) query_gradients_on_tensor_cores(OPERANDS, SAVED, RESULT *dq, i64 dq_stride) {
    PLACE(queries)
    const i64 first = (tiles - 1 - blockIdx.x / pairs) * OWN;
    HEAD
    OPERAND *q_tile = reinterpret_cast<OPERAND *>(dynamic), *g_tile = q_tile + OWN * STRIDE, *k_tiles = g_tile + OWN * STRIDE;
    OPERAND *v_tiles = k_tiles + 2 * OTHERS * STRIDE;
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    const i64 query = first + warp * 16 + lane / 4, visible = VISIBLE(least(first + OWN, queries));
    const int count = (int)((visible + OTHERS - 1) / OTHERS);
    copy_rows(q_tile, q, q_stride, first, OWN, queries);
    copy_rows(g_tile, g, g_stride, first, OWN, queries);
    if (count > 0) {
        copy_rows(k_tiles, k, kv_stride, 0, OTHERS, keys);
        copy_rows(v_tiles, v, kv_stride, 0, OTHERS, keys);
    }
    end_copies();
    float low[2], change[2];
    #pragma unroll
    for (int half = 0; half < 2; half++) {
        const bool inside = query + half * 8 < queries;
        low[half] = inside ? lowered(lse[query + half * 8]) : INFINITY;
        change[half] = inside ? delta[query + half * 8] : 0.0f;
    }
    float sums[D / 8][4] = {}, s[OTHERS / 8][4], ds[OTHERS / 8][4];
    const float slope = scale * LOG2_E;
    for (int tile = 0; tile < count; tile++) {
        const i64 start = (i64)tile * OTHERS;
        const OPERAND *k_tile = k_tiles + tile % 2 * OTHERS * STRIDE, *v_tile = v_tiles + tile % 2 * OTHERS * STRIDE;
        if (tile + 1 < count) {
            copy_rows(k_tiles + (tile + 1) % 2 * OTHERS * STRIDE, k, kv_stride, start + OTHERS, OTHERS, keys);
            copy_rows(v_tiles + (tile + 1) % 2 * OTHERS * STRIDE, v, kv_stride, start + OTHERS, OTHERS, keys);
        }
        end_copies();
        await_copies<1>();
        __syncthreads();
        score(s, q_tile, k_tile);
        score(ds, g_tile, v_tile);
        const bool border = start + OTHERS > keys || (CAUSAL && start + OTHERS - 1 > first + offset);
        #pragma unroll
        for (int column = 0; column < OTHERS / 8; column++)
            #pragma unroll
            for (int at = 0; at < 4; at++) {
                const i64 key = start + column * 8 + lane % 4 * 2 + at % 2;
                float p = power_of_two(fmaf(s[column][at], slope, -low[at / 2]));
                if (border && (key >= keys || (CAUSAL && key > query + at / 2 * 8 + offset))) p = 0.0f;
                ds[column][at] = p * (ds[column][at] - change[at / 2]);
            }
        weigh(sums, ds, k_tile);
        __syncthreads();
    }
    await_copies<0>();
    store_rows(dq + b * q_rows * dq_stride + h * D, dq_stride, first, queries, sums, scale, scale);
}

// A block to OWN keys: dk = scale · Σ ds·q and dv = Σ p·g over the queries, whose scores lie across here.
extern "C" __global__ void __launch_bounds__(THREADS) key_gradients_on_tensor_cores(
    OPERANDS, SAVED, RESULT *dk, RESULT *dv, i64 dkv_stride) {
    __shared__ float low[2][OTHERS], change[2][OTHERS];
    PLACE(keys)
    const i64 first = blockIdx.x / pairs * OWN;
    HEAD
    OPERAND *k_tile = reinterpret_cast<OPERAND *>(dynamic), *v_tile = k_tile + OWN * STRIDE, *q_tiles = v_tile + OWN * STRIDE;
    OPERAND *g_tiles = q_tiles + 2 * OTHERS * STRIDE;
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    const i64 key = first + warp * 16 + lane / 4;
    // The first query that sees any of these keys.
    const i64 seen = CAUSAL && first - offset > 0 ? first - offset : 0;
    const int begin = (int)(seen / OTHERS), end = (int)((queries + OTHERS - 1) / OTHERS);
    copy_rows(k_tile, k, kv_stride, first, OWN, keys);
    copy_rows(v_tile, v, kv_stride, first, OWN, keys);
    float keys_sum[D / 8][4] = {}, values_sum[D / 8][4] = {}, s[OTHERS / 8][4], ds[OTHERS / 8][4];
    const float slope = scale * LOG2_E;
    auto start_tile = [&](int tile) {
        const i64 start = (i64)tile * OTHERS;
        copy_rows(q_tiles + tile % 2 * OTHERS * STRIDE, q, q_stride, start, OTHERS, queries);
        copy_rows(g_tiles + tile % 2 * OTHERS * STRIDE, g, g_stride, start, OTHERS, queries);
        if (threadIdx.x < OTHERS) {
            const bool inside = start + threadIdx.x < queries;
            low[tile % 2][threadIdx.x] = inside ? lowered(lse[start + threadIdx.x]) : INFINITY;
            change[tile % 2][threadIdx.x] = inside ? delta[start + threadIdx.x] : 0.0f;
        }
    };
    if (begin < end) start_tile(begin);
    end_copies();
    for (int tile = begin; tile < end; tile++) {
        const i64 start = (i64)tile * OTHERS;
        const OPERAND *q_tile = q_tiles + tile % 2 * OTHERS * STRIDE, *g_tile = g_tiles + tile % 2 * OTHERS * STRIDE;
        if (tile + 1 < end) start_tile(tile + 1);
        end_copies();
        await_copies<1>();
        __syncthreads();
        score(s, k_tile, q_tile);
        score(ds, v_tile, g_tile);
        const bool border = CAUSAL && first + OWN - 1 > start + offset;
        #pragma unroll
        for (int column = 0; column < OTHERS / 8; column++)
            #pragma unroll
            for (int at = 0; at < 4; at++) {
                const int of_tile = column * 8 + lane % 4 * 2 + at % 2;
                float p = power_of_two(fmaf(s[column][at], slope, -low[tile % 2][of_tile]));
                if (border && key + at / 2 * 8 > start + of_tile + offset) p = 0.0f;
                s[column][at] = p;
                ds[column][at] = p * (ds[column][at] - change[tile % 2][of_tile]);
            }
        weigh(values_sum, s, g_tile);
        weigh(keys_sum, ds, q_tile);
        __syncthreads();
    }
    await_copies<0>();
    store_rows(dk + b * kv_rows * dkv_stride + h * D, dkv_stride, first, keys, keys_sum, scale, scale);
    store_rows(dv + b * kv_rows * dkv_stride + h * D, dkv_stride, first, keys, values_sum, 1.0f, 1.0f);
}
#endif

// Attention on tensor cores, for halves or floats and heads of D dims (a multiple of 16, at most 128). Floats are cut to TF32 or, with EXACT,
// to two such parts each, of which all but the product of the smaller ones is taken: as precise as products of floats. A warp has TILES tiles
// of 16 rows; the other side of the product passes in tiles of OTHERS rows, of which the next is copied while one is used. Scores stay
// in registers. With GROUPED, four warps multiply at once, as a Hopper does best: for halves, D 64, TILES 1 and OTHERS a multiple of 64. With
// tensor.cuh before it; what the operands mean is in attention.cu.

extern __shared__ __align__(1024) unsigned char dynamic[];

#define THREADS (WARPS * WARP)
#define OWN (WARPS * TILES * 16)
// Elements of 16 bytes. Rows of shared memory are to lie in different banks: so many stand beside each, or its own change places.
#define UNIT ((int)(16 / sizeof(OPERAND)))
#if GROUPED
#define STRIDE D
#define PIECE(row, piece) (piece_of_row(row, piece) * UNIT)
// Rows of the warps that go on together.
#define COMPANY 64
#else
#define STRIDE (D + UNIT)
#define PIECE(row, piece) ((row) * STRIDE + (piece) * UNIT)
#define COMPANY (TILES * 16)
#endif
// What one product of the tensor cores is deep.
#define DEPTH (2 * UNIT)
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
    for (int at = threadIdx.x; at < count * (D / UNIT); at += THREADS) {
        const int row = at / (D / UNIT), piece = at % (D / UNIT);
        const bool reads = first + row < rows;
        copy_async(to + PIECE(row, piece), from + (reads ? (first + row) * stride : 0) + piece * UNIT, reads);
    }
}

// The row of a block's tile that a lane has first in the warp's tile `which`; it has the eighth after it too.
__device__ __forceinline__ int row_of(int which) { return (threadIdx.x / WARP * TILES + which) * 16 + threadIdx.x % WARP / 4; }

// The first row of a warp's company.
__device__ __forceinline__ int first_of_company() { return threadIdx.x / (WARP * COMPANY / 16 / TILES) * COMPANY; }

__device__ __forceinline__ void own_factor(u32 (&a)[4], const OPERAND *tile, int which, int step) {
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    load_matrices(a, tile + PIECE((warp * TILES + which) * 16 + lane % 16, step * 2 + lane / 16));
}

#if EXACT
// What TF32 holds of a float, and what is left of it: nothing of one that is not finite.
__device__ __forceinline__ u32 upper_part(u32 bits) { return bits & 0xffffe000u; }
__device__ __forceinline__ u32 lower_part(u32 bits) {
    const float rest = __uint_as_float(bits) - __uint_as_float(upper_part(bits));
    return rest == rest ? __float_as_uint(rest) : 0u;
}
__device__ __forceinline__ void multiply_add(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    const u32 upper[4] = {upper_part(a[0]), upper_part(a[1]), upper_part(a[2]), upper_part(a[3])};
    const u32 lower[4] = {lower_part(a[0]), lower_part(a[1]), lower_part(a[2]), lower_part(a[3])};
    multiply<OPERAND>(c, lower, upper_part(b0), upper_part(b1));
    multiply<OPERAND>(c, upper, lower_part(b0), lower_part(b1));
    multiply<OPERAND>(c, upper, upper_part(b0), upper_part(b1));
}
#else
__device__ __forceinline__ void multiply_add(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) { multiply<OPERAND>(c, a, b0, b1); }
#endif

#if GROUPED
// The own rows of a warp, kept in registers.
struct Own {
    u32 at[D / DEPTH][4];
};
__device__ __forceinline__ Own own_rows(const OPERAND *tile) {
    Own own;
    #pragma unroll
    for (int step = 0; step < D / DEPTH; step++) own_factor(own.at[step], tile, 0, step);
    settle(own.at);
    return own;
}

// Starts s = own rows · other rows, over their dims.
__device__ __forceinline__ void score(float (&s)[TILES][OTHERS / 8][4], const Own &own, const OPERAND *others) {
    #pragma unroll
    for (int block = 0; block < OTHERS / 64; block++)
        #pragma unroll
        for (int step = 0; step < D / DEPTH; step++)
            GroupProduct<OPERAND, false>::run(s[0] + block * 8, own.at[step], right_factor(others, block * 64 * ROW_BYTES + step * 32), step > 0);
}
#else
typedef const OPERAND *Own;
__device__ __forceinline__ Own own_rows(const OPERAND *tile) { return tile; }

// s = own rows · other rows, over their dims.
__device__ __forceinline__ void score(float (&s)[TILES][OTHERS / 8][4], Own own, const OPERAND *others) {
    const int lane = threadIdx.x % WARP;
    #pragma unroll
    for (int which = 0; which < TILES; which++)
        #pragma unroll
        for (int column = 0; column < OTHERS / 8; column++)
            #pragma unroll
            for (int at = 0; at < 4; at++) s[which][column][at] = 0.0f;
    #pragma unroll
    for (int step = 0; step < D / DEPTH; step++) {
        u32 a[TILES][4];
        #pragma unroll
        for (int which = 0; which < TILES; which++) own_factor(a[which], own, which, step);
        #pragma unroll
        for (int column = 0; column < OTHERS / 8; column += 2) {
            u32 b[4];
            load_matrices(b, others + PIECE(column * 8 + lane / 16 * 8 + lane % 8, step * 2 + lane / 8 % 2));
            #pragma unroll
            for (int which = 0; which < TILES; which++) {
                multiply_add(s[which][column], a[which], b[0], b[1]);
                multiply_add(s[which][column + 1], a[which], b[2], b[3]);
            }
        }
    }
}
#endif

// Scores as a left factor of DEPTH others, and the dims 8·column to 8·column + 15 of those others as right ones. Lanes have neighbours of
// a row of scores, where the factor in TF32 has numbers four apart: they are taken for those, and so are the others' rows.
template <typename H> __device__ __forceinline__ void scores_as_factor(u32 (&a)[4], const float (&p)[OTHERS / 8][4], int step) {
    a[0] = pack_pair<H>(p[2 * step][0], p[2 * step][1]);
    a[1] = pack_pair<H>(p[2 * step][2], p[2 * step][3]);
    a[2] = pack_pair<H>(p[2 * step + 1][0], p[2 * step + 1][1]);
    a[3] = pack_pair<H>(p[2 * step + 1][2], p[2 * step + 1][3]);
}
template <typename H> __device__ __forceinline__ void rows_as_factor(u32 (&b)[4], const H *others, int step, int column) {
    const int lane = threadIdx.x % WARP;
    load_transposed(b, others + (step * DEPTH + lane % 16) * STRIDE + column * 8 + lane / 16 * 8);
}
template <> __device__ __forceinline__ void scores_as_factor<float>(u32 (&a)[4], const float (&p)[OTHERS / 8][4], int step) {
    a[0] = __float_as_uint(p[step][0]);
    a[1] = __float_as_uint(p[step][2]);
    a[2] = __float_as_uint(p[step][1]);
    a[3] = __float_as_uint(p[step][3]);
}
template <> __device__ __forceinline__ void rows_as_factor<float>(u32 (&b)[4], const float *others, int step, int column) {
    const int lane = threadIdx.x % WARP;
    const float *const from = others + (step * DEPTH + lane % 4 * 2) * STRIDE + column * 8 + lane / 4;
    b[0] = __float_as_uint(from[0]);
    b[1] = __float_as_uint(from[STRIDE]);
    b[2] = __float_as_uint(from[8]);
    b[3] = __float_as_uint(from[STRIDE + 8]);
}

// The scores of a warp as left factors: rounded to halves, or floats.
struct Weights {
    u32 at[TILES][OTHERS / DEPTH][4];
};
__device__ __forceinline__ Weights weights_of(const float (&p)[TILES][OTHERS / 8][4]) {
    Weights weights;
    #pragma unroll
    for (int which = 0; which < TILES; which++) {
        #pragma unroll
        for (int step = 0; step < OTHERS / DEPTH; step++) scores_as_factor<OPERAND>(weights.at[which][step], p[which], step);
        settle(weights.at[which]);
    }
    return weights;
}

// sums += weights · other rows (GROUPED: starts it).
__device__ __forceinline__ void weigh(float (&sums)[TILES][D / 8][4], const Weights &weights, const OPERAND *others) {
    #pragma unroll
    for (int step = 0; step < OTHERS / DEPTH; step++) {
#if GROUPED
        GroupProduct<OPERAND, true>::run(sums[0], weights.at[0][step], right_factor(others, step * DEPTH * ROW_BYTES), true);
#else
        #pragma unroll
        for (int column = 0; column < D / 8; column += 2) {
            u32 b[4];
            rows_as_factor<OPERAND>(b, others, step, column);
            #pragma unroll
            for (int which = 0; which < TILES; which++) {
                multiply_add(sums[which][column], weights.at[which][step], b[0], b[1]);
                multiply_add(sums[which][column + 1], weights.at[which][step], b[2], b[3]);
            }
        }
#endif
    }
}

// The warp's rows of sums times a factor for each of a lane's, as rows of a head from `first` on.
__device__ __forceinline__ void store_rows(
    RESULT *to, i64 stride, i64 first, i64 rows, const float (&sums)[TILES][D / 8][4], const float (&factors)[TILES][2]) {
    #pragma unroll
    for (int which = 0; which < TILES; which++)
        #pragma unroll
        for (int half = 0; half < 2; half++) {
            const i64 row = first + row_of(which) + half * 8;
            const float factor = factors[which][half];
            if (row < rows)
                #pragma unroll
                for (int column = 0; column < D / 8; column++) {
                    Pack<RESULT, 2> pair;
                    pair.at[0] = from_float<RESULT>(sums[which][column][2 * half] * factor);
                    pair.at[1] = from_float<RESULT>(sums[which][column][2 * half + 1] * factor);
                    store_pack<RESULT, 2>(to + row * stride + column * 8 + threadIdx.x % 4 * 2, pair);
                }
        }
}
__device__ __forceinline__ void store_rows(
    RESULT *to, i64 stride, i64 first, i64 rows, const float (&sums)[TILES][D / 8][4], float factor) {
    float factors[TILES][2];
    #pragma unroll
    for (int which = 0; which < TILES; which++) factors[which][0] = factors[which][1] = factor;
    store_rows(to, stride, first, rows, sums, factors);
}

// Which rows a block has: all heads of the last tile come first, since causal ones take longest.
#define PLACE \
    const i64 pairs = heads * batch; \
    const i64 h = blockIdx.x % pairs % heads, b = blockIdx.x % pairs / heads;

// Waits for a block's own rows, whose copies were begun before those of the first others, if registers are to have them.
#if GROUPED
#define OWN_ROWS_ARE_HERE \
    await_copies<1>(); \
    __syncthreads();
#else
#define OWN_ROWS_ARE_HERE
#endif

// Waits for the tile whose copies were begun last. When all warps are here, all are done with the tile before it, whose place the next
// one takes.
#define NEXT_TILE_IS_HERE \
    await_copies<0>(); \
    show_copies(); \
    __syncthreads();

// Every element [which][column][at] of a tile: row `row_of(which) + at / 2 · 8`, of the other side OTHER.
#define OTHER(column, at) ((column) * 8 + (int)threadIdx.x % 4 * 2 + (at) % 2)
#define EACH_ELEMENT \
    _Pragma("unroll") for (int which = 0; which < TILES; which++) \
        _Pragma("unroll") for (int column = 0; column < OTHERS / 8; column++) \
            _Pragma("unroll") for (int at = 0; at < 4; at++)

// Hides the keys from `start` on that queries from `first` on may not see. Only tiles at the border have any.
__device__ __forceinline__ void hide_keys(float (&s)[TILES][OTHERS / 8][4], i64 start, i64 first, i64 keys, i64 offset) {
    if (start + OTHERS > keys || (CAUSAL && start + OTHERS - 1 > first + offset)) {
        const int end = (int)least(keys - start, OTHERS), ahead = (int)least(first + offset - start, OTHERS);
        EACH_ELEMENT {
            const int key = OTHER(column, at);
            if (key >= end || (CAUSAL && key > row_of(which) + at / 2 * 8 + ahead)) s[which][column][at] = -INFINITY;
        }
    }
}

#ifdef FORWARD
// Takes the scores of a tile for their exponentials, less the largest so far, and what was summed up before along.
__device__ __forceinline__ void take_exponentials(
    float (&s)[OTHERS / 8][4], float (&o)[D / 8][4], float (&largest)[2], float (&sums)[2], float slope) {
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
}

extern "C" __global__ void __launch_bounds__(THREADS) attend_on_tensor_cores(
    OPERANDS, RESULT *y, i64 y_stride, float *lse, i64 lse_rows) {
    PLACE
    const i64 first = ((queries - 1) / OWN - blockIdx.x / pairs) * OWN;
    OPERAND *q_tile = reinterpret_cast<OPERAND *>(dynamic), *k_tiles = q_tile + OWN * STRIDE, *v_tiles = k_tiles + 2 * OTHERS * STRIDE;
    q += b * q_rows * q_stride + h * D;
    k += b * kv_rows * kv_stride + h * D;
    v += b * kv_rows * kv_stride + h * D;
    const int lane = threadIdx.x % WARP;
    const i64 visible = VISIBLE(least(first + OWN, queries)), own_last = first + first_of_company() + COMPANY - 1;
    const int count = (int)((visible + OTHERS - 1) / OTHERS);
    copy_rows(q_tile, q, q_stride, first, OWN, queries);
    end_copies();
    if (count > 0) {
        copy_rows(k_tiles, k, kv_stride, 0, OTHERS, keys);
        copy_rows(v_tiles, v, kv_stride, 0, OTHERS, keys);
    }
    end_copies();
    OWN_ROWS_ARE_HERE
    const Own own_q = own_rows(q_tile);
    float o[TILES][D / 8][4] = {}, s[TILES][OTHERS / 8][4], largest[TILES][2], sums[TILES][2] = {};
    #pragma unroll
    for (int which = 0; which < TILES; which++) largest[which][0] = largest[which][1] = -INFINITY;
    const float slope = scale * LOG2_E;
    for (int tile = 0; tile < count; tile++) {
        const i64 start = (i64)tile * OTHERS;
        const OPERAND *k_tile = k_tiles + tile % 2 * OTHERS * STRIDE, *v_tile = v_tiles + tile % 2 * OTHERS * STRIDE;
        NEXT_TILE_IS_HERE
        if (tile + 1 < count) {
            copy_rows(k_tiles + (tile + 1) % 2 * OTHERS * STRIDE, k, kv_stride, start + OTHERS, OTHERS, keys);
            copy_rows(v_tiles + (tile + 1) % 2 * OTHERS * STRIDE, v, kv_stride, start + OTHERS, OTHERS, keys);
        }
        end_copies();
        // A warp none of whose queries sees the tile leaves it out.
        if (!CAUSAL || start <= own_last + offset) {
            settle(s[0]);
            begin_products();
            score(s, own_q, k_tile);
            end_products();
            settle(s[0]);
            hide_keys(s, start, first, keys, offset);
            #pragma unroll
            for (int which = 0; which < TILES; which++)
                take_exponentials(s[which], o[which], largest[which], sums[which], slope);
            const Weights weights = weights_of(s);
            settle(o[0]);
            begin_products();
            weigh(o, weights, v_tile);
            end_products();
            settle(o[0]);
        }
    }
    await_copies<0>();
    float shares[TILES][2];
    #pragma unroll
    for (int which = 0; which < TILES; which++)
        #pragma unroll
        for (int half = 0; half < 2; half++) {
            float sum = sums[which][half];
            sum += __shfl_xor_sync(ALL_LANES, sum, 1);
            sum += __shfl_xor_sync(ALL_LANES, sum, 2);
            const i64 query = first + row_of(which) + half * 8;
            const float most = largest[which][half];
            shares[which][half] = most == -INFINITY ? 0.0f : 1.0f / sum;
            if (lane % 4 == 0 && query < queries)
                lse[(b * heads + h) * lse_rows + query] = most == -INFINITY ? -INFINITY : fmaf(most, scale, logf(sum));
        }
    store_rows(y + b * q_rows * y_stride + h * D, y_stride, first, queries, o, shares);
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
    PLACE
    const i64 first = ((queries - 1) / OWN - blockIdx.x / pairs) * OWN;
    HEAD
    OPERAND *q_tile = reinterpret_cast<OPERAND *>(dynamic), *g_tile = q_tile + OWN * STRIDE, *k_tiles = g_tile + OWN * STRIDE;
    OPERAND *v_tiles = k_tiles + 2 * OTHERS * STRIDE;
    const i64 visible = VISIBLE(least(first + OWN, queries)), own_last = first + first_of_company() + COMPANY - 1;
    const int count = (int)((visible + OTHERS - 1) / OTHERS);
    copy_rows(q_tile, q, q_stride, first, OWN, queries);
    copy_rows(g_tile, g, g_stride, first, OWN, queries);
    end_copies();
    if (count > 0) {
        copy_rows(k_tiles, k, kv_stride, 0, OTHERS, keys);
        copy_rows(v_tiles, v, kv_stride, 0, OTHERS, keys);
    }
    end_copies();
    OWN_ROWS_ARE_HERE
    const Own own_q = own_rows(q_tile), own_g = own_rows(g_tile);
    float low[TILES][2], change[TILES][2];
    #pragma unroll
    for (int which = 0; which < TILES; which++)
        #pragma unroll
        for (int half = 0; half < 2; half++) {
            const i64 query = first + row_of(which) + half * 8;
            low[which][half] = query < queries ? lowered(lse[query]) : INFINITY;
            change[which][half] = query < queries ? delta[query] : 0.0f;
        }
    float sums[TILES][D / 8][4] = {}, s[TILES][OTHERS / 8][4], ds[TILES][OTHERS / 8][4];
    const float slope = scale * LOG2_E;
    for (int tile = 0; tile < count; tile++) {
        const i64 start = (i64)tile * OTHERS;
        const OPERAND *k_tile = k_tiles + tile % 2 * OTHERS * STRIDE, *v_tile = v_tiles + tile % 2 * OTHERS * STRIDE;
        NEXT_TILE_IS_HERE
        if (tile + 1 < count) {
            copy_rows(k_tiles + (tile + 1) % 2 * OTHERS * STRIDE, k, kv_stride, start + OTHERS, OTHERS, keys);
            copy_rows(v_tiles + (tile + 1) % 2 * OTHERS * STRIDE, v, kv_stride, start + OTHERS, OTHERS, keys);
        }
        end_copies();
        if (!CAUSAL || start <= own_last + offset) {
            settle(s[0]);
            settle(ds[0]);
            begin_products();
            score(s, own_q, k_tile);
            score(ds, own_g, v_tile);
            end_products();
            settle(s[0]);
            settle(ds[0]);
            hide_keys(s, start, first, keys, offset);
            EACH_ELEMENT {
                const float p = power_of_two(fmaf(s[which][column][at], slope, -low[which][at / 2]));
                ds[which][column][at] = p * (ds[which][column][at] - change[which][at / 2]);
            }
            const Weights weights = weights_of(ds);
            settle(sums[0]);
            begin_products();
            weigh(sums, weights, k_tile);
            end_products();
            settle(sums[0]);
        }
    }
    await_copies<0>();
    store_rows(dq + b * q_rows * dq_stride + h * D, dq_stride, first, queries, sums, scale);
}

// A block to OWN keys: dk = scale · Σ ds·q and dv = Σ p·g over the queries, whose scores lie across here.
extern "C" __global__ void __launch_bounds__(THREADS) key_gradients_on_tensor_cores(
    OPERANDS, SAVED, RESULT *dk, RESULT *dv, i64 dkv_stride) {
    __shared__ float low[2][OTHERS], change[2][OTHERS];
    PLACE
    const i64 first = blockIdx.x / pairs * OWN;
    HEAD
    OPERAND *k_tile = reinterpret_cast<OPERAND *>(dynamic), *v_tile = k_tile + OWN * STRIDE, *q_tiles = v_tile + OWN * STRIDE;
    OPERAND *g_tiles = q_tiles + 2 * OTHERS * STRIDE;
    const i64 own_first = first + first_of_company();
    // The first query that sees any of these keys.
    const i64 seen = CAUSAL && first - offset > 0 ? first - offset : 0;
    const int begin = (int)(seen / OTHERS), end = (int)((queries + OTHERS - 1) / OTHERS);
    copy_rows(k_tile, k, kv_stride, first, OWN, keys);
    copy_rows(v_tile, v, kv_stride, first, OWN, keys);
    end_copies();
    float keys_sum[TILES][D / 8][4] = {}, values_sum[TILES][D / 8][4] = {}, s[TILES][OTHERS / 8][4], ds[TILES][OTHERS / 8][4];
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
    OWN_ROWS_ARE_HERE
    const Own own_k = own_rows(k_tile), own_v = own_rows(v_tile);
    for (int tile = begin; tile < end; tile++) {
        const i64 start = (i64)tile * OTHERS;
        const OPERAND *q_tile = q_tiles + tile % 2 * OTHERS * STRIDE, *g_tile = g_tiles + tile % 2 * OTHERS * STRIDE;
        NEXT_TILE_IS_HERE
        if (tile + 1 < end) start_tile(tile + 1);
        end_copies();
        if (!CAUSAL || own_first <= start + OTHERS - 1 + offset) {
            settle(s[0]);
            settle(ds[0]);
            begin_products();
            score(s, own_k, q_tile);
            score(ds, own_v, g_tile);
            end_products();
            settle(s[0]);
            settle(ds[0]);
            // Only tiles at the border have queries that may not see some key.
            if (CAUSAL && first + OWN - 1 > start + offset) {
                const int ahead = (int)(first - start - offset);
                EACH_ELEMENT if (row_of(which) + at / 2 * 8 + ahead > OTHER(column, at)) s[which][column][at] = -INFINITY;
            }
            EACH_ELEMENT {
                const int of_tile = OTHER(column, at);
                const float p = power_of_two(fmaf(s[which][column][at], slope, -low[tile % 2][of_tile]));
                s[which][column][at] = p;
                ds[which][column][at] = p * (ds[which][column][at] - change[tile % 2][of_tile]);
            }
            const Weights of_values = weights_of(s), of_keys = weights_of(ds);
            settle(values_sum[0]);
            settle(keys_sum[0]);
            begin_products();
            weigh(values_sum, of_values, g_tile);
            weigh(keys_sum, of_keys, q_tile);
            end_products();
            settle(values_sum[0]);
            settle(keys_sum[0]);
        }
    }
    await_copies<0>();
    store_rows(dk + b * kv_rows * dkv_stride + h * D, dkv_stride, first, keys, keys_sum, scale);
    store_rows(dv + b * kv_rows * dkv_stride + h * D, dkv_stride, first, keys, values_sum, 1.0f);
}
#endif

// Sums by index, each in the order of the source's positions. Whoever adds to a place of the result owns it: no float meets an
// atomic operation.

#define CHUNK 1024

// y = base (or zeros), with source[plane, at, column] added at index[plane, at, column], in order of `at`. A thread to a column.
#ifdef SOURCE
extern "C" __global__ void add_columns(
#ifdef BASE
    const BASE *base,
#endif
    const int *index, const SOURCE *source, O0 *y, i64 columns, i64 size, i64 count, i64 inner) {
    const i64 own = (i64)blockIdx.x * blockDim.x + threadIdx.x;
    if (own >= columns) return;
    const i64 plane = own / inner, column = own % inner;
    for (i64 row = 0; row < size; row++) {
        const i64 at = (plane * size + row) * inner + column;
#ifdef BASE
        y[at] = from_float<O0>(to_float(base[at]));
#else
        y[at] = from_float<O0>(0.0f);
#endif
    }
    for (i64 row = 0; row < count; row++) {
        const i64 from = (plane * count + row) * inner + column, place = index[from];
        if (place < 0 || place >= size) continue;
        const i64 at = (plane * size + place) * inner + column;
        y[at] = from_float<O0>(to_float(y[at]) + to_float(source[from]));
    }
}
#endif

#ifdef VALUES
// Of each of `n` ids, its rank among the same ids of its chunk; counts[chunk, id] is how many those are. Ids count from `first`,
// and those that are none of `rows` are left out. A block to a chunk, a thread to an id; counts start as zeros.
extern "C" __global__ void rank_ids(const int *ids, int *ranks, int *counts, i64 n, i64 first, i64 rows) {
    __shared__ __align__(16) int own[CHUNK];
    const i64 at = (i64)blockIdx.x * CHUNK + threadIdx.x;
    const i64 id = at < n ? (i64)ids[at] - first : -1;
    const bool is_row = id >= 0 && id < rows;
    own[threadIdx.x] = is_row ? (int)id : -1;
    __syncthreads();
    if (!is_row) return;
    int before = 0, all = 0;
    const int4 *packs = reinterpret_cast<const int4 *>(own);
    for (int four = 0; four < CHUNK / 4; four++) {
        const int4 pack = packs[four];
        const int same[4] = {pack.x == id, pack.y == id, pack.z == id, pack.w == id};
        #pragma unroll
        for (int lane = 0; lane < 4; lane++) {
            all += same[lane];
            before += same[lane] && four * 4 + lane < (int)threadIdx.x;
        }
    }
    ranks[at] = before;
    // The last of them speaks for all.
    if (before + 1 == all) counts[blockIdx.x * rows + id] = all;
}

// Counts of chunks become where each chunk's positions begin within the id's; `starts` and `totals` of each id. Which ids get which
// run of positions depends on the order in which blocks come to `taken`, and no sum does.
extern "C" __global__ void reserve_runs(int *counts, int *starts, int *totals, int *taken, i64 rows, i64 chunks) {
    __shared__ int scan[256];
    __shared__ int first;
    const i64 id = (i64)blockIdx.x * blockDim.x + threadIdx.x;
    int total = 0;
    if (id < rows) {
        for (i64 chunk = 0; chunk < chunks; chunk++) {
            const int count = counts[chunk * rows + id];
            counts[chunk * rows + id] = total;
            total += count;
        }
    }
    scan[threadIdx.x] = total;
    __syncthreads();
    for (int step = 1; step < 256; step *= 2) {
        const int before = (int)threadIdx.x >= step ? scan[threadIdx.x - step] : 0;
        __syncthreads();
        scan[threadIdx.x] += before;
        __syncthreads();
    }
    if (threadIdx.x == 255) first = atomicAdd(taken, scan[255]);
    __syncthreads();
    if (id < rows) {
        starts[id] = first + scan[threadIdx.x] - total;
        totals[id] = total;
    }
}

extern "C" __global__ void place_positions(
    const int *ids, const int *ranks, const int *counts, const int *starts, int *order, i64 n, i64 first, i64 rows) {
    const i64 at = (i64)blockIdx.x * blockDim.x + threadIdx.x;
    if (at >= n) return;
    const i64 id = (i64)ids[at] - first;
    if (id >= 0 && id < rows) order[starts[id] + counts[at / CHUNK * rows + id] + ranks[at]] = (int)at;
}

// y[id] = Σ values[position] over the id's positions, in order. A thread to PACK columns of an id.
extern "C" __global__ void add_rows(
    const VALUES *values, const int *order, const int *starts, const int *totals, O0 *y, i64 packs, i64 width) {
    const i64 at = (i64)blockIdx.x * blockDim.x + threadIdx.x;
    if (at >= packs) return;
    const i64 per_row = width / PACK, id = at / per_row, column = at % per_row * PACK;
    const int start = starts[id], total = totals[id];
    float sums[PACK] = {};
    for (int term = 0; term < total; term += 4) {
        Pack<VALUES, PACK> rows[4];
        #pragma unroll
        for (int ahead = 0; ahead < 4; ahead++)
            if (term + ahead < total)
                rows[ahead] = load_pack<VALUES, PACK>(values + (i64)order[start + term + ahead] * width + column);
        #pragma unroll
        for (int ahead = 0; ahead < 4; ahead++)
            if (term + ahead < total) {
                #pragma unroll
                for (int lane = 0; lane < PACK; lane++) sums[lane] += to_float(rows[ahead].at[lane]);
            }
    }
    Pack<O0, PACK> made;
    #pragma unroll
    for (int lane = 0; lane < PACK; lane++) made.at[lane] = from_float<O0>(sums[lane]);
    store_pack<O0, PACK>(y + id * width + column, made);
}
#endif

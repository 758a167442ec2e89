// Elements that only move: ELEMENT is an unsigned type as wide as one, or as several that move together.

#define EIGHT(T, name) T name##0, T name##1, T name##2, T name##3, T name##4, T name##5, T name##6, T name##7
#define LIST(name) {name##0, name##1, name##2, name##3, name##4, name##5, name##6, name##7}

// `y[to + Σ place·to_step] = x[from + Σ place·from_step]` for all places of the dims `size`, the innermost first, of which there
// are `dims`.
extern "C" __global__ void move_elements(
    const ELEMENT *x, ELEMENT *y, i64 count, int dims, i64 from, i64 to, EIGHT(i64, size), EIGHT(i64, from_step),
    EIGHT(i64, to_step)) {
    const i64 size[8] = LIST(size), from_step[8] = LIST(from_step), to_step[8] = LIST(to_step);
    i64 left = (i64)blockIdx.x * blockDim.x + threadIdx.x;
    if (left >= count) return;
    #pragma unroll
    for (int dim = 0; dim < 8; dim++) {
        if (dim < dims) {
            const i64 place = dim + 1 < dims ? left % size[dim] : left;
            left = dim + 1 < dims ? left / size[dim] : 0;
            from += place * from_step[dim];
            to += place * to_step[dim];
        }
    }
    y[to] = x[from];
}

// The same with a dim of `run` places that one thread moves, one after the other.
extern "C" __global__ void move_runs(
    const ELEMENT *x, ELEMENT *y, i64 count, int dims, i64 run, i64 from_run, i64 to_run, EIGHT(i64, size), EIGHT(i64, from_step),
    EIGHT(i64, to_step)) {
    const i64 size[8] = LIST(size), from_step[8] = LIST(from_step), to_step[8] = LIST(to_step);
    i64 left = (i64)blockIdx.x * blockDim.x + threadIdx.x;
    if (left >= count) return;
    #pragma unroll
    for (int dim = 0; dim < 8; dim++) {
        if (dim < dims) {
            const i64 place = dim + 1 < dims ? left % size[dim] : left;
            left = dim + 1 < dims ? left / size[dim] : 0;
            x += place * from_step[dim];
            y += place * to_step[dim];
        }
    }
    #pragma unroll 4
    for (i64 at = 0; at < run; at++) y[at * to_run] = x[at * from_run];
}

#define TILE 32
#define TILE_ROWS 8

// A batch of transposes: y[outer, column, row] = x[outer, row, column], where rows of x and columns of y are steps of one. Outer
// places are up to six dims, the innermost first.
extern "C" __global__ void transpose_tiles(
    const ELEMENT *x, ELEMENT *y, i64 rows, i64 columns, i64 x_step, i64 y_step, i64 row_tiles, i64 column_tiles,
    EIGHT(i64, size), EIGHT(i64, from_step), EIGHT(i64, to_step)) {
    __shared__ ELEMENT tile[TILE][TILE + 1];
    const i64 size[8] = LIST(size), from_step[8] = LIST(from_step), to_step[8] = LIST(to_step);
    const i64 column_tile = blockIdx.x % column_tiles, row_tile = blockIdx.x / column_tiles % row_tiles;
    i64 left = blockIdx.x / column_tiles / row_tiles;
    #pragma unroll
    for (int dim = 0; dim < 8; dim++) {
        x += left % size[dim] * from_step[dim];
        y += left % size[dim] * to_step[dim];
        left /= size[dim];
    }
    const int lane = threadIdx.x % TILE, line = threadIdx.x / TILE;
    for (int at = line; at < TILE; at += TILE_ROWS) {
        const i64 row = row_tile * TILE + at, column = column_tile * TILE + lane;
        if (row < rows && column < columns) tile[at][lane] = x[row * x_step + column];
    }
    __syncthreads();
    for (int at = line; at < TILE; at += TILE_ROWS) {
        const i64 column = column_tile * TILE + at, row = row_tile * TILE + lane;
        if (row < rows && column < columns) y[column * y_step + row] = tile[lane][at];
    }
}

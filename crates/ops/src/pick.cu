// Elements that are picked, or made where there is none to pick: ELEMENT is an unsigned type as wide as one.

#define EIGHT(T, name) T name##0, T name##1, T name##2, T name##3, T name##4, T name##5, T name##6, T name##7
#define LIST(name) {name##0, name##1, name##2, name##3, name##4, name##5, name##6, name##7}

// Constant padding: `outer` are the dims of y, `inner` those of x, which begin after `before` elements.
extern "C" __global__ void pad_elements(
    const ELEMENT *x, ELEMENT *y, i64 count, u64 value, EIGHT(i64, outer), EIGHT(i64, inner), EIGHT(i64, before)) {
    const i64 outer[8] = LIST(outer), inner[8] = LIST(inner), before[8] = LIST(before);
    const i64 at = (i64)blockIdx.x * blockDim.x + threadIdx.x;
    if (at >= count) return;
    i64 left = at, from = 0, step = 1;
    bool inside = true;
    #pragma unroll
    for (int dim = 0; dim < 8; dim++) {
        const i64 place = left % outer[dim] - before[dim];
        left /= outer[dim];
        inside = inside && place >= 0 && place < inner[dim];
        from += place * step;
        step *= inner[dim];
    }
    y[at] = inside ? x[from] : (ELEMENT)value;
}

// y[plane, row, column] = x[plane, index[plane, row, column], column]: `size` rows in a plane of x, `count` in one of y; what is
// outside is `missing`.
extern "C" __global__ void take_elements(
    const ELEMENT *x, const int *index, ELEMENT *y, i64 elements, i64 size, i64 count, i64 inner, u64 missing) {
    const i64 at = (i64)blockIdx.x * blockDim.x + threadIdx.x;
    if (at >= elements) return;
    const i64 place = index[at], plane = at / inner / count;
    y[at] = place >= 0 && place < size ? x[(plane * size + place) * inner + at % inner] : (ELEMENT)missing;
}

// y[row] = table[ids[row] − first], of `width` elements; zeros for the other ids below `vocab`, `missing` for all others.
extern "C" __global__ void take_rows(
    const ELEMENT *table, const int *ids, ELEMENT *y, i64 elements, i64 width, i64 rows, i64 first, i64 vocab, u64 missing) {
    const i64 at = (i64)blockIdx.x * blockDim.x + threadIdx.x;
    if (at >= elements) return;
    const i64 id = ids[at / width], row = id - first;
    const bool known = row >= 0 && row < rows, elsewhere = id >= 0 && id < vocab;
    y[at] = known ? table[row * width + at % width] : (ELEMENT)(elsewhere ? 0 : missing);
}

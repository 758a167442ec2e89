// Softmax and its logarithm over rows of `width` elements. Every thread reads its elements before it writes them, so the result
// may lie where an input lay. With rows.cuh before it.

extern "C" __global__ void softmax(const I0 *x, O0 *y, i64 rows, i64 width) {
    const i64 row = row_of_group();
    if (row >= rows) return;
    x += row * width;
    y += row * width;
    float largest = -INFINITY;
    for_row<PACK>(x, width, [&](i64, float value) { largest = max_or_nan(largest, value); });
    largest = group_max(largest);
    float sum = 0.0f;
    for_row<PACK>(x, width, [&](i64, float value) { sum += expf(value - largest); });
    const float share = 1.0f / group_sum(sum);
    map_row<PACK>(x, y, width, [&](i64, float value) { return expf(value - largest) * share; });
}

extern "C" __global__ void log_softmax(const I0 *x, O0 *y, i64 rows, i64 width) {
    const i64 row = row_of_group();
    if (row >= rows) return;
    x += row * width;
    y += row * width;
    float largest = -INFINITY;
    for_row<PACK>(x, width, [&](i64, float value) { largest = max_or_nan(largest, value); });
    largest = group_max(largest);
    float sum = 0.0f;
    for_row<PACK>(x, width, [&](i64, float value) { sum += expf(value - largest); });
    const float logarithm = logf(group_sum(sum));
    // Two steps, because the sum of both may have lost the second's digits.
    map_row<PACK>(x, y, width, [&](i64, float value) { return (value - largest) - logarithm; });
}

#ifdef I1
// dx = y·(g − Σ y·g)
extern "C" __global__ void softmax_grad(const I0 *y, const I1 *g, O0 *dx, i64 rows, i64 width) {
    const i64 row = row_of_group();
    if (row >= rows) return;
    y += row * width;
    g += row * width;
    float dot = 0.0f;
    for_row<PACK>(y, width, [&](i64 at, float value) { dot = fmaf(value, to_float(g[at]), dot); });
    dot = group_sum(dot);
    map_row<PACK>(g, dx + row * width, width, [&](i64 at, float value) { return to_float(y[at]) * (value - dot); });
}

// dx = g − eʸ·Σg
extern "C" __global__ void log_softmax_grad(const I0 *y, const I1 *g, O0 *dx, i64 rows, i64 width) {
    const i64 row = row_of_group();
    if (row >= rows) return;
    y += row * width;
    g += row * width;
    float sum = 0.0f;
    for_row<PACK>(g, width, [&](i64, float value) { sum += value; });
    sum = group_sum(sum);
    map_row<PACK>(g, dx + row * width, width, [&](i64 at, float value) { return value - expf(to_float(y[at])) * sum; });
}
#endif

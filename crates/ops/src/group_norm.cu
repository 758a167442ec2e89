// Group norm of [images, channels, size]: a group's planes lie one after the other, so it is a row of `members` planes. With
// rows.cuh before it.

#ifdef FORWARD
extern "C" __global__ void normalize_groups(
    const I0 *x, const I1 *weight, const I2 *bias, O0 *y, O1 *means, O2 *rstds, i64 rows, i64 groups, i64 members, i64 size,
    float eps) {
    const i64 row = row_of_group(), width = members * size;
    if (row >= rows) return;
    x += row * width;
    float sum = 0.0f, squares = 0.0f;
    for_row<1>(x, width, [&](i64, float value) { sum += value; });
    const float mean = group_sum(sum) / (float)width;
    for_row<1>(x, width, [&](i64, float value) { squares = fmaf(value - mean, value - mean, squares); });
    const float rstd = 1.0f / sqrtf(group_sum(squares) / (float)width + eps);
    if (place_in_group() == 0) {
        means[row] = from_float<O1>(mean);
        rstds[row] = from_float<O2>(rstd);
    }
    const i64 first = row % groups * members;
    map_row<1>(x, y + row * width, width, [&](i64 at, float value) {
        const i64 channel = first + at / size;
        return fmaf(value - mean, rstd * to_float(weight[channel]), to_float(bias[channel]));
    });
}
#else

// Of each plane Σ g and Σ g·(x − mean): GROUP threads to a plane.
extern "C" __global__ void plane_sums(
    const I0 *x, const I2 *means, const I4 *g, float *sums, float *products, i64 planes, i64 members, i64 size) {
    const i64 plane = row_of_group();
    if (plane >= planes) return;
    const float mean = to_float(means[plane / members]);
    g += plane * size;
    float sum = 0.0f, product = 0.0f;
    for_row<1>(x + plane * size, size, [&](i64 at, float value) {
        const float gradient = to_float(g[at]);
        sum += gradient;
        product = fmaf(gradient, value - mean, product);
    });
    sum = group_sum(sum);
    product = group_sum(product);
    if (place_in_group() == 0) {
        sums[plane] = sum;
        products[plane] = product;
    }
}

// Of each group what its elements' gradients need, (shift, slope); products become what each plane adds to the weights' gradient. A
// thread to a group.
extern "C" __global__ void group_numbers(
    const I1 *weight, const I3 *rstds, const float *sums, float *products, float *numbers, i64 rows, i64 groups, i64 members,
    i64 size) {
    const i64 row = (i64)blockIdx.x * blockDim.x + threadIdx.x;
    if (row >= rows) return;
    const i64 first = row % groups * members;
    const float rstd = to_float(rstds[row]), count = (float)(members * size);
    float shift = 0.0f, slope = 0.0f;
    for (i64 member = 0; member < members; member++) {
        const float own = to_float(weight[first + member]);
        shift = fmaf(sums[row * members + member], own, shift);
        slope = fmaf(products[row * members + member], own, slope);
        products[row * members + member] *= rstd;
    }
    numbers[2 * row] = shift / count;
    numbers[2 * row + 1] = slope / count * rstd * rstd;
}

extern "C" __global__ void differentiate_groups(
    const I0 *x, const I1 *weight, const I2 *means, const I3 *rstds, const I4 *g, const float *numbers, O0 *dx, i64 count,
    i64 groups, i64 members, i64 size) {
    const i64 at = (i64)blockIdx.x * blockDim.x + threadIdx.x;
    if (at >= count) return;
    const i64 plane = at / size, row = plane / members, channel = plane % (groups * members);
    const float shifted = to_float(g[at]) * to_float(weight[channel]) - numbers[2 * row];
    const float distance = to_float(means[row]) - to_float(x[at]);
    dx[at] = from_float<O0>(to_float(rstds[row]) * fmaf(distance, numbers[2 * row + 1], shifted));
}
#endif

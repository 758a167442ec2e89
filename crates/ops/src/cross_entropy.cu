// Cross-entropy of rows of `classes` logits against targets: one pass over the logits forward, one backward. With rows.cuh before
// it. A target that is `ignore` does not count; one that is no class makes NaN.

struct SumExp {
    float largest, sum;
};

__device__ __forceinline__ SumExp join(SumExp a, SumExp b) {
    const float largest = fmaxf(a.largest, b.largest);
    if (largest == -INFINITY) return {largest, a.sum + b.sum};
    return {largest, a.sum * expf(a.largest - largest) + b.sum * expf(b.largest - largest)};
}

// The largest of a row and the sum of exponentials from there; all threads get it. A sum is NaN if an element is, if the
// largest is infinite, or if all are −∞.
__device__ __forceinline__ SumExp row_sum_exp(const I0 *row, i64 width) {
    SumExp own = {-INFINITY, 0.0f};
    for (i64 at = (i64)place_in_group() * PACK; at < width; at += GROUP * PACK) {
        const Pack<I0, PACK> values = load_pack<I0, PACK>(row + at);
        float largest = own.largest;
        #pragma unroll
        for (int lane = 0; lane < PACK; lane++) largest = fmaxf(largest, to_float(values.at[lane]));
        if (largest != own.largest) {
            own.sum *= expf(own.largest - largest);
            own.largest = largest;
        }
        #pragma unroll
        for (int lane = 0; lane < PACK; lane++) {
            const float value = to_float(values.at[lane]);
            // Nothing but −∞ so far: nothing to add, unless it is NaN.
            own.sum += largest == -INFINITY ? (value == value ? 0.0f : value) : expf(value - largest);
        }
    }
    const float largest = group_max(own.largest);
    const float scaled = own.largest == -INFINITY ? own.sum : own.sum * expf(own.largest - largest);
    const float sum = group_sum(scaled);
    return {largest, largest == -INFINITY ? NAN : sum};
}

extern "C" __global__ void row_losses(
    const I0 *logits, const int *targets, float *lse, float *losses, i64 rows, i64 classes, i64 ignore, float smoothing) {
    const i64 row = row_of_group();
    if (row >= rows) return;
    logits += row * classes;
    const SumExp all = row_sum_exp(logits, classes);
    float moved = 0.0f;
    if (smoothing != 0.0f) {
        for_row<PACK>(logits, classes, [&](i64, float value) { moved += value - all.largest; });
        moved = group_sum(moved);
    }
    if (place_in_group() != 0) return;
    const float logarithm = logf(all.sum);
    const i64 target = targets[row];
    float loss = NAN;
    if (target == ignore) {
        loss = 0.0f;
    } else if (target >= 0 && target < classes) {
        const float smooth = smoothing == 0.0f ? 0.0f : smoothing / (float)classes * moved;
        loss = logarithm - (1.0f - smoothing) * (to_float(logits[target]) - all.largest) - smooth;
    }
    lse[row] = all.largest + logarithm;
    losses[row] = loss;
}

#ifdef PARTS
// What a slice of the classes, those from `first` on, says of each row: its largest logit, the sum of exponentials from there, the
// target's logit if it is one of its classes, and the sum of its logits from the largest (if `smooths`).
extern "C" __global__ void row_numbers(
    const I0 *logits, const int *targets, float *numbers, i64 rows, i64 classes, i64 first, int smooths) {
    const i64 row = row_of_group();
    if (row >= rows) return;
    logits += row * classes;
    float largest = -INFINITY;
    for_row<PACK>(logits, classes, [&](i64, float value) { largest = max_or_nan(largest, value); });
    largest = group_max(largest);
    float sum = 0.0f, moved = 0.0f;
    // Of a slice that is masked as a whole, nothing adds to what the others have.
    if (largest != -INFINITY) {
        for_row<PACK>(logits, classes, [&](i64, float value) {
            sum += expf(value - largest);
            moved += value - largest;
        });
    }
    sum = group_sum(sum);
    moved = group_sum(moved);
    if (place_in_group() != 0) return;
    const i64 hit = targets[row] - first;
    numbers += row * 4;
    numbers[0] = largest;
    numbers[1] = sum;
    numbers[2] = hit >= 0 && hit < classes ? to_float(logits[hit]) : 0.0f;
    numbers[3] = smooths ? moved : 0.0f;
}
#endif

#ifdef I2
// dlogits = (e^(x − lse) − wanted)·scale; the logits are those from class `first` on of `classes`. The result may lie where the
// logits lay.
extern "C" __global__ void row_gradients(
    const I0 *logits, const int *targets, const I2 *lse, const float *scale, O0 *dlogits, i64 rows, i64 own, i64 classes,
    i64 first, i64 ignore, float smoothing) {
    const i64 row = row_of_group();
    if (row >= rows) return;
    logits += row * own;
    dlogits += row * own;
    const i64 target = targets[row];
    const float factor = scale[0], floor = smoothing / (float)classes, sum = to_float(lse[row]);
    if (target == ignore) {
        map_row<PACK>(logits, dlogits, own, [&](i64, float) { return 0.0f; });
    } else if (target >= 0 && target < classes) {
        const i64 hit = target - first;
        const float wanted = 1.0f - smoothing + floor;
        map_row<PACK>(logits, dlogits, own, [&](i64 at, float value) {
            return (expf(value - sum) - (at == hit ? wanted : floor)) * factor;
        });
    } else {
        map_row<PACK>(logits, dlogits, own, [&](i64, float) { return NAN; });
    }
}
#endif

// Adds one grain's term to the partial sums over grains: a binary counter whose levels are `level_elements` apart. A grain closes as many
// runs as it has trailing one bits; runs of equal length are always added left to right.

extern "C" __global__ void add_term(
    const float *term,      // [elements]
    float *levels,          // [depth + 1, level_elements], where this sum starts
    i64 level_elements, int depth, int closes, i64 elements
) {
    const i64 stride = (i64)gridDim.x * blockDim.x;
    for (i64 at = (i64)blockIdx.x * blockDim.x + threadIdx.x; at < elements; at += stride) {
        float carry = term[at];
        for (int close = 0; close < closes; close++) carry = levels[(depth - 1 - close) * level_elements + at] + carry;
        levels[(depth - closes) * level_elements + at] = carry;
    }
}

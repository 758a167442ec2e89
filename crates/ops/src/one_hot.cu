// A row of `classes` zeros with a one at each index; all zeros for an index outside.
extern "C" __global__ void one_hot(const int *indices, O0 *y, i64 count, i64 classes) {
    const i64 at = (i64)blockIdx.x * blockDim.x + threadIdx.x;
    if (at < count) y[at] = from_float<O0>(indices[at / classes] == at % classes ? 1.0f : 0.0f);
}

// What all kernels of pooling share.

#define WINDOW i64 height, i64 width, i64 out_height, i64 out_width, i64 kernel_y, i64 kernel_x, i64 stride_y, i64 stride_x, \
    i64 padding_y, i64 padding_x, i64 whole_height, i64 whole_width, i64 begin_y, i64 begin_x, i64 first_y, i64 first_x
#define NUMBERS height, width, out_height, out_width, kernel_y, kernel_x, stride_y, stride_x, \
    padding_y, padding_x, whole_height, whole_width, begin_y, begin_x, first_y, first_x

__device__ __forceinline__ i64 smaller(i64 a, i64 b) { return a < b ? a : b; }
__device__ __forceinline__ i64 larger(i64 a, i64 b) { return a > b ? a : b; }

// A quotient of numbers that are not negative: short division where both are small.
__device__ __forceinline__ i64 quotient(i64 a, i64 b) { return (a | b) >> 32 ? a / b : (i64)((u32)a / (u32)b); }

// What a sum is divided by along one axis.
__device__ __forceinline__ i64 divisor(i64 at, i64 size, i64 kernel, i64 stride, i64 padding, int count_padding) {
    const i64 start = at * stride, end = start + kernel;
    return count_padding ? smaller(end, size + 2 * padding) - start : smaller(end, size + padding) - larger(start, padding);
}

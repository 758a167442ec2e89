// What stands before every kernel of kolo. It needs no header: NVRTC alone is enough.
//
// Element types: float, bf16, f16, int, long long, unsigned char (bool and u8). Kernels compute in float: `to_float` reads any of the
// three float types, `from_float<T>` rounds to the nearest, ties to even.

typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

#define INFINITY __int_as_float(0x7f800000)
#define NAN __int_as_float(0x7fffffff)

struct __align__(2) bf16 {
    unsigned short bits;
};
struct __align__(2) f16 {
    unsigned short bits;
};

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(bf16 x) { return __uint_as_float((u32)x.bits << 16); }
__device__ __forceinline__ float to_float(f16 x) {
    float y;
    asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x.bits));
    return y;
}

template <typename T> __device__ __forceinline__ T from_float(float x);
template <> __device__ __forceinline__ float from_float<float>(float x) { return x; }
template <> __device__ __forceinline__ bf16 from_float<bf16>(float x) {
    bf16 y;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
    return y;
}
template <> __device__ __forceinline__ f16 from_float<f16>(float x) {
    f16 y;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
    return y;
}

// `N` elements that are read and written at once; of 16 bytes at most.
template <typename T, int N> struct __align__(sizeof(T) * N) Pack {
    T at[N];
};
template <typename T, int N> __device__ __forceinline__ Pack<T, N> load_pack(const T *from) {
    return *reinterpret_cast<const Pack<T, N> *>(from);
}
template <typename T, int N> __device__ __forceinline__ void store_pack(T *to, const Pack<T, N> &values) {
    *reinterpret_cast<Pack<T, N> *>(to) = values;
}

#define WARP 32
#define ALL_LANES 0xffffffffu

// Sums and maxima over a warp: every lane gets the result, always added in the same order.
__device__ __forceinline__ float warp_sum(float x) {
    #pragma unroll
    for (int step = WARP / 2; step > 0; step /= 2) x += __shfl_xor_sync(ALL_LANES, x, step);
    return x;
}
// NaN if any is.
__device__ __forceinline__ float max_or_nan(float a, float b) { return a != a ? a : (b != b ? b : (a < b ? b : a)); }
__device__ __forceinline__ float warp_max(float x) {
    #pragma unroll
    for (int step = WARP / 2; step > 0; step /= 2) x = max_or_nan(x, __shfl_xor_sync(ALL_LANES, x, step));
    return x;
}

// Sum over a block of whole warps (at most 1024 threads); every thread gets it. `shared` holds 33 floats, which may be used again
// at once.
__device__ __forceinline__ float block_sum(float x, float *shared) {
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, warps = blockDim.x / WARP;
    x = warp_sum(x);
    if (lane == 0) shared[warp] = x;
    __syncthreads();
    if (warp == 0) {
        x = warp_sum(lane < warps ? shared[lane] : 0.0f);
        if (lane == 0) shared[WARP] = x;
    }
    __syncthreads();
    x = shared[WARP];
    __syncthreads();
    return x;
}
__device__ __forceinline__ float block_max(float x, float *shared) {
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, warps = blockDim.x / WARP;
    x = warp_max(x);
    if (lane == 0) shared[warp] = x;
    __syncthreads();
    if (warp == 0) {
        x = warp_max(lane < warps ? shared[lane] : shared[0]);
        if (lane == 0) shared[WARP] = x;
    }
    __syncthreads();
    x = shared[WARP];
    __syncthreads();
    return x;
}

// Philox4x32-10, as `kolo_graph::rng::Stream::block` has it.
__device__ __forceinline__ uint4 philox(u32 key0, u32 key1, u64 high, u64 low) {
    u32 c0 = (u32)low, c1 = (u32)(low >> 32), c2 = (u32)high, c3 = (u32)(high >> 32);
    #pragma unroll
    for (int round = 0; round < 10; round++) {
        const u32 high0 = __umulhi(0xD2511F53u, c0), low0 = 0xD2511F53u * c0;
        const u32 high1 = __umulhi(0xCD9E8D57u, c2), low1 = 0xCD9E8D57u * c2;
        c0 = high1 ^ c1 ^ key0;
        c1 = low1;
        c2 = high0 ^ c3 ^ key1;
        c3 = low0;
        key0 += 0x9E3779B9u;
        key1 += 0xBB67AE85u;
    }
    return make_uint4(c0, c1, c2, c3);
}
// A word as a number from 0 to below 1, as `kolo_graph::rng::unit`.
__device__ __forceinline__ float unit(u32 word) { return (float)(word >> 8) * (1.0f / 16777216.0f); }

// `1 - beta^step` for a whole step, as `kolo_ops` computes it.
__device__ __forceinline__ double bias_correction(double beta, double step) {
    double power = 1.0, base = beta;
    for (u64 exponent = (u64)step; exponent > 0; exponent >>= 1) {
        if (exponent & 1) power *= base;
        base *= base;
    }
    return 1.0 - power;
}

// `x / by` for `by` not below zero, operation for operation as `kolo_ops` has it: an update gives the same bits on either side.
__device__ __forceinline__ float over(float x, float by) {
    by = by < 1.17549435e-38f ? 1.17549435e-38f : by;
    float near = __uint_as_float(0x7ef127eau - __float_as_uint(by));
    const float left = fmaf(near, -by, 1.0f);
    near = fmaf(near, fmaf(left, left, left), near);
    const float quotient = x * near;
    return by > 8.507059e37f ? x * 0.0f : fmaf(fmaf(quotient, -by, x), near, quotient);
}

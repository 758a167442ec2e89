// Runs CUDA kernels on a CPU, one block at a time: every thread of a block is a fiber, which gives way at barriers and wherever a
// warp exchanges values. Slow and exact; it finds wrong indices, unwritten elements and missing barriers, not speed.
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <tuple>
#include <utility>

#define EMULATED 1
#define __global__ static
#define __device__
#define __forceinline__ inline
#define __shared__ static
#define __restrict__
#define __launch_bounds__(...)
#define __align__(bytes) __attribute__((aligned(bytes)))
#define __CUDA_ARCH__ 900

struct uint3 { unsigned x, y, z; };
struct uint4 { unsigned x, y, z, w; };
struct int4 { int x, y, z, w; };
struct float4 { float x, y, z, w; };
struct float2 { float x, y; };
struct uint2 { unsigned x, y; };
static inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
static inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

namespace emulator {
constexpr int THREADS_MAX = 1024, WARP_SIZE = 32;
constexpr size_t STACK_BYTES = 96 * 1024;

struct Barrier {
    int arrived = 0, alive = 0;
    unsigned generation = 0;
};
struct Fiber {
    void *stack_pointer;
    uint3 thread;
    bool done;
};
struct Warp {
    Barrier barrier;
    uint64_t values[WARP_SIZE];
};

extern Fiber fibers[THREADS_MAX];
extern Warp warps[WARP_SIZE];
extern Barrier block_barrier;
extern int current;
extern uint3 block_index, block_size, grid_size;
extern unsigned char dynamic_memory[256 * 1024];

void give_way();
void arrive(Barrier &barrier);
using Body = void (*)(void *);
// What a launch is given beside the kernel's arguments.
struct Shape { const unsigned *grid, *block; unsigned long dynamic_bytes; };
void run(const Shape &shape, Body body, void *data);

inline int linear() { return current; }
inline Warp &warp() { return warps[current / WARP_SIZE]; }
inline int lane() { return current % WARP_SIZE; }

// Every lane's value, after all lanes that are left have given theirs.
template <typename T, typename F> inline auto exchange(T value, F pick) {
    static_assert(sizeof(T) <= 8, "a register");
    Warp &own = warp();
    std::memcpy(&own.values[lane()], &value, sizeof(T));
    arrive(own.barrier);
    auto read = [&](int from) {
        T other;
        std::memcpy(&other, &own.values[from], sizeof(T));
        return other;
    };
    auto picked = pick(read);
    arrive(own.barrier);
    return picked;
}

template <typename... A, size_t... I> void call(void (*kernel)(A...), void **args, std::index_sequence<I...>) {
    kernel(*reinterpret_cast<std::remove_reference_t<A> *>(args[I])...);
}
template <typename... A> void launch(void (*kernel)(A...), unsigned long count, void **args, const Shape &shape) {
    if (count != sizeof...(A)) {
        std::fprintf(stderr, "a kernel takes %zu arguments, not %lu\n", sizeof...(A), count);
        std::abort();
    }
    struct Data { void (*kernel)(A...); void **args; } data{kernel, args};
    run(shape, [](void *given) {
        auto *data = static_cast<Data *>(given);
        call(data->kernel, data->args, std::index_sequence_for<A...>{});
    }, &data);
}
} // namespace emulator

#define threadIdx (emulator::fibers[emulator::current].thread)
#define blockIdx emulator::block_index
#define blockDim emulator::block_size
#define gridDim emulator::grid_size

static inline void __syncthreads() { emulator::arrive(emulator::block_barrier); }
static inline void __syncwarp(unsigned = ~0u) { emulator::arrive(emulator::warp().barrier); }
static inline void __threadfence() {}
template <typename T> static inline T __shfl_xor_sync(unsigned, T value, int mask) {
    const int from = emulator::lane() ^ mask;
    return emulator::exchange(value, [&](auto read) { return read(from); });
}
template <typename T> static inline T __shfl_sync(unsigned, T value, int from) {
    return emulator::exchange(value, [&](auto read) { return read(from & 31); });
}
template <typename T> static inline T __shfl_down_sync(unsigned, T value, int by) {
    const int from = emulator::lane() + by;
    return emulator::exchange(value, [&](auto read) { return from < 32 ? read(from) : value; });
}
static inline int __any_sync(unsigned, int holds) {
    return emulator::exchange(holds, [&](auto read) {
        int any = 0;
        for (int lane = 0; lane < 32; lane++) any |= read(lane);
        return any;
    });
}
static inline unsigned __match_any_sync(unsigned, int value) {
    return emulator::exchange(value, [&](auto read) {
        unsigned same = 0;
        for (int lane = 0; lane < 32; lane++) same |= (unsigned)(read(lane) == value) << lane;
        return same;
    });
}
static inline int __popc(unsigned bits) { return __builtin_popcount(bits); }
static inline unsigned __umulhi(unsigned a, unsigned b) { return (unsigned)((uint64_t)a * b >> 32); }
template <typename To, typename From> static inline To as_bits(From from) {
    static_assert(sizeof(To) == sizeof(From), "the same bits");
    To to;
    std::memcpy(&to, &from, sizeof(To));
    return to;
}
static inline float __int_as_float(int bits) { return as_bits<float>(bits); }
static inline float __uint_as_float(unsigned bits) { return as_bits<float>(bits); }
static inline unsigned __float_as_uint(float value) { return as_bits<unsigned>(value); }
static inline int __float_as_int(float value) { return as_bits<int>(value); }
static inline double __longlong_as_double(long long bits) { return as_bits<double>(bits); }
#define __expf expf
#define __logf logf
static inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }
// Towards zero; what is too large becomes the largest, NaN becomes zero.
static inline int __float2int_rz(float x) {
    return x != x ? 0 : x >= 2147483648.0f ? 2147483647 : x < -2147483648.0f ? (int)-2147483648ll : (int)x;
}
static inline long long __float2ll_rz(float x) {
    const long long most = 0x7fffffffffffffffll;
    return x != x ? 0 : x >= 9223372036854775808.0f ? most : x < -9223372036854775808.0f ? -most - 1 : (long long)x;
}
static inline float __fdividef(float a, float b) { return a / b; }
template <typename T> static inline T __ldg(const T *from) { return *from; }
template <typename T> static inline T atomicAdd(T *at, T by) { T was = *at; *at += by; return was; }

static inline void copy_async(void *to, const void *from, bool reads) {
    if (reads) std::memcpy(to, from, 16);
    else std::memset(to, 0, 16);
}
static inline void end_copies() {}
template <int LEFT> static inline void await_copies() {}

// The rows of four matrices that a warp gives, and what of them each lane gets.
static inline void load_matrices_of(unsigned (&to)[4], const void *row, bool transposed) {
    emulator::exchange((uint64_t)row, [&](auto read) {
        const int lane = emulator::lane();
        for (int matrix = 0; matrix < 4; matrix++) {
            unsigned pair = 0;
            for (int at = 0; at < 2; at++) {
                const int line = transposed ? lane % 4 * 2 + at : lane / 4, column = transposed ? lane / 4 : lane % 4 * 2 + at;
                const auto *from = reinterpret_cast<const unsigned short *>(read(matrix * 8 + line));
                pair |= (unsigned)from[column] << 16 * at;
            }
            to[matrix] = pair;
        }
        return 0;
    });
}
static inline void load_matrices(unsigned (&to)[4], const void *row) { load_matrices_of(to, row, false); }
static inline void load_transposed(unsigned (&to)[4], const void *row) { load_matrices_of(to, row, true); }

static inline float half_to_float(unsigned short bits) { return (float)as_bits<_Float16>(bits); }
static inline unsigned short float_to_half(float x) { return as_bits<unsigned short>((_Float16)x); }
static inline unsigned short float_to_bfloat(float x) {
    const unsigned bits = as_bits<unsigned>(x);
    if (x != x) return 0x7fff;
    return (unsigned short)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
#define power_of_two exp2f
#undef INFINITY
#undef NAN

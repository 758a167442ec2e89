// The fibers of the emulator.
#include "emulator.hpp"

namespace emulator {
Fiber fibers[THREADS_MAX];
Warp warps[WARP_SIZE];
Barrier block_barrier;
int current;
uint3 block_index, block_size, grid_size;
alignas(1024) unsigned char dynamic_memory[256 * 1024];

static void *scheduler;
static unsigned char *stacks;
static Body body;
static void *body_data;
static int threads;

// Saves the registers that a callee keeps, and goes on with another stack.
extern "C" void switch_stacks(void **save, void *to);
asm(".text\n.globl switch_stacks\nswitch_stacks:\n"
    "push %rbp\npush %rbx\npush %r12\npush %r13\npush %r14\npush %r15\n"
    "mov %rsp, (%rdi)\nmov %rsi, %rsp\n"
    "pop %r15\npop %r14\npop %r13\npop %r12\npop %rbx\npop %rbp\nret\n");

void give_way() { switch_stacks(&fibers[current].stack_pointer, scheduler); }

static void release(Barrier &barrier) {
    if (barrier.alive > 0 && barrier.arrived == barrier.alive) {
        barrier.arrived = 0;
        barrier.generation++;
    }
}

void arrive(Barrier &barrier) {
    const unsigned generation = barrier.generation;
    barrier.arrived++;
    release(barrier);
    while (barrier.generation == generation) give_way();
}

static void enter() {
    body(body_data);
    fibers[current].done = true;
    block_barrier.alive--;
    release(block_barrier);
    Barrier &own = warps[current / WARP_SIZE].barrier;
    own.alive--;
    release(own);
    for (;;) give_way();
}

static void start(int at) {
    auto *top = reinterpret_cast<void **>(stacks + (at + 1) * STACK_BYTES);
    *--top = nullptr;
    *--top = reinterpret_cast<void *>(&enter);
    for (int saved = 0; saved < 6; saved++) *--top = nullptr;
    fibers[at].stack_pointer = top;
    fibers[at].done = false;
    fibers[at].thread = {at % block_size.x, at / block_size.x % block_size.y, at / block_size.x / block_size.y};
}

static void run_block() {
    block_barrier = Barrier{};
    block_barrier.alive = threads;
    for (int warp = 0; warp < WARP_SIZE; warp++) {
        warps[warp].barrier = Barrier{};
        const int left = threads - warp * WARP_SIZE;
        warps[warp].barrier.alive = left < 0 ? 0 : (left < WARP_SIZE ? left : WARP_SIZE);
    }
    for (int at = 0; at < threads; at++) start(at);
    for (int left = threads; left > 0;) {
        left = 0;
        for (int at = 0; at < threads; at++) {
            if (fibers[at].done) continue;
            current = at;
            switch_stacks(&scheduler, fibers[at].stack_pointer);
            left += !fibers[at].done;
        }
    }
}

void run(const Shape &shape, Body given, void *data) {
    const unsigned *grid = shape.grid, *block = shape.block;
    if (shape.dynamic_bytes > sizeof(dynamic_memory)) std::abort();
    if (!stacks) stacks = static_cast<unsigned char *>(aligned_alloc(64, THREADS_MAX * STACK_BYTES));
    grid_size = {grid[0], grid[1], grid[2]};
    block_size = {block[0], block[1], block[2]};
    threads = block[0] * block[1] * block[2];
    body = given;
    body_data = data;
    for (unsigned z = 0; z < grid[2]; z++)
        for (unsigned y = 0; y < grid[1]; y++)
            for (unsigned x = 0; x < grid[0]; x++) {
                block_index = {x, y, z};
                std::memset(dynamic_memory, 0xff, shape.dynamic_bytes);
                run_block();
            }
}
} // namespace emulator

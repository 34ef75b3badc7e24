// Runs a CUDA kernel on a CPU: a thread per block, and within it a fiber per CUDA thread, switched
// where CUDA threads wait for each other. Slow, exact, and only as large as decode.cu needs.
#pragma once

#include <setjmp.h>
#include <ucontext.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

#define __device__
#define __global__
#define __forceinline__ inline
#define __shared__ static thread_local
#define __launch_bounds__(...)

struct float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };
struct uint2 { uint32_t x, y; };
struct alignas(16) uint4 { uint32_t x, y, z, w; };
struct Index { int x; };

static inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
static inline uint2 make_uint2(uint32_t x, uint32_t y) { return {x, y}; }
static inline uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w) { return {x, y, z, w}; }

inline thread_local Index threadIdx, blockIdx;

namespace emulator {

constexpr int WARP_THREADS = 32;
constexpr size_t STACK_BYTES = 256 * 1024;

// Threads that wait for one another, with a value handed over by each.
struct Meeting {
    int size = 0, arrived = 0, generation = 0;
    uint64_t given[1024];
    int all = 1, result = 1;
};

// A CUDA thread. ucontext makes its stack; every later switch is a jump, which needs no system call.
struct Fiber {
    ucontext_t context;
    jmp_buf place;
    std::unique_ptr<char[]> stack;
    bool started = false, done = false;
};

struct Block {
    std::vector<Fiber> fibers;
    std::vector<Meeting> warps;
    Meeting block;
    jmp_buf scheduler;
    std::function<void()> body;
};

inline thread_local Block* current = nullptr;
inline volatile char sink;

inline void yield() {
    Fiber& me = current->fibers[threadIdx.x];
    if (_setjmp(me.place) == 0) _longjmp(current->scheduler, 1);
}

inline void meet(Meeting& meeting) {
    int generation = meeting.generation;
    if (++meeting.arrived == meeting.size) {
        meeting.arrived = 0;
        meeting.result = meeting.all;
        meeting.all = 1;
        ++meeting.generation;
    }
    while (meeting.generation == generation) yield();
}

inline void fiber_main() {
    current->body();
    current->fibers[threadIdx.x].done = true;
    _longjmp(current->scheduler, 1);
}

// Runs a fiber until it waits or ends.
inline void resume(Fiber& fiber) {
    if (_setjmp(current->scheduler)) return;
    if (fiber.started) _longjmp(fiber.place, 1);
    fiber.started = true;
    setcontext(&fiber.context);
}

inline void run_block(int block_id, int threads, std::function<void()> body) {
    Block block;
    current = &block;
    blockIdx.x = block_id;
    block.body = std::move(body);
    block.fibers.resize(threads);
    block.warps.resize(threads / WARP_THREADS);
    for (Meeting& warp : block.warps) warp.size = WARP_THREADS;
    block.block.size = threads;
    for (Fiber& fiber : block.fibers) {
        fiber.stack.reset(new char[STACK_BYTES]);
        getcontext(&fiber.context);
        fiber.context.uc_stack.ss_sp = fiber.stack.get();
        fiber.context.uc_stack.ss_size = STACK_BYTES;
        makecontext(&fiber.context, fiber_main, 0);
    }
    // Warps drift apart where nothing holds them together, so that a missing __syncthreads shows.
    int left = threads;
    for (int round = 0; left > 0; ++round) {
        for (int i = 0; i < threads; ++i) {
            int warp = i / WARP_THREADS;
            if (block.fibers[i].done || (round / 256 + warp) % 3 == 0) continue;
            threadIdx.x = i;
            resume(block.fibers[i]);
            left -= block.fibers[i].done;
        }
        std::this_thread::yield();
    }
    current = nullptr;
}

template <auto Kernel>
struct Launch;

// A function with the kernel's arguments that runs the whole grid.
template <typename... Arguments, void (*Kernel)(Arguments...)>
struct Launch<Kernel> {
    static void run(Arguments... arguments) {
        std::vector<std::thread> blocks;
        for (int i = 0; i < BLOCKS; ++i) {
            blocks.emplace_back([=] { run_block(i, THREADS, [=] { Kernel(arguments...); }); });
        }
        for (std::thread& block : blocks) block.join();
    }
};

}  // namespace emulator

static inline void __syncthreads() { emulator::meet(emulator::current->block); }

static inline int __syncthreads_and(int value) {
    emulator::Meeting& meeting = emulator::current->block;
    meeting.all &= value != 0;
    emulator::meet(meeting);
    return meeting.result;
}

template <typename T>
static inline T __shfl_xor_sync(uint32_t, T value, int away) {
    int lane = threadIdx.x % emulator::WARP_THREADS;
    emulator::Meeting& warp = emulator::current->warps[threadIdx.x / emulator::WARP_THREADS];
    std::memcpy(&warp.given[lane], &value, sizeof value);
    emulator::meet(warp);
    T other;
    std::memcpy(&other, &warp.given[lane ^ away], sizeof other);
    emulator::meet(warp);
    return other;
}

static inline float __uint_as_float(uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

static inline uint32_t __float_as_uint(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    return bits;
}

static inline float rsqrtf(float value) { return 1.0f / std::sqrt(value); }

static inline void __nanosleep(uint32_t times) {
    for (uint32_t i = 0; i < times / 500; ++i) emulator::yield();
}

static inline uint32_t atomicCAS(uint32_t* address, uint32_t expected, uint32_t value) {
    __atomic_compare_exchange_n(address, &expected, value, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);
    return expected;
}

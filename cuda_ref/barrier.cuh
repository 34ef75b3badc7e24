// Grid barrier: every block of the (cooperative) launch arrives, then waits for all others.
//
// The counter only grows. A launch's first target comes from the word BASE, which block 0 moves
// forward once it has passed the launch's last barrier: by then every block has read it. The words
// belong to one engine. The wait is bounded: past the limit a block notes itself and the barrier in
// the error words and leaves, and so, at their next barrier, do the others.
#pragma once

#include "memory.cuh"

// Words apart: a cache line each, so that polling slows nothing else.
constexpr int COUNTER = 0;
constexpr int BASE = 32;
constexpr int ERROR = 64;        // 0, or 1 + the block that gave up first
constexpr int ERROR_INDEX = 65;  // the barrier it waited at, counted from 1 in its launch

struct GridBarrier {
    u32* words;
    u32 base;   // the counter when this launch began
    u32 index;  // barriers this launch has arrived at
    int spin_limit;

    __device__ __forceinline__ GridBarrier(u32* sync_words, int limit)
        : words(sync_words), base(load_fresh(sync_words + BASE)), index(0), spin_limit(limit) {}

    // Publishes the block's stores. What does not depend on the other blocks goes after it.
    __device__ __forceinline__ void arrive() {
        idle(index);
        __syncthreads();
        if (threadIdx.x == 0) add_release(words + COUNTER);
        ++index;
    }

    // Returns false, to the whole block, where it gave up.
    __device__ __forceinline__ bool wait() {
        int passed = 1;
        if (threadIdx.x == 0) {
            u32 target = base + index * BLOCKS;
            int left = spin_limit;
            // The difference, not the values, is compared: the counter may wrap.
            while (int(load_acquire(words + COUNTER) - target) < 0) {
                if (left-- <= 0) {
                    if (atomicCAS(words + ERROR, 0u, blockIdx.x + 1) == 0) words[ERROR_INDEX] = index;
                    passed = 0;
                    break;
                }
            }
        }
        passed = __syncthreads_and(passed);
        idle(index + 1);
        return passed;
    }

    __device__ __forceinline__ void finish() const {
        if (blockIdx.x == 0 && threadIdx.x == 0) words[BASE] = base + index * BLOCKS;
    }

    // JITTER build: passes a time that differs between blocks and barriers, so that a missing
    // barrier shows.
    static __device__ __forceinline__ void idle(u32 at) {
#if JITTER
        __nanosleep((blockIdx.x * 7 + at * 13) % 11 * 500);
#endif
    }
};

// y = W x, a warp to a row: a lane reads 16 bytes of the row at a time, multiplies by fp32 values of x
// in shared memory, and the warp adds up. Several loads of a lane are always under way, and the
// first of them are issued before x exists (ahead), while the block waits at a barrier.
#pragma once

#include "warp.cuh"

// x in shared memory, in units of 4 columns. The first and second half of every 8 columns (16 bytes
// of weights) lie apart, so that a warp reads, and writes, neighbouring addresses.
template <int K>
struct Columns {
    static_assert(K % 8 == 0, "a row of weights is read 8 columns at a time");
    static constexpr int CHUNKS = K / 8;
    static constexpr int PITCH = CHUNKS + 4;
    static constexpr int SIZE = PITCH + CHUNKS;
    static constexpr int PER_THREAD = ceil_div(K / 4, THREADS);

    // Whether the i-th element (of four columns) of this thread exists.
    static __device__ __forceinline__ bool has(int i) {
        return (i + 1) * THREADS <= K / 4 || threadIdx.x + i * THREADS < K / 4;
    }
    static __device__ __forceinline__ int place(int four) { return (four & 1) * PITCH + four / 2; }
};

// Adds to sum the product of 8 bf16 weights and 8 values.
DEVICE float dot8(uint4 w, float4 a, float4 b, float sum) {
    float even = low_bf16(w.x) * a.x, odd = high_bf16(w.x) * a.y;
    even += low_bf16(w.y) * a.z;
    odd += high_bf16(w.y) * a.w;
    even += low_bf16(w.z) * b.x;
    odd += high_bf16(w.z) * b.y;
    even += low_bf16(w.w) * b.z;
    odd += high_bf16(w.w) * b.w;
    return sum + (even + odd);
}

// The rows of a warp in a product with N outputs. A block has PER_BLOCK neighbouring rows and deals
// them out to its warps in turn. MATRICES is 2 where one output needs a row of each of two matrices,
// one after the other in memory (gate and up).
template <int N, int K, int MATRICES = 1>
struct Rows {
    using X = Columns<K>;
    static constexpr int PER_BLOCK = ceil_div(N, BLOCKS);
    static constexpr int OUTPUTS = ceil_div(PER_BLOCK, WARPS);  // of a warp
    static constexpr bool EVEN = N % BLOCKS == 0 && PER_BLOCK % WARPS == 0;
    static constexpr int PER_LANE = ceil_div(X::CHUNKS, WARP);
    // A batch is WIDTH loads of each matrix; a row takes STEPS batches; DEPTH batches are under way.
    static constexpr int WIDTH = at_most(PER_LANE, at_least(BATCH / MATRICES, 1));
    static constexpr int STEPS = ceil_div(PER_LANE, WIDTH);
    static constexpr int DEPTH =
        at_most(OUTPUTS * STEPS, at_least(LOADS / (MATRICES * WIDTH), 1));
    // Outputs after which a batch's step and slot repeat; all of them where that is no whole number.
    static constexpr int PERIOD = STEPS % DEPTH == 0 ? 1 : DEPTH;
    static constexpr int UNROLLED = OUTPUTS % PERIOD == 0 ? PERIOD : OUTPUTS;

    const uint4* start;  // this lane's first 16 bytes
    u64 policy;
    uint4 held[DEPTH][MATRICES][WIDTH];

    // weights: [MATRICES, N, K] bf16
    __device__ __forceinline__ Rows(const u16* weights, u64 stream_policy) : policy(stream_policy) {
        start = reinterpret_cast<const uint4*>(weights) + row(0) * X::CHUNKS + lane_id();
    }

    static __device__ __forceinline__ int row(int output) {
        return blockIdx.x * PER_BLOCK + output * WARPS + warp_id();
    }
    static __device__ __forceinline__ bool has(int output) {
        return EVEN || (output * WARPS + warp_id() < PER_BLOCK && row(output) < N);
    }
    static __device__ __forceinline__ int chunk(int step, int i) {
        return (step * WIDTH + i) * WARP + lane_id();
    }
    static __device__ __forceinline__ bool inside(int step, int i) {
        return (step * WIDTH + i + 1) * WARP <= X::CHUNKS || chunk(step, i) < X::CHUNKS;
    }

    __device__ __forceinline__ void load(int output, int step, int slot) {
#pragma unroll
        for (int m = 0; m < MATRICES; ++m) {
            const uint4* from = start + (m * N + output * WARPS) * X::CHUNKS + step * WIDTH * WARP;
#pragma unroll
            for (int i = 0; i < WIDTH; ++i) {
                bool there = has(output) && inside(step, i);
                held[slot][m][i] =
                    there ? load_weights(from + i * WARP, policy) : make_uint4(0, 0, 0, 0);
            }
        }
    }

    __device__ __forceinline__ void ahead() {
#pragma unroll
        for (int batch = 0; batch < DEPTH; ++batch) load(batch / STEPS, batch % STEPS, batch);
    }

    // Calls finish(output, row, sums) for each row of this warp, in every lane with the same sums.
    template <typename Finish>
    __device__ __forceinline__ void multiply(const float4* x, Finish finish) {
        float sum[MATRICES];
#pragma unroll 1
        for (int first = 0; first < OUTPUTS; first += UNROLLED) {
#pragma unroll
            for (int batch = 0; batch < UNROLLED * STEPS; ++batch) {
                int step = batch % STEPS, output = first + batch / STEPS, slot = batch % DEPTH;
                int next = first + (batch + DEPTH) / STEPS;
                multiply_batch(x, slot, step, sum);
                if (next < OUTPUTS) load(next, (batch + DEPTH) % STEPS, slot);
                if (step < STEPS - 1) continue;
#pragma unroll
                for (int m = 0; m < MATRICES; ++m) sum[m] = warp_sum(sum[m]);
                if (has(output)) finish(output, row(output), sum);
            }
        }
    }

    __device__ __forceinline__ void multiply_batch(const float4* x, int slot, int step, float* sum) {
#pragma unroll
        for (int m = 0; m < MATRICES; ++m) sum[m] = step ? sum[m] : 0.0f;
#pragma unroll
        for (int i = 0; i < WIDTH; ++i) {
            if (!inside(step, i)) continue;
            float4 a = x[chunk(step, i)], b = x[X::PITCH + chunk(step, i)];
#pragma unroll
            for (int m = 0; m < MATRICES; ++m) sum[m] = dot8(held[slot][m][i], a, b, sum[m]);
        }
    }
};

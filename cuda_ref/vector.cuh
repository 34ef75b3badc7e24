// Activation vectors on their way into shared memory, in the order that matvec.cuh reads. Every block
// does this for itself: a redundant norm is cheaper than one more grid barrier.
#pragma once

#include "matvec.cuh"

DEVICE float4 widen4(uint2 w) {
    return make_float4(low_bf16(w.x), high_bf16(w.x), low_bf16(w.y), high_bf16(w.y));
}

// The norm weights of the elements that this thread brings in; loaded ahead of the vector.
template <int K>
struct NormWeights {
    uint2 held[Columns<K>::PER_THREAD];

    __device__ __forceinline__ explicit NormWeights(const u16* weight) {
#pragma unroll
        for (int i = 0; i < Columns<K>::PER_THREAD; ++i) {
            const uint2* from = reinterpret_cast<const uint2*>(weight) + threadIdx.x + i * THREADS;
            held[i] = Columns<K>::has(i) ? load_constant(from) : make_uint2(0, 0);
        }
    }
};

// Puts v * weight into x and returns 1 / sqrt(mean(v^2) + eps), by which every product with x is yet
// to be multiplied. v(i) gives elements 4 i to 4 i + 3. Ends with the block in step.
template <int K, typename Load>
DEVICE float bring_normed(float4* x, float* warp_sums, const NormWeights<K>& norm, float eps, Load v) {
    using X = Columns<K>;
    float4 value[X::PER_THREAD];
#pragma unroll
    for (int i = 0; i < X::PER_THREAD; ++i) {
        value[i] = X::has(i) ? v(threadIdx.x + i * THREADS) : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    }
    float squares = 0.0f;
#pragma unroll
    for (int i = 0; i < X::PER_THREAD; ++i) {
        float4 a = value[i], w = widen4(norm.held[i]);
        squares += (a.x * a.x + a.y * a.y) + (a.z * a.z + a.w * a.w);
        a = make_float4(a.x * w.x, a.y * w.y, a.z * w.z, a.w * w.w);
        if (X::has(i)) x[X::place(threadIdx.x + i * THREADS)] = a;
    }
    squares = warp_sum(squares);
    if (lane_id() == 0) warp_sums[warp_id()] = squares;
    __syncthreads();
    float total = 0.0f;
#pragma unroll
    for (int i = 0; i < WARPS; ++i) total += warp_sums[i];
    return rsqrtf(total / K + eps);
}

// Puts a vector of global memory into x as it is. Ends with the block in step.
template <int K>
DEVICE void bring(float4* x, const float* vector) {
    using X = Columns<K>;
    float4 value[X::PER_THREAD];
#pragma unroll
    for (int i = 0; i < X::PER_THREAD; ++i) {
        const float4* from = reinterpret_cast<const float4*>(vector) + threadIdx.x + i * THREADS;
        value[i] = X::has(i) ? load_fresh(from) : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    }
#pragma unroll
    for (int i = 0; i < X::PER_THREAD; ++i) {
        if (X::has(i)) x[X::place(threadIdx.x + i * THREADS)] = value[i];
    }
    __syncthreads();
}

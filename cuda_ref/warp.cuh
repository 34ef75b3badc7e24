// Arithmetic within a warp: bf16 widened and rounded by hand (no CUDA header is needed), sums in a
// fixed order, and the order in which logits are compared.
#pragma once

#include "memory.cuh"

constexpr int WARP = 32;
constexpr int WARPS = THREADS / WARP;

__device__ constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }
__device__ constexpr int at_most(int a, int b) { return a < b ? a : b; }
__device__ constexpr int at_least(int a, int b) { return a > b ? a : b; }

DEVICE int lane_id() { return threadIdx.x % WARP; }
DEVICE int warp_id() { return threadIdx.x / WARP; }

DEVICE float minus_infinity() { return __uint_as_float(0xff800000u); }

// The two bf16 of a word, as fp32: exact.
DEVICE float low_bf16(u32 pair) { return __uint_as_float(pair << 16); }
DEVICE float high_bf16(u32 pair) { return __uint_as_float(pair & 0xffff0000u); }

// Nearest bf16, ties to even; every NaN becomes one quiet NaN.
DEVICE u32 to_bf16(float v) {
    u32 bits = __float_as_uint(v);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return 0x7fc0u;
    return (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
}

// Every lane gets the same bits: at each level the two partners add the same two numbers.
DEVICE float warp_sum(float v) {
#pragma unroll
    for (int away = WARP / 2; away > 0; away /= 2) v += __shfl_xor_sync(0xffffffffu, v, away);
    return v;
}

DEVICE u64 warp_max(u64 v) {
#pragma unroll
    for (int away = WARP / 2; away > 0; away /= 2) {
        u64 other = __shfl_xor_sync(0xffffffffu, v, away);
        v = other > v ? other : v;
    }
    return v;
}

// A logit and its id as one number whose maximum is the argmax: the logit rounded to bf16, NaN above
// everything, -0 equal to +0, and among equals the lowest id.
DEVICE u64 argmax_key(float logit, int id) {
    u32 bits = to_bf16(logit) << 16;
    u32 order = (bits & 0x80000000u) ? ~bits : bits | 0x80000000u;
    if ((bits & 0x7fffffffu) == 0) order = 0x80000000u;
    if ((bits & 0x7fffffffu) > 0x7f800000u) order = 0xffffffffu;
    return (u64(order) << 32) | (0xffffffffu - u32(id));
}

DEVICE int argmax_id(u64 key) { return int(0xffffffffu - u32(key)); }

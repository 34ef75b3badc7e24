// Stands in for cuda_ref/memory.cuh on a CPU: the same functions, on one address space.
#pragma once

#include "emulator.h"

using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;

#define DEVICE static inline

DEVICE u64 stream_policy() { return 0; }

DEVICE uint4 load_weights(const uint4* p, u64) { return *p; }

template <typename T>
DEVICE T load_fresh(const T* p) {
    return *static_cast<const volatile T*>(p);
}
template <>
inline float4 load_fresh(const float4* p) { return *p; }
template <>
inline float2 load_fresh(const float2* p) { return *p; }

template <typename T>
DEVICE T load_constant(const T* p) {
    return *p;
}

DEVICE void prefetch_l2(const void* p) {
    // Reading shows an address outside its tensor to a memory checker.
    emulator::sink = *static_cast<const volatile char*>(p);
}

DEVICE void add_release(u32* p) { __atomic_fetch_add(p, 1u, __ATOMIC_RELEASE); }

DEVICE u32 load_acquire(const u32* p) {
    emulator::yield();
    return __atomic_load_n(p, __ATOMIC_ACQUIRE);
}

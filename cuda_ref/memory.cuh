// How this kernel touches memory: the only file with PTX in it.
//
// Weights are read once and never again in a step, so they pass by L1 and leave L2 first. Values that
// another block wrote during this launch are read with load_fresh (L2, never L1); what nobody writes
// during a launch, with load_constant.
#pragma once

using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;

#define DEVICE static __device__ __forceinline__

// How long a line of weights may stay in L2; 0 where the build does not say.
DEVICE u64 stream_policy() {
    u64 policy = 0;
#if EVICT_FIRST
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
#endif
    return policy;
}

// 16 bytes of weights. volatile keeps the load on its side of a barrier's wait.
DEVICE uint4 load_weights(const uint4* p, u64 policy) {
    uint4 v;
#if EVICT_FIRST
    asm volatile("ld.global.nc.L1::no_allocate.L2::cache_hint.v4.u32 {%0, %1, %2, %3}, [%4], %5;"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(p), "l"(policy));
#else
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(p));
#endif
    return v;
}

template <typename T>
DEVICE T load_fresh(const T* p) {
    return __ldcg(p);
}

template <typename T>
DEVICE T load_constant(const T* p) {
    return __ldg(p);
}

DEVICE void prefetch_l2(const void* p) { asm volatile("prefetch.global.L2 [%0];" ::"l"(p)); }

// Adds 1 after everything this thread knows to have happened is visible to the whole GPU.
DEVICE void add_release(u32* p) {
    asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(p) : "memory");
}

DEVICE u32 load_acquire(const u32* p) {
    u32 v;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
    return v;
}

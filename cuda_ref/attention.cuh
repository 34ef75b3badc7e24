// Attention of the newest row: head norm and rope of q and k, the cache append, and softmax(q k) v.
//
// An item is one K/V head (with the query heads that read it) and one range of cached rows, and belongs to one
// block. Within it the warps take rows in turn, each with its own running maximum and sum; the block
// merges them, and leaves a partial result with its log-sum-exp. SPLITS bounds the ranges of a head;
// 1 means one block per head. Reading the partial results back (combine) is the next stage's work.
#pragma once

#include "vector.cuh"

constexpr int GROUP = Q_HEADS / KV_HEADS;  // query heads that read one K/V head
constexpr int HALF = HEAD_DIM / 2;         // rope rotates the pairs (i, i + HALF)
constexpr int PAIRS = ceil_div(HALF, WARP);
constexpr int Q_SIZE = Q_HEADS * HEAD_DIM;
constexpr int KV_SIZE = KV_HEADS * HEAD_DIM;
// Cached rows that a warp has under way: the shortest range is done in one go.
constexpr int ROWS_AT_ONCE = at_least(at_most(ROWS_PER_SPLIT / WARPS, 4), 1);
static_assert(Q_HEADS % KV_HEADS == 0, "query heads share K/V heads evenly");
static_assert(HEAD_DIM % 8 == 0 && (HALF <= WARP || HALF == 2 * WARP),
              "a lane holds one or two pairs of a head");

// The elements of one head that a lane holds: pairs lane * PAIRS onward.
struct Pairs {
    float first[PAIRS], second[PAIRS];
};

// The same as read from memory in bf16: PAIRS values in each word.
struct RawPairs {
    u32 first, second;
};

DEVICE bool holds_pairs() { return lane_id() * PAIRS < HALF; }

DEVICE Pairs load_head(const float* head) {
    Pairs v = {};
    if (!holds_pairs()) return v;
    const float* p = head + lane_id() * PAIRS;
    if (PAIRS == 2) {
        float2 a = load_fresh(reinterpret_cast<const float2*>(p));
        float2 b = load_fresh(reinterpret_cast<const float2*>(p + HALF));
        v.first[0] = a.x, v.first[PAIRS - 1] = a.y;
        v.second[0] = b.x, v.second[PAIRS - 1] = b.y;
    } else {
        v.first[0] = load_fresh(p);
        v.second[0] = load_fresh(p + HALF);
    }
    return v;
}

DEVICE RawPairs load_raw(const u16* head) {
    if (!holds_pairs()) return {0, 0};
    const u16* p = head + lane_id() * PAIRS;
    if (PAIRS == 2) {
        return {load_fresh(reinterpret_cast<const u32*>(p)),
                load_fresh(reinterpret_cast<const u32*>(p + HALF))};
    }
    return {load_fresh(p), load_fresh(p + HALF)};
}

DEVICE Pairs widen(RawPairs raw) {
    Pairs v;
    v.first[0] = low_bf16(raw.first), v.second[0] = low_bf16(raw.second);
    if (PAIRS == 2) {
        v.first[PAIRS - 1] = high_bf16(raw.first);
        v.second[PAIRS - 1] = high_bf16(raw.second);
    }
    return v;
}

DEVICE RawPairs narrow(const Pairs& v) {
    RawPairs raw = {to_bf16(v.first[0]), to_bf16(v.second[0])};
    if (PAIRS == 2) {
        raw.first |= to_bf16(v.first[PAIRS - 1]) << 16;
        raw.second |= to_bf16(v.second[PAIRS - 1]) << 16;
    }
    return raw;
}

DEVICE void store_raw(u16* head, RawPairs raw) {
    if (!holds_pairs()) return;
    u16* p = head + lane_id() * PAIRS;
    if (PAIRS == 2) {
        *reinterpret_cast<u32*>(p) = raw.first;
        *reinterpret_cast<u32*>(p + HALF) = raw.second;
    } else {
        p[0] = u16(raw.first);
        p[HALF] = u16(raw.second);
    }
}

// This lane's part of a product; the lanes' parts are yet to be added up.
DEVICE float dot(const Pairs& a, const Pairs& b) {
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < PAIRS; ++i) sum += a.first[i] * b.first[i] + a.second[i] * b.second[i];
    return sum;
}

DEVICE Pairs norm_and_rotate(Pairs v, const Pairs& weight, const Pairs& cos_sin, float eps) {
    float scale = rsqrtf(warp_sum(dot(v, v)) / HEAD_DIM + eps);
#pragma unroll
    for (int i = 0; i < PAIRS; ++i) {
        float a = v.first[i] * scale * weight.first[i];
        float b = v.second[i] * scale * weight.second[i];
        float c = cos_sin.first[i], s = cos_sin.second[i];
        v.first[i] = a * c - b * s;
        v.second[i] = b * c + a * s;
    }
    return v;
}

// How the rows 0 to position are cut into ranges: no range is empty, and the last ends with the
// newest row.
struct Splits {
    int rows, length, count;

    __device__ __forceinline__ explicit Splits(int position) : rows(position + 1) {
        length = at_least(ROWS_PER_SPLIT, ceil_div(rows, SPLITS));
        if (SPLITS == 1) length = rows;
        count = ceil_div(rows, length);
    }
    __device__ __forceinline__ int items() const { return KV_HEADS * count; }
};

struct AttentionBuffers {
    float *partial, *lse;  // [SPLITS, HQ, HD], [SPLITS, HQ] fp32
};

// The block's merge of its warps.
struct AttentionShared {
    float maximum[WARPS][GROUP], sum[WARPS][GROUP];
    float weighted[WARPS][GROUP][HEAD_DIM];
};

// One item in the eyes of one warp.
struct Attention {
    Splits splits;
    int position, kv_head, split, begin, end;
    u16 *k_cache, *v_cache;  // [T, HD] bf16 of this head
    RawPairs k[ROWS_AT_ONCE], v[ROWS_AT_ONCE];
    Pairs q_weight, k_weight, cos_sin;

    // Loads what does not depend on this layer's q, k and v.
    __device__ __forceinline__ Attention(int newest, const u16* q_norm, const u16* k_norm,
                                         const float* cos, const float* sin)
        : splits(newest), position(newest), begin(0), end(0) {
        q_weight = widen(load_raw(q_norm));
        k_weight = widen(load_raw(k_norm));
        cos_sin = {};
        if (!holds_pairs()) return;
#pragma unroll
        for (int i = 0; i < PAIRS; ++i) {
            int at = position * HALF + lane_id() * PAIRS + i;
            cos_sin.first[i] = load_constant(cos + at);
            cos_sin.second[i] = load_constant(sin + at);
        }
    }

    __device__ __forceinline__ void choose(int item, u16* layer_k, u16* layer_v, int max_positions) {
        kv_head = item % KV_HEADS;
        split = item / KV_HEADS;
        begin = split * splits.length;
        end = at_most(begin + splits.length, splits.rows);
        k_cache = layer_k + size_t(kv_head) * max_positions * HEAD_DIM;
        v_cache = layer_v + size_t(kv_head) * max_positions * HEAD_DIM;
    }

    static __device__ __forceinline__ int first_row(int begin) { return begin + warp_id(); }

    // Rows row, row + WARPS, ...; those past the range, and the newest, are left zero.
    __device__ __forceinline__ void load_rows(int row) {
#pragma unroll
        for (int i = 0; i < ROWS_AT_ONCE; ++i, row += WARPS) {
            bool cached = row < end && row < position;
            k[i] = cached ? load_raw(k_cache + size_t(row) * HEAD_DIM) : RawPairs{0, 0};
            v[i] = cached ? load_raw(v_cache + size_t(row) * HEAD_DIM) : RawPairs{0, 0};
        }
    }

    // The first rows must have been loaded. qkv: [(HQ + 2 HKV) * HD] fp32.
    __device__ __forceinline__ void attend(const float* qkv, AttentionBuffers out,
                                           AttentionShared& shared, float eps) {
        bool has_newest = end == splits.rows && (position - begin) % WARPS == warp_id();
        Pairs q[GROUP], weighted[GROUP] = {};
        float maximum[GROUP], sum[GROUP];
        RawPairs new_k = {0, 0}, new_v = {0, 0};
#pragma unroll
        for (int g = 0; g < GROUP; ++g) {
            q[g] = load_head(qkv + (kv_head * GROUP + g) * HEAD_DIM);
            maximum[g] = minus_infinity();
            sum[g] = 0.0f;
        }
        if (has_newest) {
            Pairs key = load_head(qkv + Q_SIZE + kv_head * HEAD_DIM);
            Pairs value = load_head(qkv + Q_SIZE + KV_SIZE + kv_head * HEAD_DIM);
            new_k = narrow(norm_and_rotate(key, k_weight, cos_sin, eps));
            new_v = narrow(value);
            store_raw(k_cache + size_t(position) * HEAD_DIM, new_k);
            store_raw(v_cache + size_t(position) * HEAD_DIM, new_v);
        }
#pragma unroll
        for (int g = 0; g < GROUP; ++g) q[g] = norm_and_rotate(q[g], q_weight, cos_sin, eps);

        const float scale = 1.0f / sqrtf(float(HEAD_DIM));
        for (int row = first_row(begin); row < end; row += WARPS * ROWS_AT_ONCE) {
            if (row != first_row(begin)) load_rows(row);
            float score[ROWS_AT_ONCE][GROUP];
#pragma unroll
            for (int i = 0; i < ROWS_AT_ONCE; ++i) {
                if (has_newest && row + i * WARPS == position) k[i] = new_k, v[i] = new_v;
                Pairs key = widen(k[i]);
#pragma unroll
                for (int g = 0; g < GROUP; ++g) score[i][g] = warp_sum(dot(q[g], key));
            }
#pragma unroll
            for (int g = 0; g < GROUP; ++g) {
                float top = maximum[g];
#pragma unroll
                for (int i = 0; i < ROWS_AT_ONCE; ++i) {
                    score[i][g] = row + i * WARPS < end ? score[i][g] * scale : minus_infinity();
                    top = fmaxf(top, score[i][g]);
                }
                float keep = expf(maximum[g] - top);  // 0 at first: maximum is -inf, top is not
                maximum[g] = top;
                sum[g] *= keep;
#pragma unroll
                for (int j = 0; j < PAIRS; ++j) {
                    weighted[g].first[j] *= keep;
                    weighted[g].second[j] *= keep;
                }
#pragma unroll
                for (int i = 0; i < ROWS_AT_ONCE; ++i) {
                    float p = expf(score[i][g] - top);
                    Pairs value = widen(v[i]);
                    sum[g] += p;
#pragma unroll
                    for (int j = 0; j < PAIRS; ++j) {
                        weighted[g].first[j] += p * value.first[j];
                        weighted[g].second[j] += p * value.second[j];
                    }
                }
            }
        }
        merge(maximum, sum, weighted, out, shared);
    }

    __device__ __forceinline__ void merge(const float* maximum, const float* sum,
                                          const Pairs* weighted, AttentionBuffers out,
                                          AttentionShared& shared) {
#pragma unroll
        for (int g = 0; g < GROUP; ++g) {
            if (lane_id() == 0) {
                shared.maximum[warp_id()][g] = maximum[g];
                shared.sum[warp_id()][g] = sum[g];
            }
            if (!holds_pairs()) continue;
#pragma unroll
            for (int j = 0; j < PAIRS; ++j) {
                int at = lane_id() * PAIRS + j;
                shared.weighted[warp_id()][g][at] = weighted[g].first[j];
                shared.weighted[warp_id()][g][at + HALF] = weighted[g].second[j];
            }
        }
        __syncthreads();
        int busy = at_most(end - begin, WARPS);
        for (int at = threadIdx.x; at < GROUP * HEAD_DIM; at += THREADS) {
            int g = at / HEAD_DIM, i = at % HEAD_DIM;
            float top = minus_infinity(), total = 0.0f, result = 0.0f;
            for (int w = 0; w < busy; ++w) top = fmaxf(top, shared.maximum[w][g]);
            for (int w = 0; w < busy; ++w) {
                float share = expf(shared.maximum[w][g] - top);
                total += share * shared.sum[w][g];
                result += share * shared.weighted[w][g][i];
            }
            int head = split * Q_HEADS + kv_head * GROUP + g;
            out.partial[head * HEAD_DIM + i] = result / total;
            if (i == 0) out.lse[head] = top + logf(total);
        }
    }
};

// Puts the attention of all heads into x: every split weighted by its share of the softmax. The
// trace, where there is one, gets a copy. Ends with the block in step.
DEVICE void combine(float4* x, AttentionBuffers in, int count, float* trace) {
    constexpr int AT_ONCE = at_most(SPLITS, 8);
    for (int four = threadIdx.x; four < Q_SIZE / 4; four += THREADS) {
        int head = four * 4 / HEAD_DIM;
        float lse[SPLITS], top = minus_infinity(), total = 0.0f;
#pragma unroll
        for (int s = 0; s < SPLITS; ++s) {
            lse[s] = s < count ? load_fresh(in.lse + s * Q_HEADS + head) : minus_infinity();
        }
        float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
        for (int first = 0; first < SPLITS; first += AT_ONCE) {
            float4 part[AT_ONCE];
#pragma unroll
            for (int i = 0; i < AT_ONCE; ++i) {
                int s = first + i;
                const float4* from = reinterpret_cast<const float4*>(in.partial) + s * (Q_SIZE / 4);
                part[i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
                if (s < count) part[i] = load_fresh(from + four);
            }
            if (first == 0) {
#pragma unroll
                for (int s = 0; s < SPLITS; ++s) top = fmaxf(top, lse[s]);
            }
#pragma unroll
            for (int i = 0; i < AT_ONCE; ++i) {
                if (first + i >= SPLITS) continue;
                float share = expf(lse[first + i] - top);
                total += share;
                sum.x += share * part[i].x;
                sum.y += share * part[i].y;
                sum.z += share * part[i].z;
                sum.w += share * part[i].w;
            }
        }
        sum = make_float4(sum.x / total, sum.y / total, sum.z / total, sum.w / total);
        x[Columns<Q_SIZE>::place(four)] = sum;
        if (trace != nullptr) reinterpret_cast<float4*>(trace)[four] = sum;
    }
    __syncthreads();
}

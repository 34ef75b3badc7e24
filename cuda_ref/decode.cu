// A decoder step at batch 1 as one persistent kernel: n tokens in, hidden states, logits and argmax
// out, K and V appended. One block per multiprocessor, all of them resident (cooperative launch).
//
// Five stages a layer, a grid barrier after each: qkv, attention, o, gate/up, down; then the head.
// A block that has arrived at a barrier first issues the loads that wait for nobody (the next
// stage's weights above all), and only then waits.
//
// Numerics: contract fp32_activations. Weights and the cache are bf16, all between is fp32; K and V
// are rounded once, the newest row included. Sums have a fixed order: the same input, the same bits.
//
// Shapes and launch parameters come from the compiler's command line (options.py).
#include "attention.cuh"
#include "barrier.cuh"

constexpr int QKV_SIZE = Q_SIZE + 2 * KV_SIZE;
static_assert(THREADS % WARP == 0 && THREADS <= 1024, "whole warps, and a block the chip can start");
static_assert(HIDDEN % 8 == 0 && FFN % 8 == 0, "rows of weights are read 8 columns at a time");

using QkvRows = Rows<QKV_SIZE, HIDDEN>;
using ORows = Rows<HIDDEN, Q_SIZE>;
using GateUpRows = Rows<FFN, HIDDEN, 2>;
using DownRows = Rows<HIDDEN, FFN>;
using HeadRows = Rows<VOCAB, HIDDEN>;

constexpr int MAX_X_SIZE =
    at_least(Columns<HIDDEN>::SIZE, at_least(Columns<Q_SIZE>::SIZE, Columns<FFN>::SIZE));

// Idle blocks of the attention stage fetch rows of gate and up into L2, PREFETCH_ROWS of each.
DEVICE void prefetch_gate_up(const u16* gate_up, int busy_blocks) {
    constexpr int LINE = 128;
    constexpr int LINES = PREFETCH_ROWS * HIDDEN * 2 / LINE;
    int idle_blocks = BLOCKS - busy_blocks, mine = blockIdx.x - busy_blocks;
    if (mine < 0) return;
    for (int matrix = 0; matrix < 2; ++matrix) {
        const char* start = reinterpret_cast<const char*>(gate_up + matrix * size_t(FFN) * HIDDEN);
        for (int line = mine * THREADS + threadIdx.x; line < LINES; line += idle_blocks * THREADS) {
            prefetch_l2(start + size_t(line) * LINE);
        }
    }
}

// Every block's best logit to the id of the best of all; the same in every thread.
DEVICE int best_token(const u64* block_best, u64* warp_best) {
    u64 best = 0;
#pragma unroll 1
    for (int i = threadIdx.x; i < BLOCKS; i += THREADS) {
        u64 key = load_fresh(block_best + i);
        best = key > best ? key : best;
    }
    best = warp_max(best);
    if (lane_id() == 0) warp_best[warp_id()] = best;
    __syncthreads();
#pragma unroll 1
    for (int i = 0; i < WARPS; ++i) best = warp_best[i] > best ? warp_best[i] : best;
    return argmax_id(best);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) decode_kernel(
    // Weights.
    const u16* input_norm,           // [L, D] bf16
    const u16* q_norm,               // [L, HD] bf16
    const u16* k_norm,               // [L, HD] bf16
    const u16* qkv_weight,           // [L, (HQ + 2 HKV) * HD, D] bf16
    const u16* o_weight,             // [L, D, HQ * HD] bf16
    const u16* post_attention_norm,  // [L, D] bf16
    const u16* gate_up_weight,       // [L, 2 F, D] bf16
    const u16* down_weight,          // [L, D, F] bf16
    const u16* norm,                 // [D] bf16
    const u16* head_weight,          // [V, D] bf16, the head in use
    // The cache and the rotary tables of its rows.
    u16* k_cache,      // [L, HKV, T, HD] bf16
    u16* v_cache,      // [L, HKV, T, HD] bf16
    const float* cos,  // [T, HD / 2] fp32
    const float* sin,  // [T, HD / 2] fp32
    // What stages hand to one another; a trace keeps a slot per layer.
    float* x,             // [slots, D] fp32, residual stream after down
    float* mid,           // [slots, D] fp32, residual stream after o
    float* qkv,           // [slots, (HQ + 2 HKV) * HD] fp32
    float* partial,       // [SPLITS, HQ, HD] fp32
    float* lse,           // [SPLITS, HQ] fp32
    float* attention,     // [slots, HQ * HD] fp32, written in a trace only
    float* activation,    // [slots, F] fp32, silu(gate) * up
    u64* block_best,      // [BLOCKS] best logit of each block, as argmax_key
    u32* sync_words,      // barrier.cuh
    // The steps: an embedding row each, or a first token and then each step's argmax.
    const u16* inputs_embeds,  // [n, D] bf16, or null
    const u16* embedding,      // [ids, D] bf16 where inputs_embeds is null
    const int* first_token,    // [1], likewise
    float* hidden,             // [n, D] fp32, after the final norm
    float* logits,             // [n, V] fp32
    int* next_tokens,          // [n] argmax of each step's logits
    int n_steps,
    int position,       // of the first step
    int max_positions,  // rows of the cache
    int trace,          // 1: keep every layer's stages (one step only), 0: do not
    int spin_limit, float eps) {
    __shared__ float4 operand[MAX_X_SIZE];
    __shared__ AttentionShared attention_shared;
    __shared__ float warp_sums[WARPS];
    __shared__ u64 warp_best[WARPS];

    GridBarrier barrier(sync_words, spin_limit);
    const AttentionBuffers splits_out = {partial, lse};
    const u64 policy = stream_policy();
    const bool writes_lane = lane_id() == 0;
    float stream[ORows::OUTPUTS];  // residual stream at the rows of D that this warp computes
    static_assert(ORows::OUTPUTS == DownRows::OUTPUTS, "o and down share their rows");

    for (int step = 0; step < n_steps; ++step, ++position) {
        for (int layer = 0; layer < LAYERS; ++layer) {
            const int slot = trace * layer, slot_before = trace * (layer - 1);

            QkvRows qkv_rows(qkv_weight + size_t(layer) * QKV_SIZE * HIDDEN, policy);
            qkv_rows.ahead();
            NormWeights<HIDDEN> input_weights(input_norm + layer * HIDDEN);
            if (!barrier.wait()) return;
            const u16* embed = nullptr;
            if (layer == 0) {
                int token = 0;
                if (step > 0 && (inputs_embeds == nullptr || blockIdx.x == 0)) {
                    token = best_token(block_best, warp_best);
                    if (blockIdx.x == 0 && threadIdx.x == 0) next_tokens[step - 1] = token;
                } else if (inputs_embeds == nullptr) {
                    token = load_constant(first_token);
                }
                embed = inputs_embeds == nullptr ? embedding + size_t(token) * HIDDEN
                                                 : inputs_embeds + size_t(step) * HIDDEN;
#pragma unroll
                for (int i = 0; i < ORows::OUTPUTS; ++i) {
                    const u16* at = embed + ORows::row(i);
                    stream[i] = ORows::has(i) ? low_bf16(load_constant(at)) : 0.0f;
                }
            }
            float scale = bring_normed<HIDDEN>(operand, warp_sums, input_weights, eps, [&](int four) {
                if (layer == 0) return widen4(load_constant(reinterpret_cast<const uint2*>(embed) + four));
                return load_fresh(reinterpret_cast<const float4*>(x + slot_before * HIDDEN) + four);
            });
            qkv_rows.multiply(operand, [&](int, int row, const float* sum) {
                if (writes_lane) qkv[slot * QKV_SIZE + row] = sum[0] * scale;
            });
            barrier.arrive();

            const size_t layer_rows = size_t(layer) * KV_HEADS * max_positions * HEAD_DIM;
            Attention attention_item(position, q_norm + layer * HEAD_DIM, k_norm + layer * HEAD_DIM,
                                     cos, sin);
            const int items = attention_item.splits.items();
            auto choose = [&](int item) {
                attention_item.choose(item, k_cache + layer_rows, v_cache + layer_rows, max_positions);
                attention_item.load_rows(Attention::first_row(attention_item.begin));
            };
            if (blockIdx.x < items) choose(blockIdx.x);
            // Attention reads little: the weights of the stage after it come in meanwhile.
            ORows o_rows(o_weight + size_t(layer) * HIDDEN * Q_SIZE, policy);
            o_rows.ahead();
            prefetch_gate_up(gate_up_weight + size_t(layer) * 2 * FFN * HIDDEN, items);
            if (!barrier.wait()) return;
            for (int item = blockIdx.x; item < items; item += BLOCKS) {
                if (item != blockIdx.x) {
                    __syncthreads();
                    choose(item);
                }
                attention_item.attend(qkv + slot * QKV_SIZE, splits_out, attention_shared, eps);
            }
            barrier.arrive();

            if (!barrier.wait()) return;
            combine(operand, splits_out, attention_item.splits.count,
                    trace && blockIdx.x == 0 ? attention + slot * Q_SIZE : nullptr);
            o_rows.multiply(operand, [&](int output, int row, const float* sum) {
                stream[output] += sum[0];
                if (writes_lane) mid[slot * HIDDEN + row] = stream[output];
            });
            barrier.arrive();

            GateUpRows gate_up_rows(gate_up_weight + size_t(layer) * 2 * FFN * HIDDEN, policy);
            gate_up_rows.ahead();
            NormWeights<HIDDEN> post_weights(post_attention_norm + layer * HIDDEN);
            if (!barrier.wait()) return;
            scale = bring_normed<HIDDEN>(operand, warp_sums, post_weights, eps, [&](int four) {
                return load_fresh(reinterpret_cast<const float4*>(mid + slot * HIDDEN) + four);
            });
            gate_up_rows.multiply(operand, [&](int, int row, const float* sum) {
                float gate = sum[0] * scale, up = sum[1] * scale;
                if (writes_lane) activation[slot * FFN + row] = gate / (1.0f + expf(-gate)) * up;
            });
            barrier.arrive();

            DownRows down_rows(down_weight + size_t(layer) * HIDDEN * FFN, policy);
            down_rows.ahead();
            if (!barrier.wait()) return;
            bring<FFN>(operand, activation + slot * FFN);
            down_rows.multiply(operand, [&](int output, int row, const float* sum) {
                stream[output] += sum[0];
                if (writes_lane) x[slot * HIDDEN + row] = stream[output];
            });
            barrier.arrive();
        }

        HeadRows head_rows(head_weight, policy);
        head_rows.ahead();
        NormWeights<HIDDEN> final_weights(norm);
        if (!barrier.wait()) return;
        float scale = bring_normed<HIDDEN>(operand, warp_sums, final_weights, eps, [&](int four) {
            return load_fresh(reinterpret_cast<const float4*>(x + trace * (LAYERS - 1) * HIDDEN) + four);
        });
        if (blockIdx.x == 0) {
            for (int four = threadIdx.x; four < HIDDEN / 4; four += THREADS) {
                float4 v = operand[Columns<HIDDEN>::place(four)];
                reinterpret_cast<float4*>(hidden + size_t(step) * HIDDEN)[four] =
                    make_float4(v.x * scale, v.y * scale, v.z * scale, v.w * scale);
            }
        }
        u64 best = 0;
        head_rows.multiply(operand, [&](int, int row, const float* sum) {
            float logit = sum[0] * scale;
            if (writes_lane) logits[size_t(step) * VOCAB + row] = logit;
            u64 key = argmax_key(logit, row);
            best = key > best ? key : best;
        });
        if (writes_lane) warp_best[warp_id()] = best;
        __syncthreads();
        if (threadIdx.x == 0) {
#pragma unroll 1
            for (int i = 1; i < WARPS; ++i) best = warp_best[i] > best ? warp_best[i] : best;
            block_best[blockIdx.x] = best;
        }
        barrier.arrive();
    }

    if (!barrier.wait()) return;
    if (blockIdx.x == 0) {
        int token = best_token(block_best, warp_best);
        if (threadIdx.x == 0) next_tokens[n_steps - 1] = token;
    }
    barrier.finish();
}

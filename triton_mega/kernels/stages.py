"""The stages of a decoder step, each a pair of device functions.

``<stage>_ahead`` loads what no barrier produces (weights, norm weights, cached rows, the residual
rows that the stage adds to); ``<stage>`` then does the work. The persistent kernel puts the
barrier's wait between the two. A stage writes only rows that its own program owns and never reads a
buffer that another program of the same stage writes.

Numerics: contract ``fp32_activations``. Everything between bf16 weights and the bf16 cache is fp32.
"""

from __future__ import annotations

import triton
import triton.language as tl

from triton_mega.kernels.attention import (
    attend,
    combine_splits,
    item_place,
    load_cached_tile,
    load_rotary,
)
from triton_mega.kernels.matvec import (
    block_offsets,
    half_offsets,
    load_block,
    load_halves,
    load_rows,
    matvec,
    products,
    row_groups,
    store_block,
)
from triton_mega.kernels.norm import rms_norm


@triton.jit
def load_stream(
    steps, buffers, offs, start, step, layer, trace, HIDDEN: tl.constexpr, BOUND: tl.constexpr
):
    """Elements ``start + offs`` of the residual stream that enters a layer; zero from BOUND on.

    That is the embedding row, or the layer before's output: two predicated loads, not a branch.
    """
    embeds_ptrs = (steps.inputs_embeds + step * HIDDEN + offs) + start
    x_ptrs = (buffers.x + (layer - 1) * trace * HIDDEN + offs) + start
    mask = offs < BOUND - start
    embeds = tl.load(embeds_ptrs, mask=mask & (layer == 0), other=0.0).to(tl.float32)
    return embeds + tl.load(x_ptrs, mask=mask & (layer > 0), other=0.0)


@triton.jit
def qkv_proj_ahead(weights, pid, layer, shape, tiles):
    """First block of q/k/v weights and the norm weights."""
    N: tl.constexpr = (shape.Q_HEADS + 2 * shape.KV_HEADS) * shape.HEAD_DIM
    K: tl.constexpr = shape.HIDDEN
    BLOCK_K: tl.constexpr = tiles.QKV_K
    w_ptr = weights.qkv + layer.to(tl.int64) * (N * K // 2)
    rows = load_rows(w_ptr, pid, N, K, tiles.QKV_N, BLOCK_K, tiles.NUM_WARPS, tiles.PROGRAMS)
    norm = load_halves(weights.input_norm + layer * K, K, BLOCK_K, tiles.NUM_WARPS)
    return rows, norm


@triton.jit
def qkv_proj(weights, steps, buffers, ahead, pid, step, layer, trace, eps, shape, tiles):
    """qkv = W_qkv @ rms_norm(x), heads not yet normed or rotated."""
    N: tl.constexpr = (shape.Q_HEADS + 2 * shape.KV_HEADS) * shape.HEAD_DIM
    K: tl.constexpr = shape.HIDDEN
    BLOCK_K: tl.constexpr = tiles.QKV_K
    rows, norm = ahead
    offs = half_offsets(BLOCK_K, tiles.NUM_WARPS)
    x = ()
    for i in tl.static_range(triton.cdiv(K, BLOCK_K)):
        start = i * (BLOCK_K // 2)
        low = load_stream(steps, buffers, offs, start, step, layer, trace, K, K // 2)
        high = load_stream(steps, buffers, offs, start + K // 2, step, layer, trace, K, K)
        x = x + ((low, high),)
    matvec(
        weights.qkv + layer.to(tl.int64) * (N * K // 2),
        rms_norm(x, norm, eps, K),
        rows,
        (),
        buffers.qkv + layer * trace * N,
        pid,
        N,
        K,
        tiles.QKV_N,
        BLOCK_K,
        tiles.NUM_WARPS,
        tiles.PROGRAMS,
    )


@triton.jit
def attention_ahead(weights, cache, pid, position, layer, max_positions, shape, tiles):
    """Cached rows of the first item's first tile, head norm weights and the rotary row."""
    place = item_place(pid, position, layer, max_positions, shape, tiles)
    k, v = load_cached_tile(cache, place, position, shape, tiles)
    return k, v, load_rotary(weights, cache, layer, position, shape)


@triton.jit
def attention(
    cache, buffers, ahead, pid, position, layer, trace, max_positions, eps, shape, tiles
):
    """Head norm, rope, cache append and attention of this program's items: partial results."""
    N: tl.constexpr = (shape.Q_HEADS + 2 * shape.KV_HEADS) * shape.HEAD_DIM
    ITEMS: tl.constexpr = shape.KV_HEADS * tiles.SPLITS
    qkv_ptr = buffers.qkv + layer * trace * N
    k, v, rotary = ahead
    for i in tl.static_range(triton.cdiv(ITEMS, tiles.PROGRAMS)):
        item = pid + i * tiles.PROGRAMS
        place = item_place(item, position, layer, max_positions, shape, tiles)
        if i > 0:
            k, v = load_cached_tile(cache, place, position, shape, tiles)
        if place[2] < place[3]:
            attend(
                qkv_ptr,
                cache,
                buffers.partial,
                buffers.lse,
                k,
                v,
                rotary,
                place,
                position,
                eps,
                shape,
                tiles,
            )


@triton.jit
def o_proj_ahead(weights, steps, buffers, pid, step, layer, trace, shape, tiles):
    """First block of o weights and the residual rows that it is added to."""
    N: tl.constexpr = shape.HIDDEN
    K: tl.constexpr = shape.Q_HEADS * shape.HEAD_DIM
    BLOCK_N: tl.constexpr = tiles.O_N
    BLOCK_K: tl.constexpr = triton.next_power_of_2(K)
    w_ptr = weights.o + layer.to(tl.int64) * (N * K // 2)
    rows = load_rows(w_ptr, pid, N, K, BLOCK_N, BLOCK_K, tiles.NUM_WARPS, tiles.PROGRAMS)
    offs = block_offsets(BLOCK_N, BLOCK_K, tiles.NUM_WARPS)
    residual = ()
    for i in tl.static_range(triton.cdiv(N, BLOCK_N * tiles.PROGRAMS)):
        start = (pid + i * tiles.PROGRAMS) * BLOCK_N
        residual = residual + (
            load_stream(steps, buffers, offs, start, step, layer, trace, N, N),
        )
    return rows, residual


@triton.jit
def o_proj(weights, buffers, ahead, pid, position, layer, trace, shape, tiles):
    """mid = x + W_o @ attention; combines the splits first."""
    N: tl.constexpr = shape.HIDDEN
    K: tl.constexpr = shape.Q_HEADS * shape.HEAD_DIM
    BLOCK_K: tl.constexpr = triton.next_power_of_2(K)
    rows, residual = ahead
    low, high = combine_splits(buffers.partial, buffers.lse, position, shape, tiles)
    if (trace > 0) & (pid == 0):
        offs = tl.arange(0, BLOCK_K // 2)
        out_ptr = buffers.attention + layer * K
        tl.store(out_ptr + offs, low, mask=offs < K // 2)
        tl.store(out_ptr + K // 2 + offs, high, mask=offs < K // 2)
    GROUPS: tl.constexpr = row_groups(BLOCK_K, tiles.NUM_WARPS)
    same = tl.zeros([GROUPS, 1, 1], tl.float32)
    matvec(
        weights.o + layer.to(tl.int64) * (N * K // 2),
        ((low[None, None, :] + same, high[None, None, :] + same),),
        rows,
        residual,
        buffers.mid + layer * trace * N,
        pid,
        N,
        K,
        tiles.O_N,
        BLOCK_K,
        tiles.NUM_WARPS,
        tiles.PROGRAMS,
    )


@triton.jit
def _gate_up_rows(weights, block, layer, shape, tiles):
    """A block of gate rows and the same block of up rows."""
    N: tl.constexpr = shape.FFN
    K: tl.constexpr = shape.HIDDEN
    BLOCK_N: tl.constexpr = tiles.GATE_UP_N
    BLOCK_K: tl.constexpr = tiles.GATE_UP_K
    NUM_WARPS: tl.constexpr = tiles.NUM_WARPS
    gate_ptr = weights.gate_up + layer.to(tl.int64) * (N * K)
    up_ptr = gate_ptr + N * K // 2
    gate = load_rows(gate_ptr, block, N, K, BLOCK_N, BLOCK_K, NUM_WARPS, tiles.PROGRAMS)
    return gate, load_rows(up_ptr, block, N, K, BLOCK_N, BLOCK_K, NUM_WARPS, tiles.PROGRAMS)


@triton.jit
def gate_up_proj_ahead(weights, pid, layer, shape, tiles):
    """First block of gate and up weights and the norm weights."""
    norm_ptr = weights.post_attention_norm + layer * shape.HIDDEN
    rows = _gate_up_rows(weights, pid, layer, shape, tiles)
    return rows, load_halves(norm_ptr, shape.HIDDEN, tiles.GATE_UP_K, tiles.NUM_WARPS)


@triton.jit
def gate_up_proj(weights, buffers, ahead, pid, layer, trace, eps, shape, tiles):
    """act = silu(W_gate @ h) * (W_up @ h) with h = rms_norm(mid)."""
    N: tl.constexpr = shape.FFN
    BLOCK_N: tl.constexpr = tiles.GATE_UP_N
    BLOCK_K: tl.constexpr = tiles.GATE_UP_K
    rows, norm = ahead
    mid_ptr = buffers.mid + layer * trace * shape.HIDDEN
    mid = load_halves(mid_ptr, shape.HIDDEN, BLOCK_K, tiles.NUM_WARPS)
    h = rms_norm(mid, norm, eps, shape.HIDDEN)
    act_ptr = buffers.act + layer * trace * N
    for i in tl.static_range(triton.cdiv(N, BLOCK_N * tiles.PROGRAMS)):
        block = pid + i * tiles.PROGRAMS
        gate, up = rows
        if (i + 1) * tiles.PROGRAMS * BLOCK_N < N:
            rows = _gate_up_rows(weights, block + tiles.PROGRAMS, layer, shape, tiles)
        # One reduction for both halves its barriers.
        both = tl.join(products(gate, h), products(up, h))
        g, u = tl.split(tl.sum(both, axis=2))
        act = g / (1.0 + tl.exp(-g)) * u
        store_block(act_ptr, act, block, N, BLOCK_N, BLOCK_K, tiles.NUM_WARPS, tiles.PROGRAMS)


@triton.jit
def down_proj_ahead(weights, buffers, pid, layer, trace, shape, tiles):
    """First block of down weights and the residual rows that it is added to."""
    N: tl.constexpr = shape.HIDDEN
    K: tl.constexpr = shape.FFN
    BLOCK_N: tl.constexpr = tiles.DOWN_N
    BLOCK_K: tl.constexpr = tiles.DOWN_K
    NUM_WARPS: tl.constexpr = tiles.NUM_WARPS
    w_ptr = weights.down + layer.to(tl.int64) * (N * K // 2)
    rows = load_rows(w_ptr, pid, N, K, BLOCK_N, BLOCK_K, NUM_WARPS, tiles.PROGRAMS)
    mid_ptr = buffers.mid + layer * trace * N
    residual = ()
    for i in tl.static_range(triton.cdiv(N, BLOCK_N * tiles.PROGRAMS)):
        block = pid + i * tiles.PROGRAMS
        residual = residual + (
            load_block(mid_ptr, block, N, BLOCK_N, BLOCK_K, NUM_WARPS, tiles.PROGRAMS),
        )
    return rows, residual


@triton.jit
def down_proj(weights, buffers, ahead, pid, layer, trace, shape, tiles):
    """x = mid + W_down @ act."""
    N: tl.constexpr = shape.HIDDEN
    K: tl.constexpr = shape.FFN
    rows, residual = ahead
    matvec(
        weights.down + layer.to(tl.int64) * (N * K // 2),
        load_halves(buffers.act + layer * trace * K, K, tiles.DOWN_K, tiles.NUM_WARPS),
        rows,
        residual,
        buffers.x + layer * trace * N,
        pid,
        N,
        K,
        tiles.DOWN_N,
        tiles.DOWN_K,
        tiles.NUM_WARPS,
        tiles.PROGRAMS,
    )


@triton.jit
def lm_head_ahead(weights, pid, shape, tiles):
    """First block of head weights and the final norm's weights."""
    N: tl.constexpr = shape.VOCAB
    K: tl.constexpr = shape.HIDDEN
    BLOCK_K: tl.constexpr = tiles.HEAD_K
    rows = load_rows(
        weights.lm_head, pid, N, K, tiles.HEAD_N, BLOCK_K, tiles.NUM_WARPS, tiles.PROGRAMS
    )
    return rows, load_halves(weights.norm, K, BLOCK_K, tiles.NUM_WARPS)


@triton.jit
def lm_head(weights, steps, buffers, ahead, pid, step, trace, eps, shape, tiles):
    """hidden = rms_norm(x) of the last layer's output; logits = W_head @ hidden."""
    K: tl.constexpr = shape.HIDDEN
    BLOCK_K: tl.constexpr = tiles.HEAD_K
    rows, norm = ahead
    x_ptr = buffers.x + (shape.LAYERS - 1) * trace * K
    x = load_halves(x_ptr, K, BLOCK_K, tiles.NUM_WARPS)
    hidden = rms_norm(x, norm, eps, K)
    if pid == 0:
        offs = half_offsets(BLOCK_K, tiles.NUM_WARPS)
        for i in tl.static_range(len(hidden)):
            low, high = hidden[i]
            mask = offs < K // 2 - i * BLOCK_K // 2
            out_ptr = steps.hidden + step * K + i * BLOCK_K // 2
            tl.store(out_ptr + offs, low, mask=mask)
            tl.store(out_ptr + K // 2 + offs, high, mask=mask)
    matvec(
        weights.lm_head,
        hidden,
        rows,
        (),
        steps.logits + step * shape.VOCAB,
        pid,
        shape.VOCAB,
        K,
        tiles.HEAD_N,
        BLOCK_K,
        tiles.NUM_WARPS,
        tiles.PROGRAMS,
    )

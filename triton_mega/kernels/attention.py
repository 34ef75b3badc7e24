"""One decode step of attention, split over the cache rows (split-KV).

An item is one K/V head and one split of its rows. Each item normalises and rotates the query heads
of its group and the new key (redundantly: no barrier is needed for it), attends to its rows and
stores a partial result; whoever needs the attention vector combines the partials itself.

Numerics: fp32 throughout; K and V are bf16 in the cache and the newest row is rounded before use.
Softmax is online over tiles for each of a tile's ATTENTION_T rows, then a tree over those rows,
then over splits in split order.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOWEST = tl.constexpr(-1e30)  # a score below every real one that keeps exp and max free of NaN


@triton.jit
def round_to_bf16(x):
    """The nearest bf16 values (ties to even) of fp32 ``x``, still fp32.

    In integers because the interpreter's own cast truncates. A NaN stays one: that of a GPU has all
    bits set, and rounding would carry it over to zero.
    """
    bits = x.to(tl.int32, bitcast=True)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536
    return tl.where(x == x, rounded, 0x7FC00000).to(tl.float32, bitcast=True)


@triton.jit
def split_rows(num_rows, ATTENTION_T: tl.constexpr, SPLITS: tl.constexpr):
    """Rows per split: whole tiles, spread over as many of the splits as there are tiles."""
    return tl.cdiv(tl.cdiv(num_rows, ATTENTION_T), SPLITS) * ATTENTION_T


@triton.jit
def item_place(item, position, layer, max_positions, shape, tiles):
    """An item's place: K/V head, split, its first row, the row past its last, the head's row 0."""
    num_rows = position + 1
    rows = split_rows(num_rows, tiles.ATTENTION_T, tiles.SPLITS)
    head = item % shape.KV_HEADS
    split = item // shape.KV_HEADS
    start = split * rows
    stop = tl.minimum(start + rows, num_rows)
    if item >= shape.KV_HEADS * tiles.SPLITS:
        stop = start
    kv_row = (layer.to(tl.int64) * shape.KV_HEADS + head) * max_positions
    return head, split, start, stop, kv_row


@triton.jit
def load_kv_tile(cache, kv_row, start, stop, shape, ATTENTION_T: tl.constexpr):
    """Cached K and V rows ``start`` to ``stop`` - 1, [1, ATTENTION_T, HD] bf16, zero elsewhere."""
    offs_t = tl.arange(0, ATTENTION_T)[None, :, None]
    offs_d = tl.arange(0, shape.HEAD_DIM)[None, None, :]
    tile = (kv_row + start) * shape.HEAD_DIM
    offs = offs_t * shape.HEAD_DIM + offs_d
    mask = offs_t < stop - start
    k = tl.load(cache.k + tile + offs, mask=mask, other=0.0)
    return k, tl.load(cache.v + tile + offs, mask=mask, other=0.0)


@triton.jit
def load_cached_tile(cache, place, position, shape, tiles):
    """An item's first K and V tile: the rows before ``position``, known before the barrier."""
    head, split, start, stop, kv_row = place
    stop = tl.minimum(stop, position)
    return load_kv_tile(cache, kv_row, start, stop, shape, tiles.ATTENTION_T)


@triton.jit
def load_rotary(weights, cache, layer, position, shape):
    """What head norm and rope need and no barrier produces, each [1, 1, HD] fp32.

    Returns the norm weights of queries and of keys, each with those of the element that rotates
    into it, and cos and signed sin.
    """
    HD: tl.constexpr = shape.HEAD_DIM
    offs_d = tl.arange(0, HD)[None, None, :]
    partner = (offs_d + HD // 2) % HD
    q_ptr = weights.q_norm + layer * HD
    k_ptr = weights.k_norm + layer * HD
    q_norm = tl.load(q_ptr + offs_d).to(tl.float32), tl.load(q_ptr + partner).to(tl.float32)
    k_norm = tl.load(k_ptr + offs_d).to(tl.float32), tl.load(k_ptr + partner).to(tl.float32)
    row = position * (HD // 2) + offs_d % (HD // 2)
    sin = tl.load(cache.sin + row) * tl.where(offs_d < HD // 2, -1.0, 1.0)
    return q_norm, k_norm, tl.load(cache.cos + row), sin


@triton.jit
def load_rotated(head_ptr, mask, norm, cos, sin, eps, HD: tl.constexpr):
    """Heads at ``head_ptr`` ([G, 1, 1] pointers to [HD] fp32), normed and rotated: [G, 1, HD]."""
    offs_d = tl.arange(0, HD)[None, None, :]
    x = tl.load(head_ptr + offs_d, mask=mask, other=0.0)
    partner = tl.load(head_ptr + (offs_d + HD // 2) % HD, mask=mask, other=0.0)
    weight, partner_weight = norm
    rstd = tl.rsqrt(tl.sum(x * x, axis=2) / HD + eps)[:, :, None]
    return x * rstd * weight * cos + partner * rstd * partner_weight * sin


@triton.jit
def attend(
    qkv_ptr,  # [(HQ + 2 HKV) * HD] fp32
    cache,
    partial_ptr,  # [S, HQ, HD] fp32
    lse_ptr,  # [S, HQ] fp32
    k,
    v,  # the item's first tile, loaded ahead
    rotary,
    place,  # of the item, with at least one row
    position,
    eps,
    shape,
    tiles,
):
    """Attends one item to its rows; appends the new K and V row where it is the item's own.

    Tensors are [G, ATTENTION_T, HD]: query heads of the group, rows, elements. Every row of a tile
    has a softmax of its own over the tiles, so that only the end of an item sums over rows, which
    are spread over warps.
    """
    GROUP: tl.constexpr = shape.Q_HEADS // shape.KV_HEADS
    G: tl.constexpr = triton.next_power_of_2(GROUP)
    HD: tl.constexpr = shape.HEAD_DIM
    ATTENTION_T: tl.constexpr = tiles.ATTENTION_T
    q_norm, k_norm, cos, sin = rotary
    head, split, start, stop, kv_row = place
    offs_g = tl.arange(0, G)[:, None, None]
    offs_d = tl.arange(0, HD)[None, None, :]
    q_ptr = qkv_ptr + (head * GROUP + offs_g) * HD
    k_ptr = qkv_ptr + (shape.Q_HEADS + head + tl.zeros([1, 1, 1], tl.int32)) * HD
    q = load_rotated(q_ptr, offs_g < GROUP, q_norm, cos, sin, eps, HD) * HD**-0.5
    k_new = round_to_bf16(load_rotated(k_ptr, offs_d >= 0, k_norm, cos, sin, eps, HD))
    v_new = round_to_bf16(tl.load(k_ptr + (shape.KV_HEADS * HD + offs_d)))
    if stop == position + 1:
        new_row = (kv_row + position) * HD + offs_d
        tl.store(cache.k + new_row, k_new.to(tl.bfloat16))
        tl.store(cache.v + new_row, v_new.to(tl.bfloat16))

    top = tl.full([G, ATTENTION_T], LOWEST, tl.float32)
    total = tl.zeros([G, ATTENTION_T], tl.float32)
    acc = tl.zeros([G, ATTENTION_T, HD], tl.float32)
    for tile in range(start, stop, ATTENTION_T):
        cached = tl.minimum(stop, position)
        next_k, next_v = load_kv_tile(cache, kv_row, tile + ATTENTION_T, cached, shape, ATTENTION_T)
        offs_t = tile + tl.arange(0, ATTENTION_T)[None, :]
        is_new = (offs_t == position)[:, :, None]
        k_tile = tl.where(is_new, k_new, k.to(tl.float32))
        v_tile = tl.where(is_new, v_new, v.to(tl.float32))
        scores = tl.where(offs_t < stop, tl.sum(k_tile * q, axis=2), LOWEST)
        new_top = tl.maximum(top, scores)
        scale = tl.exp(top - new_top)
        p = tl.exp(scores - new_top)
        total = total * scale + p
        acc = acc * scale[:, :, None] + p[:, :, None] * v_tile
        top = new_top
        k = next_k
        v = next_v
    best = tl.max(top, axis=1)
    weight = tl.exp(top - best[:, None])
    total = tl.sum(total * weight, axis=1)
    out = tl.sum(acc * weight[:, :, None], axis=1) / total[:, None]
    offs_g = tl.arange(0, G)
    place = split * shape.Q_HEADS + head * GROUP + offs_g
    out_ptrs = partial_ptr + (place[:, None] * HD + tl.arange(0, HD)[None, :])
    tl.store(out_ptrs, out, mask=(offs_g < GROUP)[:, None])
    tl.store(lse_ptr + place, best + tl.log(total), mask=offs_g < GROUP)


@triton.jit
def combine_splits(
    partial_ptr,  # [S, HQ, HD] fp32
    lse_ptr,  # [S, HQ] fp32
    position,
    shape,
    tiles,
):
    """The attention vector in two halves, each [HALF * HD] fp32 with zeros past HQ / 2 heads.

    HALF is half the query heads, rounded up to a power of two.
    """
    HEADS: tl.constexpr = shape.Q_HEADS // 2
    HALF: tl.constexpr = triton.next_power_of_2(HEADS)
    HD: tl.constexpr = shape.HEAD_DIM
    num_rows = position + 1
    rows = split_rows(num_rows, tiles.ATTENTION_T, tiles.SPLITS)
    num_splits = tl.cdiv(num_rows, rows)
    slot = tl.arange(0, 2 * HALF)[:, None]
    head = slot // HALF * HEADS + slot % HALF
    offs_d = tl.arange(0, HD)[None, None, :]
    top = tl.full([2 * HALF], LOWEST, tl.float32)
    total = tl.zeros([2 * HALF], tl.float32)
    acc = tl.zeros([2 * HALF, HD], tl.float32)
    # Splits in the middle axis stay within a thread: no reduction here crosses a warp.
    offs_s = tl.arange(0, tiles.SPLITS_AT_ONCE)[None, :]
    for first in range(0, num_splits, tiles.SPLITS_AT_ONCE):
        mask = (offs_s < num_splits - first) & (slot % HALF < HEADS)
        row_ptr = lse_ptr + first * shape.Q_HEADS
        lse = tl.load((row_ptr + head) + offs_s * shape.Q_HEADS, mask=mask, other=LOWEST)
        row_ptr = partial_ptr + first * (shape.Q_HEADS * HD)
        part_ptrs = (row_ptr + (head[:, :, None] * HD + offs_d)) + offs_s[:, :, None] * (
            shape.Q_HEADS * HD
        )
        part = tl.load(part_ptrs, mask=mask[:, :, None], other=0.0)
        new_top = tl.maximum(top, tl.max(lse, axis=1))
        scale = tl.exp(top - new_top)
        p = tl.exp(lse - new_top[:, None])
        total = total * scale + tl.sum(p, axis=1)
        acc = acc * scale[:, None] + tl.sum(p[:, :, None] * part, axis=1)
        top = new_top
    halves = tl.reshape(acc / total[:, None], [2, HALF * HD])
    return tl.split(tl.permute(halves, (1, 0)))

"""One decode step of attention, split over the cache rows (split-KV).

An item is one K/V head and one split of its rows. Each item normalises and rotates the query heads
of its group and the new key (redundantly: no barrier is needed for it), attends to its rows and
stores a partial result; whoever needs the attention vector combines the partials itself.

Numerics: fp32 throughout; K and V are bf16 in the cache and the newest row is rounded before use.
Softmax is online over tiles of ATTENTION_T rows in row order, then over splits in split order.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOWEST = tl.constexpr(-1e30)  # a score below every real one that keeps exp and max free of NaN


@triton.jit
def round_to_bf16(x):
    """The nearest bf16 values (ties to even) of fp32 ``x``, still fp32.

    In integers because the interpreter's own cast truncates.
    """
    bits = x.to(tl.int32, bitcast=True)
    bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536
    return bits.to(tl.float32, bitcast=True)


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
    """Cached K and V rows ``start`` to ``stop`` - 1, [ATTENTION_T, HD] bf16, zero elsewhere."""
    offs_t = tl.arange(0, ATTENTION_T)[:, None]
    offs_d = tl.arange(0, shape.HEAD_DIM)[None, :]
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
def load_rotary(weights, cache, layer, position, shape, ROWS: tl.constexpr):
    """What head norm and rope need and no barrier produces.

    Returns the norm weights of query and key rows and of each one's rotation partner, [ROWS, HD],
    and cos and signed sin, [1, HD].
    """
    GROUP: tl.constexpr = shape.Q_HEADS // shape.KV_HEADS
    HALF: tl.constexpr = shape.HEAD_DIM // 2
    is_q = (tl.arange(0, ROWS) < GROUP)[:, None]
    offs_d = tl.arange(0, shape.HEAD_DIM)[None, :]
    partner = (offs_d + HALF) % shape.HEAD_DIM
    q_norm = weights.q_norm + layer * shape.HEAD_DIM
    k_norm = weights.k_norm + layer * shape.HEAD_DIM
    norm = tl.where(is_q, tl.load(q_norm + offs_d), tl.load(k_norm + offs_d))
    partner_norm = tl.where(is_q, tl.load(q_norm + partner), tl.load(k_norm + partner))
    row = position * HALF + offs_d % HALF
    sign = tl.where(offs_d < HALF, -1.0, 1.0)
    sin = tl.load(cache.sin + row) * sign
    return norm.to(tl.float32), partner_norm.to(tl.float32), tl.load(cache.cos + row), sin


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
    ROWS: tl.constexpr,
):
    """Attends one item to its rows; appends the new K and V row where it is the item's own."""
    GROUP: tl.constexpr = shape.Q_HEADS // shape.KV_HEADS
    HD: tl.constexpr = shape.HEAD_DIM
    ATTENTION_T: tl.constexpr = tiles.ATTENTION_T
    norm, partner_norm, cos, sin = rotary
    head, split, start, stop, kv_row = place
    offs_r = tl.arange(0, ROWS)[:, None]
    offs_d = tl.arange(0, HD)
    # Rows 0 to GROUP - 1 are this head's queries, row GROUP its key.
    row = tl.where(offs_r < GROUP, head * GROUP + offs_r, shape.Q_HEADS + head)
    used = offs_r <= GROUP
    qk_ptrs = qkv_ptr + row * HD
    qk = tl.load(qk_ptrs + offs_d[None, :], mask=used, other=0.0)
    partner = tl.load(qk_ptrs + ((offs_d + HD // 2) % HD)[None, :], mask=used, other=0.0)
    v_new = tl.load(qkv_ptr + (shape.Q_HEADS + shape.KV_HEADS + head) * HD + offs_d)
    rstd = tl.rsqrt(tl.sum(qk * qk, axis=1) / HD + eps)[:, None]
    qk = qk * rstd * norm * cos + partner * rstd * partner_norm * sin
    k_new = round_to_bf16(tl.sum(tl.where(offs_r == GROUP, qk, 0.0), axis=0))
    v_new = round_to_bf16(v_new)
    if stop == position + 1:
        new_row = (kv_row + position) * HD + offs_d
        tl.store(cache.k + new_row, k_new.to(tl.bfloat16))
        tl.store(cache.v + new_row, v_new.to(tl.bfloat16))

    qk *= HD**-0.5
    heads = ()
    for g in tl.static_range(GROUP):
        q = tl.sum(tl.where(offs_r == g, qk, 0.0), axis=0)
        top = tl.full([], LOWEST, tl.float32)
        heads = heads + ((q, top, 0.0, tl.zeros([HD], tl.float32)),)
    for tile in range(start, stop, ATTENTION_T):
        later = tile + ATTENTION_T
        cached = tl.minimum(stop, position)
        next_k, next_v = load_kv_tile(cache, kv_row, later, cached, shape, ATTENTION_T)
        offs_t = tile + tl.arange(0, ATTENTION_T)
        is_new = (offs_t == position)[:, None]
        k_tile = tl.where(is_new, k_new[None, :], k.to(tl.float32))
        v_tile = tl.where(is_new, v_new[None, :], v.to(tl.float32))
        updated = ()
        for g in tl.static_range(GROUP):
            q, top, total, acc = heads[g]
            scores = tl.sum(k_tile * q[None, :], axis=1)
            scores = tl.where(offs_t < stop, scores, LOWEST)
            new_top = tl.maximum(top, tl.max(scores, axis=0))
            scale = tl.exp(top - new_top)
            p = tl.exp(scores - new_top)
            total = total * scale + tl.sum(p, axis=0)
            acc = acc * scale + tl.sum(p[:, None] * v_tile, axis=0)
            updated = updated + ((q, new_top, total, acc),)
        heads = updated
        k = next_k
        v = next_v
    for g in tl.static_range(GROUP):
        q, top, total, acc = heads[g]
        out = split * shape.Q_HEADS + head * GROUP + g
        tl.store(partial_ptr + out * HD + offs_d, acc / total)
        tl.store(lse_ptr + out, top + tl.log(total))


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

"""Matrix-vector products with weights streamed through registers.

A program owns every ``PROGRAMS``-th block of ``BLOCK_N`` output rows. A block's weights are a tuple
of tiles; the first block is loaded by the caller ahead of the barrier that produces ``x``, every
later one while its predecessor is multiplied.

Weights are pairs (``weights.pair_columns``): one int32 holds columns ``j`` and ``j + K / 2`` of a
row as bf16, which widen to fp32 with one shift and one mask, and the matching elements of ``x`` are
two contiguous halves. Tiles have three axes, [G, BLOCK_N / G, BLOCK_K / 2], with one row group G
for each warp that the columns leave over; ``x`` is loaded with the same G, once per group, so that
every thread holds the elements that its columns need and nothing moves between threads before the
final reduction.

Numerics: products and sums in fp32. Over K: elementwise over the tiles of a row first, then a tree
within and across warps. The order depends on the tile shape only, never on timing.
"""

from __future__ import annotations

import triton
import triton.language as tl

from triton_mega import tuning

row_groups = triton.constexpr_function(tuning.row_groups)


@triton.jit
def half_offsets(BLOCK_K: tl.constexpr, NUM_WARPS: tl.constexpr):
    """Offsets of a chunk's elements within one half of x: [G, 1, BLOCK_K / 2], equal along G."""
    GROUPS: tl.constexpr = row_groups(BLOCK_K, NUM_WARPS)
    same = tl.zeros([GROUPS, 1, 1], tl.int32)
    return same + tl.arange(0, BLOCK_K // 2)[None, None, :]


@triton.jit
def load_halves(ptr, K: tl.constexpr, BLOCK_K: tl.constexpr, NUM_WARPS: tl.constexpr):
    """A vector [K] as a tuple of chunks, each its two halves' part, [G, 1, BLOCK_K / 2] fp32."""
    PAIRS: tl.constexpr = K // 2
    BLOCK_PAIRS: tl.constexpr = BLOCK_K // 2
    offs = half_offsets(BLOCK_K, NUM_WARPS)
    chunks = ()
    ptrs = ptr + offs
    for i in tl.static_range(triton.cdiv(K, BLOCK_K)):
        start = i * BLOCK_PAIRS
        if K % BLOCK_K == 0:
            low = tl.load(ptrs + start)
            high = tl.load(ptrs + (start + PAIRS))
        else:
            mask = offs < PAIRS - start
            low = tl.load(ptrs + start, mask=mask, other=0.0)
            high = tl.load(ptrs + (start + PAIRS), mask=mask, other=0.0)
        chunks = chunks + ((low.to(tl.float32), high.to(tl.float32)),)
    return chunks


@triton.jit
def block_offsets(BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, NUM_WARPS: tl.constexpr):
    """Row offsets within a block, [G, BLOCK_N / G]."""
    GROUPS: tl.constexpr = row_groups(BLOCK_K, NUM_WARPS)
    ROWS: tl.constexpr = BLOCK_N // GROUPS
    tl.static_assert(ROWS * GROUPS == BLOCK_N, "a block needs a row for each row group")
    return tl.arange(0, GROUPS)[:, None] * ROWS + tl.arange(0, ROWS)[None, :]


@triton.jit
def load_rows(
    w_ptr,  # [N, K / 2] int32
    block,
    N: tl.constexpr,
    K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    NUM_WARPS: tl.constexpr,
    PROGRAMS: tl.constexpr,
):
    """Rows of ``block`` as a tuple of [G, BLOCK_N / G, BLOCK_K / 2] int32 tiles; zero past N, K.

    A program that has run out of blocks gets the last one again: no mask, no memory traffic beyond
    L2, and ``store_block`` drops the result.
    """
    PAIRS: tl.constexpr = K // 2
    BLOCK_PAIRS: tl.constexpr = BLOCK_K // 2
    GROUPS: tl.constexpr = row_groups(BLOCK_K, NUM_WARPS)
    ROWS: tl.constexpr = BLOCK_N // GROUPS
    group = tl.arange(0, GROUPS)[:, None, None]
    row = tl.arange(0, ROWS)[None, :, None]
    offs_k = tl.arange(0, BLOCK_PAIRS)[None, None, :]
    if N % (BLOCK_N * PROGRAMS) != 0:
        block = tl.minimum(block, triton.cdiv(N, BLOCK_N) - 1)
    # What only differs between a thread's registers is added last: it becomes an immediate offset.
    offs = block * (BLOCK_N * PAIRS) + group * (ROWS * PAIRS) + offs_k
    ptrs = (w_ptr + offs) + row * PAIRS
    tiles = ()
    for i in tl.static_range(triton.cdiv(K, BLOCK_K)):
        if N % BLOCK_N == 0 and K % BLOCK_K == 0:
            tile = tl.load(ptrs + i * BLOCK_PAIRS, eviction_policy="evict_first")
        else:
            rows_left = N - block * BLOCK_N - group * ROWS
            mask = (row < rows_left) & (offs_k < PAIRS - i * BLOCK_PAIRS)
            tile = tl.load(
                ptrs + i * BLOCK_PAIRS, mask=mask, other=0, eviction_policy="evict_first"
            )
        tiles = tiles + (tile,)
    return tiles


@triton.jit
def products(tiles, x):
    """Elementwise products of a block with ``x``, halves and tiles summed.

    Returns [G, BLOCK_N / G, BLOCK_K / 2] fp32; its sum over the last axis is the block of w @ x.
    """
    low, high = x[0]
    acc = _low(tiles[0]) * low + _high(tiles[0]) * high
    for i in tl.static_range(1, len(tiles)):
        low, high = x[i]
        acc += _low(tiles[i]) * low
        acc += _high(tiles[i]) * high
    return acc


@triton.jit
def _low(pairs):
    return (pairs << 16).to(tl.float32, bitcast=True)


@triton.jit
def _high(pairs):
    return (pairs & -65536).to(tl.float32, bitcast=True)


@triton.jit
def load_block(
    ptr,  # [N] fp32
    block,
    N: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    NUM_WARPS: tl.constexpr,
    PROGRAMS: tl.constexpr,
):
    """Elements of ``block``, [G, BLOCK_N / G] as a product's sums come out; zero past N."""
    offs_n = block_offsets(BLOCK_N, BLOCK_K, NUM_WARPS)
    ptrs = ptr + (block * BLOCK_N + offs_n)
    if N % (BLOCK_N * PROGRAMS) == 0:
        return tl.load(ptrs)
    else:
        return tl.load(ptrs, mask=offs_n < N - block * BLOCK_N, other=0.0)


@triton.jit
def store_block(
    ptr,  # [N] fp32
    y,  # [G, BLOCK_N / G] fp32
    block,
    N: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    NUM_WARPS: tl.constexpr,
    PROGRAMS: tl.constexpr,
):
    """Stores the elements of ``block``."""
    offs_n = block_offsets(BLOCK_N, BLOCK_K, NUM_WARPS)
    ptrs = ptr + (block * BLOCK_N + offs_n)
    if N % (BLOCK_N * PROGRAMS) == 0:
        tl.store(ptrs, y)
    else:
        tl.store(ptrs, y, mask=offs_n < N - block * BLOCK_N)


@triton.jit
def matvec(
    w_ptr,  # [N, K / 2] int32
    x,  # tuple of ([G, 1, BLOCK_K / 2], [G, 1, BLOCK_K / 2]) fp32
    tiles,  # rows of block pid, loaded ahead
    addends,  # what each of the program's blocks is added to ([G, BLOCK_N / G] fp32 each), or ()
    out_ptr,  # [N] fp32
    pid,
    N: tl.constexpr,
    K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    NUM_WARPS: tl.constexpr,
    PROGRAMS: tl.constexpr,
):
    """Stores this program's rows of ``w @ x``, plus ``addends`` where given."""
    for i in tl.static_range(triton.cdiv(N, BLOCK_N * PROGRAMS)):
        block = pid + i * PROGRAMS
        current = tiles
        if (i + 1) * PROGRAMS * BLOCK_N < N:
            later = block + PROGRAMS
            tiles = load_rows(w_ptr, later, N, K, BLOCK_N, BLOCK_K, NUM_WARPS, PROGRAMS)
        y = tl.sum(products(current, x), axis=2)
        if len(addends) > 0:
            y += addends[i]
        store_block(out_ptr, y, block, N, BLOCK_N, BLOCK_K, NUM_WARPS, PROGRAMS)

"""Kernels that only read memory: how fast this chip can, with plain loads and with bulk copies.

Each adds up the words it reads, so that no load can be removed and the sum shows that all of them
took place. Knows nothing about timing (``bench.py``).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

# Triton 3.6 has the older names only, 3.9 the newer ones only.
cta_barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier
bulk_copy = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared

BULK_CAPABILITY = (9, 0)
"""Oldest compute capability with bulk copies into shared memory."""

LOAD_BLOCK = 8192
LOAD_WARPS = 8
BULK_ROWS = 64
BULK_COLUMNS = 128
BULK_WARPS = 4
BULK_LAYOUT = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=32, rank=2)


@triton.jit
def read_loads_kernel(
    words_ptr,  # [num_words] int32
    sums_ptr,  # [P] int32
    num_words,
    BLOCK: tl.constexpr,
):
    """Sums the blocks ``pid``, ``pid + P``, ... of ``words`` (modulo 2^32) into ``sums[pid]``.

    A block is loaded while the one before it is added.
    """
    pid = tl.program_id(0)
    stride = tl.num_programs(0) * BLOCK
    offs = tl.arange(0, BLOCK)
    acc = tl.zeros([BLOCK], tl.int32)
    block = tl.load(words_ptr + pid * BLOCK + offs, mask=offs < num_words - pid * BLOCK, other=0)
    for start in range(pid * BLOCK, num_words, stride):
        later = start + stride
        ahead = tl.load(words_ptr + later + offs, mask=offs < num_words - later, other=0)
        acc += block
        block = ahead
    tl.store(sums_ptr + pid, tl.sum(acc, axis=0))


@gluon.jit
def read_bulk_kernel(
    words,  # descriptor of [num_tiles * ROWS, COLUMNS] int32
    sums_ptr,  # [P] int32
    num_tiles,
    STAGES: gl.constexpr,
    num_warps: gl.constexpr,
):
    """Sums the tiles ``pid``, ``pid + P``, ... of ``words`` (modulo 2^32) into ``sums[pid]``.

    Tiles land in a ring of ``STAGES`` shared-memory buffers; a buffer is filled again as soon as
    every warp has read it.
    """
    ROWS: gl.constexpr = words.block_shape[0]
    COLUMNS: gl.constexpr = words.block_shape[1]
    TILE: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [num_warps, 1], [1, 0])
    ring = gl.allocate_shared_memory(gl.int32, [STAGES, ROWS, COLUMNS], words.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    pid = gl.program_id(0)
    programs = gl.num_programs(0)
    for first in gl.static_range(STAGES):
        mbarrier.init(full.index(first), count=1)
    # Nobody may wait on, or copy towards, a barrier that another warp still has to initialize.
    cta_barrier()
    for first in gl.static_range(STAGES):
        if pid + first * programs < num_tiles:
            mbarrier.expect(full.index(first), ROWS * COLUMNS * 4)
            row = (pid + first * programs) * ROWS
            bulk_copy(words, [row, 0], full.index(first), ring.index(first))
    acc = gl.zeros([ROWS, COLUMNS], gl.int32, layout=TILE)
    turn = 0
    for tile in range(pid, num_tiles, programs):
        stage = turn % STAGES
        mbarrier.wait(full.index(stage), (turn // STAGES) & 1)
        acc += ring.index(stage).load(TILE)
        cta_barrier()
        ahead = tile + STAGES * programs
        if ahead < num_tiles:
            mbarrier.expect(full.index(stage), ROWS * COLUMNS * 4)
            bulk_copy(words, [ahead * ROWS, 0], full.index(stage), ring.index(stage))
        turn += 1
    gl.store(sums_ptr + pid, gl.sum(gl.sum(acc, axis=1), axis=0))


def ring_bytes(stages: int) -> int:
    """Shared memory of a bulk read's program: tiles, their barriers, and room to align them."""
    return stages * (BULK_ROWS * BULK_COLUMNS * 4 + 8) + 1024


def read_loads(
    words: torch.Tensor,  # [num_words] int32
    sums: torch.Tensor,  # [P] int32, overwritten
) -> None:
    """Reads ``words`` once with plain loads of 16 bytes, ``sums.numel()`` programs."""
    grid = (sums.numel(),)
    read_loads_kernel[grid](words, sums, words.numel(), LOAD_BLOCK, num_warps=LOAD_WARPS)


def read_bulk(
    words: torch.Tensor,  # [num_tiles * BULK_ROWS * BULK_COLUMNS] int32
    sums: torch.Tensor,  # [P] int32, overwritten
    stages: int,
) -> None:
    """Reads ``words`` once with bulk copies, ``sums.numel()`` programs with a ring each.

    Args:
        stages: buffers of the ring, 32 KiB each; all are in flight.

    Raises:
        ValueError: ``words`` is not a whole number of tiles.
    """
    num_tiles, rest = divmod(words.numel(), BULK_ROWS * BULK_COLUMNS)
    if rest:
        raise ValueError(
            f"words: expected a multiple of {BULK_ROWS * BULK_COLUMNS}, got {words.numel()}"
        )
    tiles = words.view(-1, BULK_COLUMNS)
    descriptor = TensorDescriptor.from_tensor(tiles, [BULK_ROWS, BULK_COLUMNS], BULK_LAYOUT)
    read_bulk_kernel[(sums.numel(),)](descriptor, sums, num_tiles, stages, num_warps=BULK_WARPS)

"""The persistent kernel: every stage of every layer of ``n_steps`` decode steps in one launch.

The grid must be resident as a whole (cooperative launch). Between two stages a program arrives at
the barrier, loads the next stage's first weights, and only then waits. Knows nothing about how its
buffers are allocated or which tuning is good.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from triton_mega.kernels.stages import (
    attention,
    attention_ahead,
    down_proj,
    down_proj_ahead,
    gate_up_proj,
    gate_up_proj_ahead,
    lm_head,
    lm_head_ahead,
    o_proj,
    o_proj_ahead,
    qkv_proj,
    qkv_proj_ahead,
)
from triton_mega.kernels.sync import BASE, arrive, finish, wait

REGISTERS_PER_SM = 65536
MOST_REGISTERS = 255

STEP_ARGUMENTS = ("n_steps", "position", "max_positions", "trace", "spin_limit")


@triton.jit
def program_id(index):
    """This program's number, in a form that the compiler cannot tell is the same at every barrier.

    What a stage derives from it is computed where it is needed, instead of once for all layers and
    kept in registers that the weights need.
    """
    return tl.program_id(0) + (index >> 30)


@triton.jit(do_not_specialize=list(STEP_ARGUMENTS))
def decode_persistent_kernel(
    weights,
    cache,
    buffers,
    steps,
    sync_ptr,  # [SYNC_WORDS] int32
    n_steps,
    position,  # of the first step
    max_positions,  # rows of the cache
    trace,  # 1: keep every layer's stage outputs (n_steps must be 1), 0: do not
    spin_limit,
    eps,
    shape,
    tiles,
    JITTER: tl.constexpr,
):
    """Decodes ``n_steps`` embedding rows: hidden states and logits out, K/V appended."""
    PROGRAMS: tl.constexpr = tiles.PROGRAMS
    pid = tl.program_id(0)
    base = tl.load(sync_ptr + BASE, volatile=True)
    index = 0
    alive = True
    step = 0
    while (step < n_steps) & alive:
        layer = 0
        while (layer < shape.LAYERS) & alive:
            pid = program_id(index)
            ahead = qkv_proj_ahead(weights, pid, layer, shape, tiles)
            alive = wait(sync_ptr, base, pid, index, alive, spin_limit, PROGRAMS, JITTER)
            qkv_proj(weights, steps, buffers, ahead, pid, step, layer, trace, eps, shape, tiles)
            index = arrive(sync_ptr, pid, index, JITTER)

            kv = attention_ahead(weights, cache, pid, position, layer, max_positions, shape, tiles)
            alive = wait(sync_ptr, base, pid, index, alive, spin_limit, PROGRAMS, JITTER)
            attention(
                cache, buffers, kv, pid, position, layer, trace, max_positions, eps, shape, tiles
            )
            index = arrive(sync_ptr, pid, index, JITTER)

            ahead = o_proj_ahead(weights, steps, buffers, pid, step, layer, trace, shape, tiles)
            alive = wait(sync_ptr, base, pid, index, alive, spin_limit, PROGRAMS, JITTER)
            o_proj(weights, buffers, ahead, pid, position, layer, trace, shape, tiles)
            index = arrive(sync_ptr, pid, index, JITTER)

            ahead = gate_up_proj_ahead(weights, pid, layer, shape, tiles)
            alive = wait(sync_ptr, base, pid, index, alive, spin_limit, PROGRAMS, JITTER)
            gate_up_proj(weights, buffers, ahead, pid, layer, trace, eps, shape, tiles)
            index = arrive(sync_ptr, pid, index, JITTER)

            ahead = down_proj_ahead(weights, buffers, pid, layer, trace, shape, tiles)
            alive = wait(sync_ptr, base, pid, index, alive, spin_limit, PROGRAMS, JITTER)
            down_proj(weights, buffers, ahead, pid, layer, trace, shape, tiles)
            index = arrive(sync_ptr, pid, index, JITTER)
            layer += 1

        pid = program_id(index)
        ahead = lm_head_ahead(weights, pid, shape, tiles)
        alive = wait(sync_ptr, base, pid, index, alive, spin_limit, PROGRAMS, JITTER)
        lm_head(weights, steps, buffers, ahead, pid, step, trace, eps, shape, tiles)
        step += 1
        position += 1
    finish(sync_ptr, base, pid, index, alive, PROGRAMS)


def launch_options(num_warps: int) -> dict[str, Any]:
    """Compile and launch options of the persistent kernel.

    A program has a multiprocessor to itself: without ``maxnreg`` the assembler may keep registers
    free for a second one, and spill.
    """
    return {
        "num_warps": num_warps,
        "maxnreg": min(REGISTERS_PER_SM // (32 * num_warps), MOST_REGISTERS),
        "enable_fp_fusion": True,
        "launch_cooperative_grid": True,
    }

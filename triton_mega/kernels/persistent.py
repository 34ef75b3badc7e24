"""The persistent kernel: every stage of every layer of ``n_steps`` decode steps in one launch.

The grid must be resident as a whole (cooperative launch). Between two stages a program arrives at
the barrier, loads the next stage's first weights, and only then waits. Knows nothing about how its
buffers are allocated or which tuning is good.
"""

from __future__ import annotations

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

STEP_ARGUMENTS = ("n_steps", "position", "max_positions", "trace", "spin_limit")


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

        ahead = lm_head_ahead(weights, pid, shape, tiles)
        alive = wait(sync_ptr, base, pid, index, alive, spin_limit, PROGRAMS, JITTER)
        lm_head(weights, steps, buffers, ahead, pid, step, trace, eps, shape, tiles)
        step += 1
        position += 1
    finish(sync_ptr, base, pid, index, alive, PROGRAMS)

"""One kernel per stage: the same device functions as the persistent kernel, launch boundaries
instead of grid barriers. Runs at any grid, in the interpreter too.
"""

from __future__ import annotations

import triton
import triton.language as tl

from triton_mega.kernels import stages


@triton.jit(do_not_specialize=["layer", "position", "max_positions", "trace"])
def qkv_proj_kernel(
    weights, cache, buffers, steps, layer, position, max_positions, trace, eps, shape, tiles
):
    """Stage qkv_proj of one layer."""
    pid = tl.program_id(0)
    ahead = stages.qkv_proj_ahead(weights, pid, layer, shape, tiles)
    stages.qkv_proj(weights, steps, buffers, ahead, pid, 0, layer, trace, eps, shape, tiles)


@triton.jit(do_not_specialize=["layer", "position", "max_positions", "trace"])
def attention_kernel(
    weights, cache, buffers, steps, layer, position, max_positions, trace, eps, shape, tiles
):
    """Stage attention of one layer."""
    pid = tl.program_id(0)
    ahead = stages.attention_ahead(
        weights, cache, pid, position, layer, max_positions, shape, tiles
    )
    stages.attention(
        cache, buffers, ahead, pid, position, layer, trace, max_positions, eps, shape, tiles
    )


@triton.jit(do_not_specialize=["layer", "position", "max_positions", "trace"])
def o_proj_kernel(
    weights, cache, buffers, steps, layer, position, max_positions, trace, eps, shape, tiles
):
    """Stage o_proj of one layer."""
    pid = tl.program_id(0)
    ahead = stages.o_proj_ahead(weights, steps, buffers, pid, 0, layer, trace, shape, tiles)
    stages.o_proj(weights, buffers, ahead, pid, position, layer, trace, shape, tiles)


@triton.jit(do_not_specialize=["layer", "position", "max_positions", "trace"])
def gate_up_proj_kernel(
    weights, cache, buffers, steps, layer, position, max_positions, trace, eps, shape, tiles
):
    """Stage gate_up_proj of one layer."""
    pid = tl.program_id(0)
    ahead = stages.gate_up_proj_ahead(weights, pid, layer, shape, tiles)
    stages.gate_up_proj(weights, buffers, ahead, pid, layer, trace, eps, shape, tiles)


@triton.jit(do_not_specialize=["layer", "position", "max_positions", "trace"])
def down_proj_kernel(
    weights, cache, buffers, steps, layer, position, max_positions, trace, eps, shape, tiles
):
    """Stage down_proj of one layer."""
    pid = tl.program_id(0)
    ahead = stages.down_proj_ahead(weights, buffers, pid, layer, trace, shape, tiles)
    stages.down_proj(weights, buffers, ahead, pid, layer, trace, shape, tiles)


@triton.jit(do_not_specialize=["layer", "position", "max_positions", "trace"])
def lm_head_kernel(
    weights, cache, buffers, steps, layer, position, max_positions, trace, eps, shape, tiles
):
    """Stage lm_head: final norm and output head."""
    pid = tl.program_id(0)
    ahead = stages.lm_head_ahead(weights, pid, shape, tiles)
    stages.lm_head(weights, steps, buffers, ahead, pid, 0, trace, eps, shape, tiles)


STAGE_KERNELS = {
    "qkv_proj": qkv_proj_kernel,
    "attention": attention_kernel,
    "o_proj": o_proj_kernel,
    "gate_up_proj": gate_up_proj_kernel,
    "down_proj": down_proj_kernel,
    "lm_head": lm_head_kernel,
}
"""Kernel of each stage, in order; all take the same arguments."""

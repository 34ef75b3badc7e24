"""Kernel arguments in named groups, so that a call site reads like the model.

Fields in capitals are compile-time constants. Pointer groups are built by
``backends/triton_common.py``, which owns the tensors.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton.language as tl

Pointer = Any


class Shape(NamedTuple):
    """A ``DecoderSpec`` as compile-time constants."""

    LAYERS: tl.constexpr
    HIDDEN: tl.constexpr
    FFN: tl.constexpr
    Q_HEADS: tl.constexpr
    KV_HEADS: tl.constexpr
    HEAD_DIM: tl.constexpr
    VOCAB: tl.constexpr


class Tiles(NamedTuple):
    """A ``TuningConfig`` as compile-time constants. ``_N`` rows and ``_K`` columns of a tile."""

    PROGRAMS: tl.constexpr
    NUM_WARPS: tl.constexpr
    QKV_N: tl.constexpr
    QKV_K: tl.constexpr
    O_N: tl.constexpr
    GATE_UP_N: tl.constexpr
    GATE_UP_K: tl.constexpr
    DOWN_N: tl.constexpr
    DOWN_K: tl.constexpr
    HEAD_N: tl.constexpr
    HEAD_K: tl.constexpr
    ATTENTION_T: tl.constexpr
    SPLITS: tl.constexpr
    SPLITS_AT_ONCE: tl.constexpr


class Weights(NamedTuple):
    """``DecoderWeights``, matrices as pairs of bf16; ``lm_head`` is the head in use."""

    input_norm: Pointer  # [L, D] bf16
    q_norm: Pointer  # [L, HD] bf16
    k_norm: Pointer  # [L, HD] bf16
    qkv: Pointer  # [L, (HQ + 2 HKV) * HD, D / 2] int32
    o: Pointer  # [L, D, HQ * HD / 2] int32
    post_attention_norm: Pointer  # [L, D] bf16
    gate_up: Pointer  # [L, 2 * F, D / 2] int32
    down: Pointer  # [L, D, F / 2] int32
    norm: Pointer  # [D] bf16
    lm_head: Pointer  # [V, D / 2] int32


class Cache(NamedTuple):
    """The K/V cache and the rotary tables of its rows."""

    k: Pointer  # [L, HKV, T, HD] bf16
    v: Pointer  # [L, HKV, T, HD] bf16
    cos: Pointer  # [T, HD / 2] fp32
    sin: Pointer  # [T, HD / 2] fp32


class Buffers(NamedTuple):
    """What stages hand to one another. A trace keeps one slot per layer, a run reuses slot 0."""

    x: Pointer  # [slots, D] fp32, residual stream after down_proj
    mid: Pointer  # [slots, D] fp32, residual stream after o_proj
    qkv: Pointer  # [slots, (HQ + 2 HKV) * HD] fp32
    partial: Pointer  # [S, HQ, HD] fp32, each split's attention output
    lse: Pointer  # [S, HQ] fp32, each split's log-sum-exp of the scores
    attention: Pointer  # [slots, HQ * HD] fp32, written in a trace only
    act: Pointer  # [slots, F] fp32, silu(gate) * up


class Steps(NamedTuple):
    """The decode steps of a launch: embedding rows in, hidden rows and logits out."""

    inputs_embeds: Pointer  # [n, D] bf16
    hidden: Pointer  # [n, D] fp32
    logits: Pointer  # [n, V] fp32

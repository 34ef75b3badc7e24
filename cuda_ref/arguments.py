"""The kernel's arguments in order, and how each is handed over.

``decode_kernel`` in decode.cu has the same names in the same order; a test compares the two.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping

import torch

POINTERS = (
    *("input_norm", "q_norm", "k_norm", "qkv_weight", "o_weight", "post_attention_norm"),
    *("gate_up_weight", "down_weight", "norm", "head_weight"),
    *("k_cache", "v_cache", "cos", "sin"),
    *("x", "mid", "qkv", "partial", "lse", "attention", "activation", "block_best", "sync_words"),
    *("inputs_embeds", "embedding", "first_token", "hidden", "logits", "next_tokens"),
)
INTEGERS = ("n_steps", "position", "max_positions", "trace", "spin_limit")
FLOATS = ("eps",)
ARGUMENTS = (*POINTERS, *INTEGERS, *FLOATS)

NULLABLE = ("inputs_embeds", "embedding", "first_token")
"""Pointers that may be null: a launch reads rows, or a table and its first row's number."""
ONE_BY_ONE = ("first_token", "logits", "next_tokens")
"""Pointers to what is read or written an element at a time; all others must be 16-byte aligned."""

Value = torch.Tensor | int | float | None
CValue = ctypes.c_uint64 | ctypes.c_int32 | ctypes.c_float


def pack(values: Mapping[str, Value]) -> dict[str, CValue]:
    """Returns some of the arguments as C values, by name. They do not keep tensors alive.

    Raises:
        ValueError: a name is unknown, or a value of another kind; names it.
    """
    packed: dict[str, CValue] = {}
    for name, value in values.items():
        if name in POINTERS:
            packed[name] = ctypes.c_uint64(_address(name, value))
        elif name in INTEGERS:
            if not isinstance(value, int) or not -(2**31) <= value < 2**31:
                raise ValueError(f"{name}: expected a 32-bit integer, got {value!r}")
            packed[name] = ctypes.c_int32(value)
        elif name in FLOATS:
            if not isinstance(value, float):
                raise ValueError(f"{name}: expected a float, got {value!r}")
            packed[name] = ctypes.c_float(value)
        else:
            raise ValueError(f"{name}: the kernel has no such argument")
    return packed


def in_order(packed: Mapping[str, CValue]) -> list[CValue]:
    """Returns all arguments in the kernel's order.

    Raises:
        ValueError: one is missing; names it.
    """
    if missing := [name for name in ARGUMENTS if name not in packed]:
        raise ValueError(f"arguments: {', '.join(missing)} missing")
    return [packed[name] for name in ARGUMENTS]


def _address(name: str, value: Value) -> int:
    if value is None and name in NULLABLE:
        return 0
    if not isinstance(value, torch.Tensor) or not value.is_contiguous():
        raise ValueError(f"{name}: expected a contiguous tensor, got {type(value).__name__}")
    if value.data_ptr() % 16 and name not in ONE_BY_ONE:
        raise ValueError(f"{name}: expected an address divisible by 16, got {value.data_ptr():#x}")
    return value.data_ptr()

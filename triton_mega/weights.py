"""Decoder weights as the kernels read them: stacked over layers, one tensor per stage.

Three sources give the same packing: a checkpoint's named tensors (``pack``), seeded random numbers
(``random_weights``) and hash weights (``hash_tensor``: a pure integer function of name and index,
so that a full-shape reference dump can be checked anywhere without moving gigabytes).
Knows nothing about files (``checkpoint.py``) or kernels.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields

import torch

from triton_mega.spec import DecoderSpec

PREFIX = {"talker": "talker", "code_predictor": "talker.code_predictor"}


@dataclass(frozen=True)
class DecoderWeights:
    """All tensors of one decoder stack, bf16, each contiguous. Linear weights are [out, in]."""

    input_norm: torch.Tensor  # [L, D]
    q_norm: torch.Tensor  # [L, HD]
    k_norm: torch.Tensor  # [L, HD]
    qkv: torch.Tensor  # [L, (HQ + 2 HKV) * HD, D], rows of q, then k, then v
    o: torch.Tensor  # [L, D, HQ * HD]
    post_attention_norm: torch.Tensor  # [L, D]
    gate_up: torch.Tensor  # [L, 2 * F, D], rows of gate, then up
    down: torch.Tensor  # [L, D, F]
    norm: torch.Tensor  # [D]
    lm_head: torch.Tensor  # [H, V, D]

    def check(self, spec: DecoderSpec) -> None:
        """Raises ValueError naming the first tensor that does not belong to ``spec``."""
        device = self.qkv.device
        for name, shape in packed_shapes(spec).items():
            tensor: torch.Tensor = getattr(self, name)
            ok = tensor.dtype == torch.bfloat16 and tensor.device == device
            if tuple(tensor.shape) != shape or not ok or not tensor.is_contiguous():
                raise ValueError(
                    f"weights.{name}: expected contiguous {list(shape)} bfloat16 on {device}, got "
                    f"{list(tensor.shape)} {tensor.dtype} on {tensor.device}; "
                    f"packed with another spec than this {spec.role}?"
                )

    def to(self, device: torch.device | str) -> DecoderWeights:
        """Returns the weights on another device (self where they are there already)."""
        moved = {f.name: getattr(self, f.name).to(device) for f in fields(self)}
        return DecoderWeights(**moved)


def packed_shapes(spec: DecoderSpec) -> dict[str, tuple[int, ...]]:
    """Shape of every tensor of ``DecoderWeights``, by field name."""
    layers, hidden, ffn = spec.num_hidden_layers, spec.hidden_size, spec.intermediate_size
    return {
        "input_norm": (layers, hidden),
        "q_norm": (layers, spec.head_dim),
        "k_norm": (layers, spec.head_dim),
        "qkv": (layers, spec.qkv_size, hidden),
        "o": (layers, hidden, spec.q_size),
        "post_attention_norm": (layers, hidden),
        "gate_up": (layers, 2 * ffn, hidden),
        "down": (layers, hidden, ffn),
        "norm": (hidden,),
        "lm_head": (spec.num_lm_heads, spec.vocab_size, hidden),
    }


def layer_parts(spec: DecoderSpec) -> dict[str, tuple[tuple[str, tuple[int, ...]], ...]]:
    """Checkpoint suffixes and shapes of one layer's tensors, by the packed tensor they stack to."""
    hidden, ffn, head = spec.hidden_size, spec.intermediate_size, spec.head_dim
    return {
        "input_norm": (("input_layernorm.weight", (hidden,)),),
        "q_norm": (("self_attn.q_norm.weight", (head,)),),
        "k_norm": (("self_attn.k_norm.weight", (head,)),),
        "qkv": (
            ("self_attn.q_proj.weight", (spec.q_size, hidden)),
            ("self_attn.k_proj.weight", (spec.kv_size, hidden)),
            ("self_attn.v_proj.weight", (spec.kv_size, hidden)),
        ),
        "o": (("self_attn.o_proj.weight", (hidden, spec.q_size)),),
        "post_attention_norm": (("post_attention_layernorm.weight", (hidden,)),),
        "gate_up": (
            ("mlp.gate_proj.weight", (ffn, hidden)),
            ("mlp.up_proj.weight", (ffn, hidden)),
        ),
        "down": (("mlp.down_proj.weight", (hidden, ffn)),),
    }


def lm_head_names(spec: DecoderSpec) -> list[str]:
    """Checkpoint names of the untied output heads, in order."""
    if spec.role == "talker":
        return ["talker.codec_head.weight"]
    return [f"talker.code_predictor.lm_head.{j}.weight" for j in range(spec.num_lm_heads)]


def decoder_shapes(spec: DecoderSpec) -> dict[str, tuple[int, ...]]:
    """Checkpoint name to shape of every tensor that one decoder stack is packed from."""
    prefix = PREFIX[spec.role]
    shapes = {
        f"{prefix}.model.layers.{layer}.{suffix}": shape
        for layer in range(spec.num_hidden_layers)
        for parts in layer_parts(spec).values()
        for suffix, shape in parts
    }
    shapes[f"{prefix}.model.norm.weight"] = (spec.hidden_size,)
    shapes |= {name: (spec.vocab_size, spec.hidden_size) for name in lm_head_names(spec)}
    return shapes


def pack(
    source: Callable[[str, tuple[int, ...]], torch.Tensor],
    spec: DecoderSpec,
    device: torch.device | str = "cpu",
) -> DecoderWeights:
    """Stacks a decoder's tensors, asked for one by one as ``source(name, shape)``.

    Raises:
        ValueError: ``source`` gave a tensor of another shape; names it.
    """

    def take(name: str, shape: tuple[int, ...]) -> torch.Tensor:
        tensor = source(name, shape)
        if tuple(tensor.shape) != shape:
            raise ValueError(f"{name}: expected {list(shape)}, got {list(tensor.shape)}")
        return tensor

    prefix = PREFIX[spec.role]
    packed = {
        name: torch.empty(shape, dtype=torch.bfloat16, device=device)
        for name, shape in packed_shapes(spec).items()
    }
    for name, parts in layer_parts(spec).items():
        for layer in range(spec.num_hidden_layers):
            row = 0
            for suffix, shape in parts:
                rows = packed[name][layer][row : row + shape[0]]
                rows.copy_(take(f"{prefix}.model.layers.{layer}.{suffix}", shape))
                row += shape[0]
    packed["norm"].copy_(take(f"{prefix}.model.norm.weight", (spec.hidden_size,)))
    for j, name in enumerate(lm_head_names(spec)):
        packed["lm_head"][j].copy_(take(name, (spec.vocab_size, spec.hidden_size)))
    return DecoderWeights(**packed)


def pack_named(
    tensors: Mapping[str, torch.Tensor], spec: DecoderSpec, device: torch.device | str = "cpu"
) -> DecoderWeights:
    """``pack`` from a mapping of checkpoint names. Raises ValueError on a missing tensor."""

    def take(name: str, shape: tuple[int, ...]) -> torch.Tensor:
        if name not in tensors:
            raise ValueError(f"{name}: missing from the checkpoint ({spec.role} needs it)")
        return tensors[name]

    return pack(take, spec, device)


def pair_columns(matrices: torch.Tensor) -> torch.Tensor:  # [..., N, K] bf16
    """Returns [..., N, K / 2] int32: columns ``j`` (low 16 bits) and ``j + K / 2`` as one word.

    The form in which Triton kernels read weights: see ``kernels/matvec.py``.
    """
    low, high = matrices.view(torch.int16).chunk(2, dim=-1)
    return torch.stack((low, high), dim=-1).view(torch.int32).squeeze(-1)


def random_weights(
    spec: DecoderSpec, seed: int, device: torch.device | str = "cpu"
) -> DecoderWeights:
    """Seeded weights whose activations stay near unit size. Not equal across device types.

    Norm weights are not one, so that a dropped norm weight shows.
    """
    generator = torch.Generator(device=device).manual_seed(seed)
    packed = {}
    for name, shape in packed_shapes(spec).items():
        values = torch.empty(shape, dtype=torch.bfloat16, device=device)
        for row in values if values.dim() > 1 else [values]:  # keeps the fp32 temporary small
            noise = torch.randn(row.shape, generator=generator, device=device)
            row.copy_(1 + 0.3 * noise if "norm" in name else noise / math.sqrt(shape[-1]))
        packed[name] = values
    return DecoderWeights(**packed)


HASH_CHUNK = 1 << 24


def hash_tensor(
    name: str,
    shape: tuple[int, ...],
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.bfloat16,
) -> torch.Tensor:
    """Returns the hash weight of a checkpoint name: ``offset + amplitude * u``, u in [-1, 1).

    ``u`` comes from the flat index and the name's CRC-32 through a 32-bit integer mix, in integer
    and singly rounded fp32 operations only: the same bits on every machine and device.
    """
    offset, amplitude = _hash_range(name, shape)
    scale = torch.tensor(amplitude, dtype=torch.float32, device=device)
    shift = torch.tensor(offset, dtype=torch.float32, device=device)
    out = torch.empty(math.prod(shape), dtype=dtype, device=device)
    for start in range(0, out.numel(), HASH_CHUNK):
        stop = min(out.numel(), start + HASH_CHUNK)
        index = torch.arange(start, stop, dtype=torch.int64, device=device)
        u = (_mix32(index, zlib.crc32(name.encode())) >> 8) - (1 << 23)
        product = (u.to(torch.float32) * 2.0**-23) * scale
        out[start:stop] = (product + shift).to(dtype)
    return out.view(shape)


def hash_weights(spec: DecoderSpec, device: torch.device | str = "cpu") -> DecoderWeights:
    """Packs a decoder whose every tensor is its hash weight."""
    return pack(lambda name, shape: hash_tensor(name, shape, device), spec, device)


def _hash_range(name: str, shape: tuple[int, ...]) -> tuple[float, float]:
    name = name.lower()
    if len(shape) == 1 and "norm" in name:
        return 1.0, 0.3
    if name.endswith("bias"):
        return 0.0, 0.1
    if "embedding" in name:
        return 0.0, 0.5
    return 0.0, math.sqrt(3.0 / math.prod(shape[1:]))


def _mix32(x: torch.Tensor, seed: int) -> torch.Tensor:
    """A 32-bit finalizer (murmur3's constants) over int64 lanes."""
    low = 0xFFFFFFFF
    x = (x * 0x9E3779B1 + seed) & low
    x = ((x ^ (x >> 16)) * 0x85EBCA6B) & low
    x = ((x ^ (x >> 13)) * 0xC2B2AE35) & low
    return x ^ (x >> 16)

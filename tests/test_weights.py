"""Packing from named tensors, seeded random weights, and hash weights against plain integers."""

from __future__ import annotations

import math
import zlib
from dataclasses import replace

import numpy as np
import pytest
import torch

from triton_mega import weights as module
from triton_mega.spec import TINY, Role
from triton_mega.weights import (
    DecoderWeights,
    decoder_shapes,
    hash_tensor,
    hash_weights,
    pack,
    pack_named,
    packed_shapes,
    random_weights,
)

ROLES: tuple[Role, ...] = ("talker", "code_predictor")

GOLDEN_HEAD = [
    "0x1.d4ccea0000000p-10",
    "-0x1.bf35960000000p-2",
    "-0x1.1a39840000000p-1",
    "0x1.c2c91c0000000p-3",
]
GOLDEN_NORM = [
    "0x1.d7836a0000000p-1",
    "0x1.0149e60000000p+0",
    "0x1.82800e0000000p-1",
    "0x1.7a86e80000000p-1",
]


def named(role: Role) -> dict[str, torch.Tensor]:
    """Returns random tensors under a decoder's checkpoint names."""
    generator = torch.Generator().manual_seed(0)
    shapes = decoder_shapes(TINY.decoders[role])
    return {
        name: torch.randn(shape, generator=generator).bfloat16() for name, shape in shapes.items()
    }


def hash_values(name: str, shape: tuple[int, ...], offset: float, amplitude: float) -> np.ndarray:
    """Returns hash weights in fp32, from 32-bit numpy integers that wrap by themselves."""
    with np.errstate(over="ignore"):
        x = np.arange(math.prod(shape), dtype=np.uint32) * np.uint32(0x9E3779B1)
        x += np.uint32(zlib.crc32(name.encode()))
        for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
            x ^= x >> np.uint32(shift)
            x *= np.uint32(factor)
        x ^= x >> np.uint32(16)
    u = ((x >> np.uint32(8)).astype(np.int32) - (1 << 23)).astype(np.float32) / np.float32(2**23)
    return (u * np.float32(amplitude) + np.float32(offset)).reshape(shape)


@pytest.mark.parametrize("role", ROLES)
def test_packing_is_stacking(role: Role) -> None:
    spec, tensors = TINY.decoders[role], named(role)
    packed = pack_named(tensors, spec)
    packed.check(spec)
    prefix = "talker" if role == "talker" else "talker.code_predictor"

    def stacked(*suffixes: str) -> torch.Tensor:
        return torch.stack(
            [
                torch.cat(
                    [tensors[f"{prefix}.model.layers.{i}.{suffix}.weight"] for suffix in suffixes]
                )
                for i in range(spec.num_hidden_layers)
            ]
        )

    attention = [f"self_attn.{name}_proj" for name in "qkv"]
    heads = (
        ["talker.codec_head.weight"]
        if role == "talker"
        else [f"talker.code_predictor.lm_head.{j}.weight" for j in range(5)]
    )
    want = DecoderWeights(
        input_norm=stacked("input_layernorm"),
        q_norm=stacked("self_attn.q_norm"),
        k_norm=stacked("self_attn.k_norm"),
        qkv=stacked(*attention),
        o=stacked("self_attn.o_proj"),
        post_attention_norm=stacked("post_attention_layernorm"),
        gate_up=stacked("mlp.gate_proj", "mlp.up_proj"),
        down=stacked("mlp.down_proj"),
        norm=tensors[f"{prefix}.model.norm.weight"],
        lm_head=torch.stack([tensors[name] for name in heads]),
    )
    for name, shape in packed_shapes(spec).items():
        assert getattr(want, name).shape == shape
        assert torch.equal(getattr(packed, name), getattr(want, name)), name
    assert set(tensors) == set(decoder_shapes(spec))


@pytest.mark.parametrize("role", ROLES)
def test_missing_or_misshapen_tensor_is_named(role: Role) -> None:
    spec = TINY.decoders[role]
    for name in decoder_shapes(spec):
        tensors = named(role)
        wrong = tensors.pop(name)
        with pytest.raises(ValueError, match=rf"^{name}: missing from the checkpoint \({role}"):
            pack_named(tensors, spec)
        tensors[name] = wrong[:-1]
        with pytest.raises(ValueError, match=rf"^{name}: expected \[.*\], got \["):
            pack_named(tensors, spec)


def test_check_names_the_tensor_that_does_not_belong() -> None:
    spec = TINY.talker
    good = random_weights(spec, 0)
    good.check(spec)
    for bad, message in (
        (replace(good, down=good.down.mT), r"weights.down: expected contiguous \[3, 96, 160\]"),
        (replace(good, o=good.o.float()), r"weights.o: .* torch.float32 on cpu"),
        (replace(good, qkv=good.qkv[:, :, ::2]), "weights.qkv: .*packed with another spec"),
        (replace(good, norm=good.norm.to("meta")), "weights.norm: .* on cpu, got .* on meta"),
    ):
        with pytest.raises(ValueError, match=message):
            bad.check(spec)
    with pytest.raises(ValueError, match=r"weights.*another spec than this code_predictor"):
        good.check(TINY.predictor)


def test_moving_keeps_the_numbers() -> None:
    spec = TINY.predictor
    weights = random_weights(spec, 0)
    same = weights.to("cpu")
    assert same.qkv is weights.qkv
    assert weights.to("meta").lm_head.device.type == "meta"


def test_random_weights_follow_their_seed_and_scale() -> None:
    spec = TINY.talker
    first, again, other = (random_weights(spec, seed) for seed in (1, 1, 2))
    first.check(spec)
    for name in packed_shapes(spec):
        tensor = getattr(first, name)
        assert torch.equal(tensor, getattr(again, name)), name
        assert not torch.equal(tensor, getattr(other, name)), name
        if "norm" in name:
            assert abs(tensor.float().mean() - 1) < 0.2, name
            assert tensor.float().std() > 0.15, f"{name}: a dropped norm weight would not show"
        else:
            assert abs(tensor.float().std() * math.sqrt(tensor.shape[-1]) - 1) < 0.1, name


@pytest.mark.parametrize(
    ("name", "shape", "offset", "amplitude"),
    [
        ("talker.model.layers.0.input_layernorm.weight", (40,), 1.0, 0.3),
        ("talker.text_projection.linear_fc1.bias", (33,), 0.0, 0.1),
        ("talker.model.codec_embedding.weight", (7, 30), 0.0, 0.5),
        ("talker.model.layers.1.mlp.up_proj.weight", (11, 17), 0.0, math.sqrt(3 / 17)),
    ],
)
def test_hash_tensor_is_plain_32_bit_arithmetic(
    name: str,
    shape: tuple[int, ...],
    offset: float,
    amplitude: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    want = torch.from_numpy(hash_values(name, shape, offset, amplitude))
    assert torch.equal(hash_tensor(name, shape, dtype=torch.float32), want)
    assert torch.equal(hash_tensor(name, shape), want.bfloat16())
    monkeypatch.setattr(module, "HASH_CHUNK", 8)  # pieces do not show
    assert torch.equal(hash_tensor(name, shape, dtype=torch.float32), want)
    assert not torch.equal(hash_tensor(name + "x", shape, dtype=torch.float32), want)


def test_hash_golden_values() -> None:
    """Numbers, not formulas: the same on every machine and in every version."""
    flat = hash_tensor("talker.codec_head.weight", (3, 5), dtype=torch.float32).flatten()
    assert [value.hex() for value in flat[:4].tolist()] == GOLDEN_HEAD
    norm = hash_tensor("talker.model.norm.weight", (4,), dtype=torch.float32)
    assert [value.hex() for value in norm.tolist()] == GOLDEN_NORM


def test_hash_weights_pack_their_names() -> None:
    spec = TINY.predictor
    weights = hash_weights(spec)
    want = pack(hash_tensor, spec)
    name = "talker.code_predictor.model.layers.1.mlp.up_proj.weight"
    up = torch.from_numpy(hash_values(name, (80, 48), 0.0, math.sqrt(3 / 48))).bfloat16()
    assert torch.equal(weights.gate_up[1, 80:], up)
    for field in packed_shapes(spec):
        assert torch.equal(getattr(weights, field), getattr(want, field)), field

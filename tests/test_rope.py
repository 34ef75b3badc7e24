"""Rotary tables: three position axes, interleaved sections."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests import fixtures, hf_official
from triton_mega.reference import CONTRACTS
from triton_mega.reference.decoder import rotate
from triton_mega.rope import frequency_axes, rope_tables
from triton_mega.spec import TINY, DecoderSpec, TTSSpec
from triton_mega.testing import assert_close, relative_error

TALKERS = {
    "TINY": TINY.talker,
    "tiny": TTSSpec.from_config(fixtures.config("tiny")).talker,
    "1.7B": TTSSpec.from_config(fixtures.config("1.7B-CustomVoice")).talker,
    "0.6B": TTSSpec.from_config(fixtures.config("0.6B-CustomVoice")).talker,
}
talkers = pytest.mark.parametrize("spec", TALKERS.values(), ids=TALKERS)


def unequal_positions(rows: int) -> torch.Tensor:
    """[3, rows] positions whose axes differ in every row."""
    generator = torch.Generator().manual_seed(1)
    steps = torch.randint(1, 9, (3, rows), generator=generator)
    return steps.cumsum(1) + torch.tensor([[0], [1000], [2000]])


@talkers
def test_equal_axes_are_plain_rope(spec: DecoderSpec) -> None:
    positions = torch.arange(300)
    pair = torch.arange(spec.head_dim // 2, dtype=torch.float64)
    angles = positions.double()[:, None] * spec.rope_theta ** (-2 * pair / spec.head_dim)
    want = (angles.cos(), angles.sin())
    plain = rope_tables(positions, replace(spec, mrope_section=None))
    for three in (positions, positions.expand(3, -1)):
        for got, table, exact in zip(rope_tables(three, spec), plain, want, strict=True):
            assert torch.equal(got, table)
            assert_close(got, exact, 2e-5)


@talkers
def test_sections_come_from_mrope_section(spec: DecoderSpec) -> None:
    assert spec.mrope_section is not None
    axes = frequency_axes(spec).tolist()
    assert [axes.count(axis) for axis in range(3)] == list(spec.mrope_section)
    assert all(axis in (0, i % 3) for i, axis in enumerate(axes))


def test_released_layout() -> None:
    assert frequency_axes(TALKERS["1.7B"]).tolist() == [0, 1, 2] * 20 + [0] * 4
    assert frequency_axes(TINY.talker).tolist() == [0, 1, 2, 0, 1, 2, 0, 0]
    assert frequency_axes(TINY.predictor).tolist() == [0] * 8
    moved = replace(TINY.talker, mrope_section=(5, 1, 2))
    assert frequency_axes(moved).tolist() == [0, 1, 2, 0, 0, 2, 0, 0]


@talkers
@pytest.mark.parametrize("axis", [0, 1, 2])
def test_an_axis_moves_its_own_frequencies_only(spec: DecoderSpec, axis: int) -> None:
    base = torch.zeros(3, 4, dtype=torch.int64)
    moved = base.clone()
    moved[axis] = torch.arange(1, 5)
    _, sin = rope_tables(moved, spec)
    assert torch.equal((sin != 0).all(0), frequency_axes(spec) == axis)
    assert torch.equal((sin != 0).any(0), frequency_axes(spec) == axis)


def test_wrong_positions_are_named() -> None:
    with pytest.raises(ValueError, match="positions: expected"):
        rope_tables(torch.zeros(2, 5), TINY.talker)


@pytest.mark.hf
@talkers
@pytest.mark.parametrize("name", ["hf_bf16", "hf_fp32"])
def test_unequal_axes_match_the_official_function(spec: DecoderSpec, name: str) -> None:
    contract = CONTRACTS[name]
    official = hf_official.modeling()
    positions = unequal_positions(11)
    generator = torch.Generator().manual_seed(2)
    shape = (spec.num_attention_heads, 11, spec.head_dim)
    q = torch.randn(shape, generator=generator).to(contract.activation_dtype)
    k = q[: spec.num_key_value_heads] * 2

    frequencies = spec.rope_theta ** (torch.arange(0, spec.head_dim, 2).float() / spec.head_dim)
    angles = positions.float()[..., None] * (1.0 / frequencies)  # [3, n, HD / 2]
    full = torch.cat((angles, angles), dim=-1)[:, None]
    cos, sin = (table.to(q.dtype) for table in (full.cos(), full.sin()))
    want = official.apply_multimodal_rotary_pos_emb(
        q[None], k[None], cos, sin, list(spec.mrope_section or ()), True
    )
    tables = rope_tables(positions, spec)
    for got, expected in zip((q, k), want, strict=True):
        assert_close(rotate(got, *tables, contract), expected[0], 0.0)
    swapped = rope_tables(positions[[0, 2, 1]], spec)
    assert relative_error(rotate(q, *swapped, contract), want[0][0]) > 0.1

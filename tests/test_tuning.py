"""Tile shapes and grids: the defaults fit every model and chip, and impossible ones are refused."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.fixtures import HERE
from triton_mega.device import DeviceInfo
from triton_mega.kernels.persistent import launch_options
from triton_mega.spec import TINY, DecoderSpec, TTSSpec
from triton_mega.tuning import check_tuning, default_tuning, row_groups

LARGE = TTSSpec.from_json(HERE / "configs" / "1.7B-CustomVoice.config.json")
SMALL = TTSSpec.from_json(HERE / "configs" / "0.6B-CustomVoice.config.json")
SPECS = {
    "talker_1p7b": LARGE.talker,
    "talker_0p6b": SMALL.talker,
    "predictor_1p7b": LARGE.predictor,
    "predictor_0p6b": SMALL.predictor,
    "tiny": TINY.talker,
    "tiny_predictor": TINY.predictor,
}
CHIPS = {
    "sm_80": DeviceInfo.of_chip((8, 0), 108),
    "sm_90": DeviceInfo.of_chip((9, 0), 132),
    "sm_120": DeviceInfo.of_chip((12, 0), 170),
}
TUNING = default_tuning(LARGE.talker, CHIPS["sm_90"])

for_every_spec = pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)


@for_every_spec
@pytest.mark.parametrize("device", CHIPS.values(), ids=CHIPS)
def test_default_fits_model_and_chip(spec: DecoderSpec, device: DeviceInfo) -> None:
    tuning = default_tuning(spec, device)
    heads = spec.num_key_value_heads
    assert tuning.num_programs % heads == 0
    assert tuning.num_programs <= device.sm_count < tuning.num_programs + heads
    assert tuning.num_programs - heads < tuning.splits * heads <= tuning.num_programs
    check_tuning(tuning, spec)


@for_every_spec
@pytest.mark.parametrize("device", CHIPS.values(), ids=CHIPS)
def test_default_is_resident_whatever_the_kernel_needs(
    spec: DecoderSpec, device: DeviceInfo
) -> None:
    tuning = default_tuning(spec, device)
    registers = launch_options(tuning.num_warps)["maxnreg"]
    shared = device.limits.shared_bytes_per_program
    assert tuning.num_programs <= device.resident_programs(tuning.num_warps, registers, shared)


@pytest.mark.parametrize(
    ("chip", "programs", "splits"), [("sm_80", 104, 13), ("sm_90", 128, 16), ("sm_120", 168, 21)]
)
def test_grid_of_the_released_models(chip: str, programs: int, splits: int) -> None:
    for spec in (LARGE.talker, LARGE.predictor, SMALL.talker):  # 8 K/V heads each
        tuning = default_tuning(spec, CHIPS[chip])
        assert (tuning.num_programs, tuning.splits) == (programs, splits)


def test_a_chip_with_fewer_multiprocessors_than_heads_gets_one_program() -> None:
    tuning = default_tuning(LARGE.talker, DeviceInfo.of_chip((8, 6), 7))
    assert (tuning.num_programs, tuning.splits) == (1, 1)
    check_tuning(tuning, LARGE.talker)


@for_every_spec
def test_interpreter_gets_one_program(spec: DecoderSpec) -> None:
    tuning = default_tuning(spec, None)
    assert tuning.num_programs == 1
    assert tuning.splits > tuning.splits_at_once > 1  # both of the combining loop's cases are run
    check_tuning(tuning, spec)


def test_tiles_are_no_wider_than_the_matrix_needs() -> None:
    tuning = default_tuning(TINY.talker, CHIPS["sm_90"])  # hidden 96, intermediate 160
    widths = (tuning.qkv_k, tuning.gate_up_k, tuning.head_k, tuning.down_k)
    assert widths == (128, 128, 128, 256)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("num_programs", 0, "expected at least 1, got 0"),
        ("splits", 0, "expected at least 1, got 0"),
        ("splits", -3, "expected at least 1, got -3"),
        ("num_warps", 0, "expected a power of two, got 0"),
        ("num_warps", 6, "expected a power of two, got 6"),
        ("qkv_n", 12, "expected a power of two, got 12"),
        ("o_n", 0, "expected a power of two, got 0"),
        ("gate_up_n", -8, "expected a power of two, got -8"),
        ("down_k", 96, "expected a power of two, got 96"),
        ("attention_t", 33, "expected a power of two, got 33"),
        ("splits_at_once", 3, "expected a power of two, got 3"),
        ("qkv_k", 1, "expected at least 2 columns, got 1"),
        ("gate_up_k", 1, "expected at least 2 columns, got 1"),
        ("down_k", 1, "expected at least 2 columns, got 1"),
        ("head_k", 1, "expected at least 2 columns, got 1"),
    ],
)
def test_impossible_choice_is_named(field: str, value: int, message: str) -> None:
    with pytest.raises(ValueError, match=rf"^tuning\.{field}: {message}$"):
        replace(TUNING, **{field: value})


def test_grid_and_splits_need_not_be_powers_of_two() -> None:
    tuning = replace(TUNING, num_programs=108, splits=13, splits_at_once=1, down_k=2)
    assert (tuning.num_programs, tuning.splits, tuning.source) == (108, 13, "default")


@pytest.mark.parametrize(
    ("columns", "num_warps", "groups"),
    [
        (2048, 8, 1),  # a tile's 1024 pairs occupy all 8 warps
        (1024, 8, 2),
        (512, 8, 4),
        (256, 8, 8),
        (128, 8, 8),  # never more than there are warps
        (2, 8, 8),
        (4096, 8, 1),  # wider than the warps: still one group
        (512, 4, 2),
        (256, 1, 1),
    ],
)
def test_row_groups(columns: int, num_warps: int, groups: int) -> None:
    assert row_groups(columns, num_warps) == groups


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"qkv_n": 1}, "qkv_n: expected at least 2 rows for tiles of 1024 columns and 8 warps"),
        ({"gate_up_n": 2}, "gate_up_n: expected at least 4 rows for tiles of 512 columns"),
        ({"down_n": 4, "down_k": 256}, "down_n: expected at least 8 rows for tiles of 256 columns"),
        ({"head_n": 4}, "head_n: expected at least 8 rows for tiles of 256 columns and 8 warps"),
        ({"o_n": 1, "num_warps": 16}, "o_n: expected at least 2 rows for tiles of 2048 columns"),
    ],
)
def test_too_few_rows_are_named(changes: dict[str, int], message: str) -> None:
    with pytest.raises(
        ValueError, match=rf"^tuning\.{message}.*, got {next(iter(changes.values()))}$"
    ):
        check_tuning(replace(TUNING, **changes), LARGE.talker)


def test_just_enough_rows_pass() -> None:
    check_tuning(replace(TUNING, qkv_n=2, o_n=1, gate_up_n=4, down_n=4, head_n=8), LARGE.talker)

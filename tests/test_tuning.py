"""Default tunings on chips of several sizes, and what a tuning may not be."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.shapes import CHIPS, LARGE, SPECS
from triton_mega.device import DeviceInfo
from triton_mega.spec import TINY, DecoderSpec
from triton_mega.tuning import TuningConfig, check_tuning, default_tuning, row_groups


@pytest.mark.parametrize("chip", CHIPS.values(), ids=list(CHIPS))
@pytest.mark.parametrize("name", SPECS)
def test_default_gives_every_head_equally_many_splits(name: str, chip: DeviceInfo) -> None:
    spec, sm_count = SPECS[name], chip.sm_count
    tuning = default_tuning(spec, chip)
    heads = spec.num_key_value_heads
    assert tuning.num_programs == max(n for n in range(1, sm_count + 1) if n % heads == 0)
    assert tuning.splits * heads == tuning.num_programs
    assert tuning.source == "default"
    check_tuning(tuning, spec)
    # Resident with all the registers that a thread can have, one program on each multiprocessor.
    assert tuning.num_programs <= chip.resident_programs(tuning.num_warps, 255, 48 * 1024)


def test_default_grids_of_the_large_talker() -> None:
    grids = [default_tuning(LARGE.talker, chip).num_programs for chip in CHIPS.values()]
    assert grids == [104, 128, 168]


def test_chip_with_fewer_multiprocessors_than_heads_gets_a_program() -> None:
    tuning = default_tuning(LARGE.talker, DeviceInfo.of_chip((8, 6), 6))
    assert (tuning.num_programs, tuning.splits) == (1, 1)


@pytest.mark.parametrize("name", SPECS)
def test_interpreter_gets_one_program(name: str) -> None:
    tuning = default_tuning(SPECS[name], None)
    assert tuning.num_programs == 1
    assert tuning.splits > 1  # so that partial results are combined there too
    check_tuning(tuning, SPECS[name])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_programs": 0}, r"tuning\.num_programs: expected at least 1, got 0"),
        ({"splits": -1}, r"tuning\.splits: expected at least 1, got -1"),
        ({"qkv_n": 12}, r"tuning\.qkv_n: expected a power of two, got 12"),
        ({"num_warps": 0}, r"tuning\.num_warps: expected a power of two, got 0"),
        ({"down_k": 1}, r"tuning\.down_k: expected at least 2 columns, got 1"),
        ({"attention_t": 24}, r"tuning\.attention_t: expected a power of two, got 24"),
    ],
)
def test_wrong_field_is_named(change: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(default_tuning(TINY.talker, None), **change)


@pytest.mark.parametrize("name", ["qkv", "o", "gate_up", "down", "head"])
def test_tile_with_fewer_rows_than_row_groups_is_refused(name: str) -> None:
    tuning = default_tuning(LARGE.talker, CHIPS["sm_90"])
    short: TuningConfig = replace(tuning, num_warps=32, **{f"{name}_n": 1})
    others = {
        f"{other}_n": 32 for other in ("qkv", "o", "gate_up", "down", "head") if other != name
    }
    with pytest.raises(ValueError, match=rf"tuning\.{name}_n: expected at least \d+ rows for"):
        check_tuning(replace(short, **others), LARGE.talker)
    check_tuning(replace(short, **others, **{f"{name}_n": 32}), LARGE.talker)


@pytest.mark.parametrize(
    ("columns", "num_warps", "groups"),
    [(512, 8, 4), (256, 8, 8), (2048, 8, 1), (4096, 8, 1), (64, 4, 4), (2, 4, 4), (1024, 8, 2)],
)
def test_warps_that_columns_leave_over_form_row_groups(
    columns: int, num_warps: int, groups: int
) -> None:
    assert row_groups(columns, num_warps) == groups


def spec_of(**changes: int) -> DecoderSpec:
    return replace(TINY.talker, **changes)


def test_default_rounds_odd_sizes_up() -> None:
    tuning = default_tuning(spec_of(hidden_size=100, intermediate_size=36), CHIPS["sm_90"])
    assert (tuning.gate_up_k, tuning.down_k) == (128, 64)

"""The schedule's bytes and barriers, against the weights themselves."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.shapes import CHIPS, LARGE, SMALL
from triton_mega.schedule import LAYER_STAGES, STAGES, Schedule
from triton_mega.spec import TINY, DecoderSpec
from triton_mega.state import KVCache
from triton_mega.tuning import default_tuning
from triton_mega.weights import random_weights

H200 = CHIPS["sm_90"]


def schedule(spec: DecoderSpec) -> Schedule:
    return Schedule(spec, default_tuning(spec, H200))


@pytest.mark.parametrize(
    ("spec", "weights", "row"),
    [(LARGE.talker, 2_831_403_008, 114_688), (SMALL.talker, 887_226_368, 114_688)],
)
@pytest.mark.parametrize("position", [0, 100, 1500])
def test_bytes_of_a_step(spec: DecoderSpec, weights: int, row: int, position: int) -> None:
    assert schedule(spec).step_bytes(position) == weights + row * (position + 1)


@pytest.mark.parametrize("spec", [TINY.talker, TINY.predictor])
@pytest.mark.parametrize("position", [0, 5])
def test_bytes_are_those_of_the_tensors(spec: DecoderSpec, position: int) -> None:
    weights = random_weights(spec, seed=0)
    read = {name: tensor.nbytes for name, tensor in vars(weights).items()}
    read["lm_head"] //= spec.num_lm_heads  # one head a step
    rows = KVCache.allocate(spec, position + 1)
    assert schedule(spec).step_bytes(position) == sum(read.values()) + rows.k.nbytes + rows.v.nbytes


def test_stages_of_a_layer() -> None:
    stages = {stage.name: stage for stage in schedule(LARGE.talker).layer_stages(position=9)}
    assert tuple(stages) == LAYER_STAGES == STAGES[:5]
    assert stages["qkv_proj"].blocks == 4096 // 16
    assert stages["qkv_proj"].blocks_per_program == 2
    assert stages["attention"].blocks == stages["attention"].rows == 128
    assert stages["attention"].kv_bytes == 2 * 1024 * 10 * 2
    assert stages["gate_up_proj"].rows == 2 * 6144
    assert stages["gate_up_proj"].blocks_per_program == 6
    assert stages["down_proj"].flops == 2 * 2048 * 6144


def test_busiest_program_has_the_rest_of_an_uneven_division() -> None:
    spec = LARGE.talker
    uneven = Schedule(spec, replace(default_tuning(spec, H200), num_programs=100))
    blocks = {stage.name: stage.blocks_per_program for stage in uneven.layer_stages(0)}
    assert blocks == dict(zip(LAYER_STAGES, (3, 2, 2, 8, 3), strict=True))


def test_barriers_are_named_by_what_they_follow() -> None:
    large = schedule(LARGE.talker)
    assert large.barriers_per_step == 140
    assert large.barrier_name(0) == "the start of the launch"
    assert large.barrier_name(1) == "step 0, layer 0, after qkv_proj"
    assert large.barrier_name(140) == "step 0, layer 27, after down_proj"
    assert large.barrier_name(143) == "step 1, layer 0, after o_proj"


def test_it_prints_itself() -> None:
    text = str(schedule(LARGE.talker))
    assert text.splitlines()[-1] == "28 layers, 140 barriers, 2831.5 MB a step, 128 programs"
    assert [line.split()[0] for line in text.splitlines()[1:-1]] == [*LAYER_STAGES, "lm_head"]

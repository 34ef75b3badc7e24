"""The order of a step, and its bytes: checked against figures written down and against weights."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from tests.fixtures import HERE
from triton_mega.device import DeviceInfo
from triton_mega.schedule import LAYER_STAGES, STAGES, Schedule
from triton_mega.spec import TINY, DecoderSpec, TTSSpec
from triton_mega.tuning import default_tuning
from triton_mega.weights import packed_shapes

LARGE = TTSSpec.from_json(HERE / "configs" / "1.7B-CustomVoice.config.json")
SMALL = TTSSpec.from_json(HERE / "configs" / "0.6B-CustomVoice.config.json")
SPECS = {
    "talker_1p7b": LARGE.talker,
    "talker_0p6b": SMALL.talker,
    "predictor": LARGE.predictor,
    "tiny": TINY.talker,
    "tiny_predictor": TINY.predictor,
}
H200 = DeviceInfo.of_chip((9, 0), 132)

for_every_spec = pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)


def schedule(spec: DecoderSpec, **changes: int) -> Schedule:
    return Schedule(spec, replace(default_tuning(spec, H200), **changes))


@pytest.mark.parametrize(
    ("spec", "weight_bytes"),
    [(LARGE.talker, 2_831_403_008), (SMALL.talker, 887_226_368)],
    ids=["1.7B", "0.6B"],
)
@pytest.mark.parametrize("position", [0, 1, 500])
def test_step_bytes_of_the_talkers(spec: DecoderSpec, weight_bytes: int, position: int) -> None:
    """28 layers of 8 K and 8 V heads of 128 bf16 elements: 114,688 bytes a row."""
    assert schedule(spec).step_bytes(position) == weight_bytes + 114_688 * (position + 1)


@for_every_spec
@pytest.mark.parametrize("position", [0, 63])
def test_step_bytes_are_those_of_the_tensors(spec: DecoderSpec, position: int) -> None:
    elements = {name: math.prod(shape) for name, shape in packed_shapes(spec).items()}
    elements["lm_head"] //= spec.num_lm_heads  # a step reads one of the heads
    cached = spec.num_hidden_layers * 2 * spec.num_key_value_heads * (position + 1) * spec.head_dim
    assert schedule(spec).step_bytes(position) == 2 * (sum(elements.values()) + cached)


@for_every_spec
def test_bytes_of_each_stage_are_those_of_its_tensors(spec: DecoderSpec) -> None:
    reads = {
        "qkv_proj": ("input_norm", "qkv"),
        "attention": ("q_norm", "k_norm"),
        "o_proj": ("o",),
        "gate_up_proj": ("post_attention_norm", "gate_up"),
        "down_proj": ("down",),
    }
    shapes = packed_shapes(spec)
    for stage in schedule(spec).layer_stages(position=0):
        want = 2 * sum(math.prod(shapes[name][1:]) for name in reads[stage.name])
        assert stage.weight_bytes == want, stage.name
        assert (stage.kv_bytes > 0) == (stage.name == "attention")
        assert stage.bytes == stage.weight_bytes + stage.kv_bytes


def test_bytes_do_not_depend_on_the_tuning() -> None:
    changed = schedule(LARGE.talker, num_programs=7, splits=1, qkv_n=64, down_k=128)
    assert changed.step_bytes(9) == schedule(LARGE.talker).step_bytes(9)


@for_every_spec
def test_operations_are_two_for_each_weight_and_four_for_each_cached_query_element(
    spec: DecoderSpec,
) -> None:
    shapes = packed_shapes(spec)
    matrices = {"qkv_proj": "qkv", "o_proj": "o", "gate_up_proj": "gate_up", "down_proj": "down"}
    stages = {stage.name: stage for stage in schedule(spec).layer_stages(position=9)}
    for name, weight in matrices.items():
        assert stages[name].flops == 2 * math.prod(shapes[weight][1:])
        assert stages[name].rows == shapes[weight][1]
    assert stages["attention"].flops == 4 * 10 * spec.num_attention_heads * spec.head_dim
    head = schedule(spec).head_stage()
    assert (head.rows, head.flops) == (spec.vocab_size, 2 * spec.vocab_size * spec.hidden_size)


def test_stages_come_in_order() -> None:
    step = schedule(LARGE.talker)
    names = tuple(stage.name for stage in step.layer_stages(position=0))
    assert names == LAYER_STAGES
    assert (*names, "final_norm", step.head_stage().name) == STAGES


@pytest.mark.parametrize(
    ("spec", "barriers"), [(LARGE.talker, 140), (LARGE.predictor, 25), (TINY.predictor, 10)]
)
def test_barriers_are_named_by_what_they_follow(spec: DecoderSpec, barriers: int) -> None:
    step = schedule(spec)
    last = spec.num_hidden_layers - 1
    assert step.barriers_per_step == barriers
    assert step.barrier_name(0) == "the start of the launch"
    assert step.barrier_name(1) == "step 0, layer 0, after qkv_proj"
    assert step.barrier_name(5) == "step 0, layer 0, after down_proj"
    assert step.barrier_name(6) == "step 0, layer 1, after qkv_proj"
    assert step.barrier_name(barriers) == f"step 0, layer {last}, after down_proj"
    assert step.barrier_name(barriers + 1) == "step 1, layer 0, after qkv_proj"
    assert step.barrier_name(2 * barriers - 1) == f"step 1, layer {last}, after gate_up_proj"


def test_blocks_of_the_large_talker_on_an_h200() -> None:
    step = schedule(LARGE.talker)
    stages = [*step.layer_stages(position=0), step.head_stage()]
    assert [stage.blocks for stage in stages] == [256, 128, 128, 768, 256, 384]
    assert [stage.blocks_per_program for stage in stages] == [2, 1, 1, 6, 2, 3]


@for_every_spec
@pytest.mark.parametrize("programs", [1, 5, 108])
def test_blocks_cover_the_rows_and_are_dealt_out_in_turn(spec: DecoderSpec, programs: int) -> None:
    step = schedule(spec, num_programs=programs, splits=3)
    tuning, heads = step.tuning, spec.num_key_value_heads
    blocks = {
        "qkv_proj": len(range(0, spec.qkv_size, tuning.qkv_n)),
        "attention": 3 * heads,
        "o_proj": len(range(0, spec.hidden_size, tuning.o_n)),
        "gate_up_proj": len(range(0, spec.intermediate_size, tuning.gate_up_n)),
        "down_proj": len(range(0, spec.hidden_size, tuning.down_n)),
        "lm_head": len(range(0, spec.vocab_size, tuning.head_n)),
    }
    for stage in (*step.layer_stages(position=0), step.head_stage()):
        assert stage.blocks == blocks[stage.name], stage.name
        busiest = max(len(range(pid, stage.blocks, programs)) for pid in range(programs))
        assert stage.blocks_per_program == busiest, stage.name


def test_text_shows_every_stage_and_the_sum() -> None:
    lines = str(schedule(LARGE.talker)).splitlines()
    assert lines[0].split() == ["stage", "blocks", "each", "MB"]
    assert [line.split()[0] for line in lines[1:-1]] == [*LAYER_STAGES, "lm_head"]
    assert lines[1].split() == ["qkv_proj", "256", "2", "16.781"]
    assert lines[-1] == "28 layers, 140 barriers, 2831.5 MB a step, 128 programs"

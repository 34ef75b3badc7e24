"""The kernels' stages in the interpreter, one by one against fp64: grids, tiles, splits, positions.

A traced step shows every stage of every layer. Where one row of the cache has to be seen, it is
made the one that counts.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.backend_contract import random_rows
from tests.decoding import Decoding, Trace
from triton_mega.backends.triton_staged import TritonStaged
from triton_mega.reference import CONTRACTS
from triton_mega.rope import rope_tables
from triton_mega.spec import TINY, DecoderSpec, Role
from triton_mega.testing import first_divergence, relative_error
from triton_mega.tuning import default_tuning
from triton_mega.weights import DecoderWeights, random_weights

pytestmark = pytest.mark.interpret

BOUND = 1e-5
"""fp32 sums of a few hundred products, fifteen stages deep, stay below a tenth of this."""

ONE_LAYER = replace(TINY.talker, num_hidden_layers=1)
"""Three query heads to a K/V head and three rope axes, in a third of the time."""

TILE = default_tuning(ONE_LAYER, None).attention_t
MAX_POSITIONS = 6 * TILE
LAST = MAX_POSITIONS - 1


def make(
    spec: DecoderSpec,
    history: int,
    weights: DecoderWeights | None = None,
    positions: torch.Tensor | None = None,
    **changes: int,
) -> TritonStaged:
    """An engine with ``history`` cached rows and the interpreter's tuning, changed."""
    engine = TritonStaged(
        spec,
        weights or random_weights(spec, seed=3),
        max_positions=MAX_POSITIONS,
        positions=positions,
        tuning=replace(default_tuning(spec, None), source="a test", **changes),
    )
    engine.cache.fill_random(history, seed=4)
    return engine


def oracle(engine: TritonStaged, position: int, positions: torch.Tensor | None = None) -> Trace:
    """The fp64 trace of one step on a copy of the engine's cache, with tables of its own."""
    spec = engine.spec
    decoding = Decoding(spec, engine.weights, CONTRACTS[engine.contract].in_fp64(), MAX_POSITIONS)
    if positions is not None:
        decoding.tables = rope_tables(positions, spec)
    decoding.cache.copy_from(engine.cache)
    return decoding.traced(random_rows(spec, 1), position)[1]


def trace(engine: TritonStaged, position: int) -> Trace:
    return engine.trace_step(random_rows(engine.spec, 1), position)


def check(engine: TritonStaged, position: int, positions: torch.Tensor | None = None) -> Trace:
    """Traces one step; every stage of every layer must be the oracle's. Returns the trace."""
    want = oracle(engine, position, positions)
    got = trace(engine, position)
    assert first_divergence(got, want, BOUND) is None
    return got


@pytest.mark.parametrize("num_programs", [1, 2, 5])
@pytest.mark.parametrize("role", ["talker", "code_predictor"])
def test_every_stage_is_right_at_every_grid(role: Role, num_programs: int) -> None:
    position = 2 * TILE + 3  # three splits of one tile
    check(make(TINY.decoders[role], position, num_programs=num_programs), position)


@pytest.mark.parametrize("position", [0, 1, TILE - 1, TILE, TILE + 1, LAST])
def test_every_position_is_right(position: int) -> None:
    check(make(ONE_LAYER, position, num_programs=4), position)


@pytest.mark.parametrize(
    "changes",
    [
        # Hidden 96, intermediate 160, vocabulary 70, 160 rows of q, k and v: none is divided.
        {"qkv_k": 32, "gate_up_k": 32, "down_k": 64, "head_k": 32},
        {"qkv_k": 128, "gate_up_k": 128, "down_k": 256, "head_k": 128, "num_programs": 3},
        {"qkv_n": 64, "o_n": 64, "gate_up_n": 64, "down_n": 64, "head_n": 64, "num_programs": 2},
        {"qkv_n": 256, "o_n": 128, "gate_up_n": 256, "down_n": 128, "head_n": 128},
        {"gate_up_n": 16, "down_n": 16, "head_n": 16, "num_programs": 12},
        {"num_warps": 1, "qkv_k": 2, "qkv_n": 64, "o_n": 1, "down_k": 16, "attention_t": 1},
        {"num_warps": 16, "attention_t": 64, "gate_up_n": 16, "down_n": 16, "head_n": 16},
    ],
    ids=["narrow", "wide", "tall", "one_block", "more_programs_than_blocks", "least", "most"],
)
def test_tiles_need_not_divide(changes: dict[str, int]) -> None:
    check(make(ONE_LAYER, 5, **changes), 5)


@pytest.mark.parametrize("splits_at_once", [1, 4])
@pytest.mark.parametrize("splits", [1, 3, 5])
def test_every_split_counts(splits: int, splits_at_once: int) -> None:
    position = 4 * TILE + 1  # five tiles, the last with two rows
    check(make(ONE_LAYER, position, splits=splits, splits_at_once=splits_at_once), position)


def test_splits_without_rows_are_left_out() -> None:
    six_tiles = make(ONE_LAYER, LAST, splits=5, num_programs=3)  # two each for three splits
    check(six_tiles, LAST)
    used, fresh = (make(ONE_LAYER, LAST, splits=5) for _ in range(2))
    row = random_rows(ONE_LAYER, 1)
    used.run_steps(row, LAST)  # leaves partial results of splits that the next step has no rows for
    assert torch.equal(used.run_steps(row, 1).logits, fresh.run_steps(row, 1).logits)


@pytest.mark.parametrize("position", [TILE - 1, TILE, 2 * TILE - 1, 4 * TILE - 1, 4 * TILE])
def test_newest_position_wins(position: int) -> None:
    """First and last row of a tile and of a split of two tiles, alone with a value."""
    engine = make(ONE_LAYER, position, num_programs=2)
    engine.cache.v[:, :, :position] = 0
    got = check(engine, position)
    v = got["qkv_proj"][0, -ONE_LAYER.kv_size :].bfloat16().view(-1, 1, ONE_LAYER.head_dim)
    assert torch.equal(engine.cache.v[0, :, position], v[:, 0])
    heads = got["attention"][0].view(v.shape[0], ONE_LAYER.group_size, ONE_LAYER.head_dim)
    share = (heads / v.float()).mean(dim=-1, keepdim=True)  # softmax weight of the newest row
    assert (share > 1e-4).all()
    torch.testing.assert_close(heads, share * v.float(), rtol=1e-4, atol=0)


@pytest.mark.parametrize(
    "rows",
    [
        (0, TILE - 1, TILE, 2 * TILE - 1, 2 * TILE, LAST - 1),
        (1, 3 * TILE - 1, 3 * TILE, 4 * TILE - 1, 4 * TILE, 5 * TILE),
    ],
)
def test_cached_row_dominates_at_every_boundary(rows: tuple[int, ...]) -> None:
    """Each K/V head of each layer has one row whose value is far above all others'."""
    engine = make(TINY.talker, LAST)  # three splits of two tiles
    places = [(layer, head) for layer in range(3) for head in range(2)]
    for (layer, head), row in zip(places, rows, strict=True):
        engine.cache.v[layer, head, row] *= 1000
    got = check(engine, LAST)
    heads = got["attention"].view(3, 2, TINY.talker.group_size, TINY.talker.head_dim)
    for (layer, head), row in zip(places, rows, strict=True):
        value = engine.cache.v[layer, head, row].float()
        alike = torch.nn.functional.cosine_similarity(heads[layer, head], value, dim=-1)
        assert (alike > 0.9).all(), f"row {row}"


def test_unequal_rope_axes_are_used() -> None:
    position = TILE + 2
    rows = torch.arange(MAX_POSITIONS)
    positions = torch.stack((rows, 2 * rows + 5, (7 * rows) % 31))
    engine = make(ONE_LAYER, position, positions=positions)
    got = check(engine, position, positions)
    equal = oracle(engine, position)
    assert relative_error(got["qkv_proj"], equal["qkv_proj"]) <= BOUND
    assert relative_error(got["attention"], equal["attention"]) > 100 * BOUND


PREDICTOR = TINY.predictor
FAULTS = {
    "qkv of layer 1": ("qkv", (1, 100, 7), 1, "qkv_proj"),
    "q_norm of layer 1": ("q_norm", (1, 3), 1, "attention"),
    "k_norm of layer 0": ("k_norm", (0, 3), 0, "attention"),
    "o of layer 1": ("o", (1, 5, 40), 1, "o_proj"),
    "up of layer 0": ("gate_up", (0, 90, 1), 0, "gate_up_proj"),
    "post_attention_norm of layer 1": ("post_attention_norm", (1, 47), 1, "gate_up_proj"),
    "down of the last layer": ("down", (1, 47, 79), 1, "down_proj"),
    "norm": ("norm", (9,), None, "final_norm"),
    "lm_head": ("lm_head", (0, 49, 3), None, "lm_head"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_fault_in_one_weight_is_named(fault: str) -> None:
    name, index, layer, stage = FAULTS[fault]
    sound = random_weights(PREDICTOR, seed=3)
    changed = getattr(sound, name).clone()
    changed[index] += 0.5
    want = oracle(make(PREDICTOR, 3, sound), 3)
    engine = make(PREDICTOR, 3, replace(sound, **{name: changed}))
    found = first_divergence(trace(engine, 3), want, BOUND)
    assert found is not None
    assert (found.stage, found.layer) == (stage, layer)


@pytest.mark.parametrize(("name", "layer"), [("k", 0), ("v", 1)])
def test_fault_in_the_newest_cached_row_is_named(name: str, layer: int) -> None:
    engine = make(PREDICTOR, TILE)
    want = oracle(engine, TILE)
    getattr(engine.cache, name)[layer, 1, TILE - 1, 5] += 0.5
    found = first_divergence(trace(engine, TILE), want, BOUND)
    assert found is not None
    assert (found.stage, found.layer) == ("attention", layer)

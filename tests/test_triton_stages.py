"""Every Triton stage against the reference, in the interpreter: several grids, several tiles."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.backend_contract import random_rows
from tests.decoding import Trace
from triton_mega.backends.triton_staged import TritonStaged
from triton_mega.gate import KV_BOUND
from triton_mega.reference import CONTRACTS, decode
from triton_mega.rope import rope_tables
from triton_mega.spec import TINY, DecoderSpec
from triton_mega.state import KVCache
from triton_mega.testing import assert_close, first_divergence
from triton_mega.tuning import default_tuning
from triton_mega.weights import DecoderWeights, random_weights

pytestmark = pytest.mark.interpret

EXACT = CONTRACTS["fp32_activations"].in_fp64()
BOUND = 5e-6
MAX_POSITIONS = 48
TALKER, PREDICTOR = TINY.talker, TINY.predictor
ONE_LAYER = replace(TALKER, num_hidden_layers=1)
ATTENTION_T = default_tuning(TALKER, None).attention_t


def make(
    spec: DecoderSpec,
    weights: DecoderWeights,
    history: int,
    positions: torch.Tensor | None = None,
    **tuning: int,
) -> TritonStaged:
    """An engine whose cache holds ``history`` rows, NaN after them."""
    changed = replace(default_tuning(spec, None), **tuning)
    options = {"max_positions": MAX_POSITIONS, "positions": positions, "tuning": changed}
    engine = TritonStaged(spec, weights, **options)  # type: ignore[arg-type]
    engine.cache.fill_random(history, seed=4)
    return engine


def oracle(
    spec: DecoderSpec,
    weights: DecoderWeights,
    row: torch.Tensor,
    position: int,
    cache: KVCache,
    positions: torch.Tensor | None = None,
    *,
    kv_given: bool = True,
) -> Trace:
    """The fp64 reference's trace; behind the new K/V row of ``cache``, unless told otherwise."""
    if positions is None:
        positions = torch.arange(MAX_POSITIONS)
    own = KVCache.allocate(spec, MAX_POSITIONS)
    own.copy_from(cache)
    trace: Trace = {}
    tables = rope_tables(positions, spec)
    head = spec.num_lm_heads - 1
    decode(
        spec, weights, row, position, own, *tables, EXACT, head=head, trace=trace, kv_given=kv_given
    )
    if not kv_given:
        trace |= {"new k": own.k[:, :, position], "new v": own.v[:, :, position]}
    return trace


def check(engine: TritonStaged, position: int, positions: torch.Tensor | None = None) -> Trace:
    """One traced step is right at every stage of every layer, and so is the row it appends."""
    spec, weights = engine.spec, engine.weights
    row = random_rows(spec, 1)
    history = KVCache.allocate(spec, MAX_POSITIONS)
    history.copy_from(engine.cache)
    trace = engine.trace_step(row, position, spec.num_lm_heads - 1)
    want = oracle(spec, weights, row, position, engine.cache, positions)
    divergence = first_divergence(trace, want, BOUND)
    assert divergence is None, str(divergence)
    appended = oracle(spec, weights, row, position, history, positions, kv_given=False)
    assert_close(engine.cache.k[:, :, position], appended["new k"], KV_BOUND, "new k")
    assert_close(engine.cache.v[:, :, position], appended["new v"], KV_BOUND, "new v")
    assert torch.equal(engine.cache.k[:, :, :position], history.k[:, :, :position])
    assert engine.cache.v[:, :, position + 1 :].isnan().all()
    return trace


@pytest.mark.parametrize("programs", [1, 2, 5])
@pytest.mark.parametrize("position", [0, 1, ATTENTION_T - 1, ATTENTION_T, ATTENTION_T + 1, 47])
def test_talker_at_any_grid(programs: int, position: int) -> None:
    weights = random_weights(TALKER, seed=3)
    check(make(TALKER, weights, position, num_programs=programs), position)


@pytest.mark.parametrize(("programs", "position"), [(1, 0), (2, ATTENTION_T), (5, 47)])
def test_predictor_at_any_grid(programs: int, position: int) -> None:
    weights = random_weights(PREDICTOR, seed=3)
    check(make(PREDICTOR, weights, position, num_programs=programs), position)


@pytest.mark.parametrize(
    "tuning",
    [
        {"qkv_k": 32, "gate_up_k": 128, "down_k": 128, "head_k": 32},
        {"qkv_n": 32, "o_n": 8, "gate_up_n": 16, "down_n": 32, "head_n": 16, "num_programs": 3},
        {"num_warps": 2, "qkv_n": 2, "gate_up_n": 2, "down_n": 2, "head_n": 2, "num_programs": 7},
        {"splits": 1, "splits_at_once": 1, "attention_t": 16},
        {"splits": 5, "splits_at_once": 4, "attention_t": 2, "num_programs": 4},
        {"splits": 9, "splits_at_once": 1, "attention_t": 1},
    ],
)
def test_tile_shapes_do_not_change_what_is_computed(tuning: dict[str, int]) -> None:
    weights = random_weights(ONE_LAYER, seed=3)
    check(make(ONE_LAYER, weights, 21, **tuning), 21)


@pytest.mark.parametrize("row", [0, ATTENTION_T - 1, ATTENTION_T, 2 * ATTENTION_T, 17, 18])
def test_no_cached_row_is_left_out(row: int) -> None:
    """One row dominates: dropping it, or taking it twice, shows."""
    engine = make(ONE_LAYER, random_weights(ONE_LAYER, seed=3), 19, num_programs=2)
    engine.cache.v[:, :, row] *= 100
    check(engine, 19)


@pytest.mark.parametrize("position", [0, ATTENTION_T, 3 * ATTENTION_T - 1])
def test_newest_row_wins(position: int) -> None:
    weights = random_weights(ONE_LAYER, seed=3)
    weights.qkv[:, -ONE_LAYER.kv_size :] *= 100  # the values of the row that is appended
    check(make(ONE_LAYER, weights, position, num_programs=5), position)


def test_unequal_rotary_axes() -> None:
    generator = torch.Generator().manual_seed(1)
    positions = torch.randint(0, 40, (3, MAX_POSITIONS), generator=generator)
    weights = random_weights(ONE_LAYER, seed=3)
    unequal = check(make(ONE_LAYER, weights, 9, positions), 9, positions)
    equal = check(make(ONE_LAYER, weights, 9), 9)
    divergence = first_divergence(unequal, equal, BOUND)
    assert divergence is not None
    assert (divergence.layer, divergence.stage) == (0, "attention")


TWO_LAYERS = replace(TALKER, num_hidden_layers=2)


@pytest.mark.parametrize(
    ("name", "layer", "stage"),
    [
        ("input_norm", 1, "qkv_proj"),
        ("qkv", 0, "qkv_proj"),
        ("q_norm", 1, "attention"),
        ("o", 1, "o_proj"),
        ("post_attention_norm", 0, "gate_up_proj"),
        ("gate_up", 1, "gate_up_proj"),
        ("down", 0, "down_proj"),
        ("norm", None, "final_norm"),
        ("lm_head", None, "lm_head"),
    ],
)
def test_wrong_weight_is_traced_to_its_stage(name: str, layer: int | None, stage: str) -> None:
    wrong, right = (random_weights(TWO_LAYERS, seed=3) for _ in range(2))
    tensor = getattr(wrong, name)
    tensor[... if layer is None else layer].view(-1)[:16] *= 2
    engine = make(TWO_LAYERS, wrong, 5, num_programs=2)
    row = random_rows(TWO_LAYERS, 1)
    trace = engine.trace_step(row, 5)
    want = oracle(TWO_LAYERS, right, row, 5, engine.cache)
    divergence = first_divergence(trace, want, BOUND)
    assert divergence is not None
    assert (divergence.layer, divergence.stage) == (layer, stage)


def test_wrong_key_norm_is_traced_to_the_row_it_appends() -> None:
    wrong, right = (random_weights(TWO_LAYERS, seed=3) for _ in range(2))
    wrong.k_norm[0] *= 2
    engine = make(TWO_LAYERS, wrong, 5)
    row = random_rows(TWO_LAYERS, 1)
    want = oracle(TWO_LAYERS, right, row, 5, engine.cache, kv_given=False)
    del want["new k"], want["new v"]
    divergence = first_divergence(engine.trace_step(row, 5, 0), want, KV_BOUND)
    assert divergence is not None
    assert (divergence.layer, divergence.stage) == (0, "attention")


@pytest.mark.parametrize("cached_row", [0, 4])
def test_wrong_cached_row_is_traced_to_its_layer(cached_row: int) -> None:
    weights = random_weights(TWO_LAYERS, seed=3)
    engine = make(TWO_LAYERS, weights, 5)
    row = random_rows(TWO_LAYERS, 1)
    trace = engine.trace_step(row, 5)
    engine.cache.v[1, 0, cached_row] *= -1
    divergence = first_divergence(trace, oracle(TWO_LAYERS, weights, row, 5, engine.cache), BOUND)
    assert divergence is not None
    assert (divergence.layer, divergence.stage) == (1, "attention")

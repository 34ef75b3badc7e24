"""The Triton backends in the interpreter: the contract of all backends, and the barrier's words."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.backend_contract import BackendContract, assert_same, random_rows
from triton_mega.backends import BackendUnavailable, BarrierTimeout, triton_common
from triton_mega.backends.triton_persistent import TritonPersistent
from triton_mega.backends.triton_staged import TritonStaged
from triton_mega.kernels.sync import BASE, COUNTER, ERROR, ERROR_INDEX, JITTER_SINK
from triton_mega.spec import TINY
from triton_mega.tuning import default_tuning
from triton_mega.weights import random_weights

pytestmark = pytest.mark.interpret

SPEC = replace(TINY.predictor, num_hidden_layers=1)
BARRIERS = 5  # one behind each stage of the layer
MOST = 2**31 - 1


class TestTritonStaged(BackendContract):
    backend = "triton_staged"


class TestTritonPersistent(BackendContract):
    backend = "triton_persistent"


def engine(kind: type[Any] = TritonPersistent, **options: Any) -> Any:
    """An engine of one layer with three cached rows."""
    made = kind(SPEC, random_weights(SPEC, seed=3), max_positions=8, **options)
    made.cache.fill_random(3, seed=4)
    return made


def words(persistent: TritonPersistent) -> tuple[int, int, int]:
    """Counter, base and error word."""
    return tuple(int(persistent._sync[word.value]) for word in (COUNTER, BASE, ERROR))  # type: ignore[return-value]


def test_one_launch_has_the_bits_of_one_launch_a_stage() -> None:
    persistent, staged = engine(), engine(TritonStaged)
    rows = random_rows(SPEC, 2)
    trace, want = persistent.trace_step(rows[:1], 3, 4), staged.trace_step(rows[:1], 3, 4)
    assert {stage for stage in want if not torch.equal(trace[stage], want[stage])} == set()
    assert all(torch.isfinite(tensor).all() for tensor in trace.values())
    assert_same(persistent.run_steps(rows, 3, 2), staged.run_steps(rows, 3, 2))
    assert torch.equal(persistent.cache.k[:, :, :5], staged.cache.k[:, :, :5])


def test_grid_beyond_what_is_resident_is_refused() -> None:
    tuning = replace(default_tuning(SPEC, None), num_programs=4)
    message = "at most 1 can be resident at once on the Triton interpreter, got 4"
    with pytest.raises(ValueError, match=rf"tuning\.num_programs: {message}"):
        engine(tuning=tuning)
    assert engine(TritonStaged, tuning=tuning).run_steps(random_rows(SPEC, 1), 3)


def test_tuning_that_cannot_be_built_is_refused() -> None:
    with pytest.raises(ValueError, match=r"tuning\.qkv_n: expected at least 4 rows"):
        engine(tuning=replace(default_tuning(SPEC, None), qkv_n=1))


def test_every_launch_moves_the_base_past_its_barriers() -> None:
    persistent, rows = engine(), random_rows(SPEC, 3)
    assert words(persistent) == (0, 0, 0)
    persistent.run_steps(rows[:1], 3)
    assert words(persistent) == (BARRIERS, BARRIERS, 0)
    persistent.run_steps(rows, 3)
    assert words(persistent) == (4 * BARRIERS, 4 * BARRIERS, 0)


def test_counter_may_wrap() -> None:
    rows = random_rows(SPEC, 2)
    want = engine().run_steps(rows, 3)
    persistent = engine()
    persistent._sync[COUNTER.value] = persistent._sync[BASE.value] = MOST - 2
    assert_same(persistent.run_steps(rows, 3), want)
    persistent.synchronize()
    wrapped = MOST - 2 + 2 * BARRIERS - 2**32
    assert words(persistent) == (wrapped, wrapped, 0)
    assert_same(persistent.run_steps(rows, 3), want)


def test_arrival_beyond_the_wrap_is_not_behind() -> None:
    persistent = engine(spin_limit=1)
    persistent._sync[BASE.value], persistent._sync[COUNTER.value] = MOST, -MOST - 1
    persistent.run_steps(random_rows(SPEC, 1), 3)
    persistent.synchronize()


def test_lost_arrival_ends_the_launch() -> None:
    rows = random_rows(SPEC, 2)
    persistent = engine(spin_limit=50)
    want = persistent.run_steps(rows, 3)
    persistent._sync[COUNTER.value] -= 1
    persistent.run_steps(rows, 3)
    # It left after the layer that it was in, and did not move the base.
    assert words(persistent) == (3 * BARRIERS - 1, 2 * BARRIERS, 1)
    message = "program 0 of 1 gave up after 50 polls at the start of the launch"
    with pytest.raises(BarrierTimeout, match=message):
        persistent.synchronize()
    persistent.synchronize()  # said once
    assert words(persistent) == (0, 0, 0)
    assert_same(persistent.run_steps(rows, 3), want)


def test_timeout_names_the_barrier() -> None:
    persistent = engine()
    persistent._sync[ERROR.value : ERROR.value + 2] = torch.tensor([1, 7], dtype=torch.int32)
    with pytest.raises(BarrierTimeout, match="at step 1, layer 0, after attention"):
        persistent.synchronize()


def test_first_error_is_the_one_reported() -> None:
    persistent = engine(spin_limit=1)
    persistent._sync[COUNTER.value] = -1
    persistent._sync[ERROR.value], persistent._sync[ERROR_INDEX.value] = 4, 2
    persistent.run_steps(random_rows(SPEC, 1), 3)
    with pytest.raises(BarrierTimeout, match=r"program 3 .* at step 0, layer 0, after attention"):
        persistent.synchronize()


def test_jitter_idles_and_changes_no_bit() -> None:
    rows = random_rows(SPEC, 2)
    plain, jitter = engine(), engine(jitter=True)
    assert_same(jitter.run_steps(rows, 3), plain.run_steps(rows, 3))
    idle = [int(each._sync[JITTER_SINK.value]) for each in (plain, jitter)]
    assert idle[0] == 0 < idle[1]


@pytest.mark.parametrize("kind", [TritonStaged, TritonPersistent])
def test_a_cpu_needs_the_interpreter(kind: type[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_common, "interpreted", lambda: False)
    with pytest.raises(BackendUnavailable, match="device cpu is not a CUDA GPU") as caught:
        engine(kind)
    assert "TRITON_INTERPRET=1" in caught.value.hint


@pytest.mark.parametrize("kind", [TritonStaged, TritonPersistent])
def test_a_gpu_needs_the_compiler(kind: type[Any]) -> None:
    with pytest.raises(BackendUnavailable, match=r"TRITON_INTERPRET=1 is set \(unset it\)"):
        kind.check_available(torch.device("cuda"))


@pytest.mark.parametrize("kind", [TritonStaged, TritonPersistent])
def test_a_trace_is_of_one_row(kind: type[Any]) -> None:
    with pytest.raises(ValueError, match="inputs_embeds: expected one row, got 2"):
        engine(kind).trace_step(random_rows(SPEC, 2), 3)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"head_dim": 12}, "head_dim: expected a power of two, got 12"),
        ({"hidden_size": 97}, "hidden_size: expected an even number, got 97"),
        ({"intermediate_size": 15}, "intermediate_size: expected an even number, got 15"),
    ],
)
def test_shapes_that_the_kernels_cannot_compute_are_named(
    change: dict[str, int], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        triton_common.shape_constants(replace(SPEC, **change))

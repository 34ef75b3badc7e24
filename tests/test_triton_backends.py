"""The Triton backends in the interpreter: the contract, the barrier's words, and refusals."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.backend_contract import BackendContract, assert_same, random_rows
from triton_mega.backends import BackendUnavailable, BarrierTimeout, StepOutput
from triton_mega.backends.triton_common import TritonBackend
from triton_mega.backends.triton_persistent import TritonPersistent
from triton_mega.backends.triton_staged import TritonStaged
from triton_mega.kernels import sync
from triton_mega.spec import TINY, Role
from triton_mega.tuning import default_tuning
from triton_mega.weights import random_weights

pytestmark = pytest.mark.interpret

SPEC = TINY.predictor
BARRIERS = 5 * SPEC.num_hidden_layers
ROWS = random_rows(SPEC, 2)
HISTORY = 3
COUNTER, BASE, JITTER_SINK = sync.COUNTER.value, sync.BASE.value, sync.JITTER_SINK.value
ERROR, ERROR_INDEX = sync.ERROR.value, sync.ERROR_INDEX.value

both = pytest.mark.parametrize("backend", [TritonStaged, TritonPersistent])


class TestTritonStaged(BackendContract):
    backend = "triton_staged"


class TestTritonPersistent(BackendContract):
    backend = "triton_persistent"


def make(
    backend: type[TritonBackend], role: Role = "code_predictor", **options: Any
) -> TritonBackend:
    """An engine on TINY with HISTORY cached rows."""
    spec = TINY.decoders[role]
    engine = backend(spec, random_weights(spec, seed=3), max_positions=8, **options)
    engine.cache.fill_random(HISTORY, seed=4)
    return engine


def persistent(**options: Any) -> TritonPersistent:
    engine = make(TritonPersistent, **options)
    assert isinstance(engine, TritonPersistent)
    return engine


@pytest.fixture(scope="module")
def want() -> StepOutput:
    """What the two steps of ROWS give."""
    return persistent().run_steps(ROWS, HISTORY)


def test_steps_of_both_backends_have_the_same_bits(want: StepOutput) -> None:
    staged = make(TritonStaged)
    assert staged.tuning.num_programs == 1
    assert_same(staged.run_steps(ROWS, HISTORY), want)


@pytest.mark.parametrize("role", ["talker", "code_predictor"])
def test_traces_of_both_backends_have_the_same_bits(role: Role) -> None:
    staged, other = make(TritonStaged, role), make(TritonPersistent, role)
    row = random_rows(staged.spec, 1)
    want, got = (engine.trace_step(row, HISTORY) for engine in (staged, other))
    assert list(got) == list(want)
    assert [stage for stage in want if not torch.equal(got[stage], want[stage])] == []
    for name in ("k", "v"):
        ours, theirs = (getattr(engine.cache, name) for engine in (other, staged))
        assert torch.equal(ours[:, :, : HISTORY + 1], theirs[:, :, : HISTORY + 1])


@both
def test_trace_is_of_one_row_and_of_the_head_asked_for(backend: type[TritonBackend]) -> None:
    engine = make(backend)
    with pytest.raises(ValueError, match="inputs_embeds: expected one row, got 2"):
        engine.trace_step(ROWS, HISTORY)
    trace = engine.trace_step(ROWS[:1], HISTORY, head=4)
    got = engine.run_steps(ROWS[:1], HISTORY, head=4)
    assert_same(StepOutput(trace["final_norm"][None], trace["lm_head"][None]), got)


def test_larger_grid_is_refused_where_programs_run_one_after_another() -> None:
    tuning = replace(default_tuning(SPEC, None), num_programs=4)
    message = "num_programs: at most 1 can be resident at once on the Triton interpreter, got 4"
    with pytest.raises(ValueError, match=message):
        persistent(tuning=tuning)
    assert make(TritonStaged, tuning=tuning).tuning.num_programs == 4


@both
def test_tuning_that_cannot_be_built_is_refused(backend: type[TritonBackend]) -> None:
    tuning = replace(default_tuning(SPEC, None), down_n=1)
    with pytest.raises(ValueError, match=r"tuning\.down_n: expected at least 4 rows"):
        make(backend, tuning=tuning)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("hidden_size", 47, "hidden_size: expected an even number, got 47"),
        ("intermediate_size", 81, "intermediate_size: expected an even number, got 81"),
        ("head_dim", 24, "head_dim: expected a power of two, got 24"),
    ],
)
def test_shape_that_the_kernels_cannot_compute_is_refused(
    field: str, value: int, message: str
) -> None:
    spec = replace(SPEC, **{field: value})
    with pytest.raises(ValueError, match=message):
        TritonStaged(spec, random_weights(spec, seed=3), max_positions=8)


@both
def test_cpu_without_the_interpreter_is_refused(
    backend: type[TritonBackend], monkeypatch: pytest.MonkeyPatch
) -> None:
    backend.check_available(torch.device("cpu"))
    monkeypatch.delenv("TRITON_INTERPRET")
    with pytest.raises(BackendUnavailable, match="device cpu is not a CUDA GPU") as caught:
        make(backend)
    assert (caught.value.backend, caught.value.hint) == (
        backend.name,
        "TRITON_INTERPRET=1 runs it on a CPU",
    )


@both
def test_gpu_in_the_interpreter_is_refused(backend: type[TritonBackend]) -> None:
    with pytest.raises(BackendUnavailable, match=r"TRITON_INTERPRET=1 is set \(unset it\)"):
        backend.check_available(torch.device("cuda"))


def test_counter_and_base_move_on_by_a_launchs_barriers() -> None:
    engine = persistent()
    engine.run_steps(ROWS, HISTORY)
    assert words(engine) == {COUNTER: 2 * BARRIERS, BASE: 2 * BARRIERS}
    engine.trace_step(ROWS[:1], HISTORY)
    assert words(engine) == {COUNTER: 3 * BARRIERS, BASE: 3 * BARRIERS}
    assert engine.schedule.barriers_per_step == BARRIERS


def words(engine: TritonPersistent) -> dict[int, int]:
    """The barrier's words that are not zero, by index."""
    return {i: word for i, word in enumerate(engine._sync.tolist()) if word}


def test_counter_may_wrap(want: StepOutput) -> None:
    engine, start = persistent(spin_limit=3), 2**31 - 1 - BARRIERS // 2
    engine._sync[COUNTER] = engine._sync[BASE] = start
    assert_same(engine.run_steps(ROWS, HISTORY), want)
    engine.synchronize()
    wrapped = start + 2 * BARRIERS - 2**32
    assert words(engine) == {COUNTER: wrapped, BASE: wrapped}


def test_timeout_is_raised_and_the_engine_can_go_on(want: StepOutput) -> None:
    engine = persistent(spin_limit=5)
    engine._sync[COUNTER] = -1
    engine.run_steps(ROWS, HISTORY)
    assert engine._sync[BASE] == 0  # an abandoned launch does not move it
    message = "program 0 of 1 gave up after 5 polls at the start of the launch"
    with pytest.raises(BarrierTimeout, match=message):
        engine.synchronize()
    engine.synchronize()  # said once
    assert words(engine) == {}
    assert_same(engine.run_steps(ROWS, HISTORY), want)
    engine.synchronize()


def test_timeout_names_program_and_barrier_of_the_error_words() -> None:
    engine = persistent()
    engine._sync[ERROR] = 1 + 6
    engine._sync[ERROR_INDEX] = BARRIERS + 7
    with pytest.raises(BarrierTimeout, match=r"program 6 .* at step 1, layer 1, after attention"):
        engine.synchronize()


def test_first_programs_error_is_kept() -> None:
    engine = persistent(spin_limit=1)
    engine._sync[COUNTER] = -1
    engine._sync[ERROR], engine._sync[ERROR_INDEX] = 4, 2
    engine.run_steps(ROWS[:1], HISTORY)
    with pytest.raises(BarrierTimeout, match=r"program 3 .* step 0, layer 0, after attention"):
        engine.synchronize()


def test_jitter_gives_the_same_bits(want: StepOutput) -> None:
    engine = persistent(jitter=True)
    assert_same(engine.run_steps(ROWS, HISTORY), want)
    assert engine._sync[JITTER_SINK] > 2 * BARRIERS  # it did idle

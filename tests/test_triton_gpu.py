"""What only a GPU can show of the Triton backends: races, residency, compiles, the full shape.

Three variants of the persistent kernel are compiled at the 1.7B shape (plain, jitter, half the
grid), at the same time; everything else is TINY.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch

from tests.backend_contract import KV_FLIP_BOUND, BackendContract, random_rows
from tests.fixtures import HERE
from triton_mega import gate
from triton_mega.backends import BarrierTimeout, DecodeBackend
from triton_mega.backends.triton_persistent import TritonPersistent
from triton_mega.backends.triton_staged import TritonStaged
from triton_mega.device import DeviceInfo
from triton_mega.kernels.persistent import decode_persistent_kernel
from triton_mega.kernels.staged import STAGE_KERNELS
from triton_mega.kernels.sync import COUNTER
from triton_mega.spec import TINY, TTSSpec
from triton_mega.state import KVCache
from triton_mega.testing import assert_close
from triton_mega.tuning import TuningConfig, default_tuning
from triton_mega.weights import DecoderWeights, random_weights

pytestmark = pytest.mark.gpu

DEVICE = "cuda:0"
SPEC = TTSSpec.from_json(HERE / "configs" / "1.7B-CustomVoice.config.json").talker
MAX_POSITIONS = 2048
FREE_BYTES = 20_000_000_000
"""GPU memory for the weights, a copy of them in each engine, and the reference beside them."""

HISTORY = 100
STEPS = 2
LAUNCHES = 1000


class TestTritonStaged(BackendContract):
    backend, device = "triton_staged", DEVICE


class TestTritonPersistent(BackendContract):
    backend, device = "triton_persistent", DEVICE


class Result(NamedTuple):
    """Everything that a launch writes for its caller."""

    hidden: torch.Tensor  # [n, D]
    logits: torch.Tensor  # [n, V]
    k: torch.Tensor  # [L, HKV, n, HD]
    v: torch.Tensor  # [L, HKV, n, HD]


def launch(
    engine: TritonPersistent | TritonStaged, rows: torch.Tensor, position: int, head: int = 0
) -> Result:
    """Decodes ``rows`` behind the engine's cache; the new cache rows are poisoned beforehand.

    Does not wait for the GPU.
    """
    new = slice(position, position + len(rows))
    for tensor in (engine.cache.k, engine.cache.v):
        tensor[:, :, new] = float("nan")
    output = engine.run_steps(rows, position, head)
    k, v = (tensor[:, :, new].clone() for tensor in (engine.cache.k, engine.cache.v))
    return Result(output.hidden, output.logits, k, v)


def same(got: Result, want: Result) -> bool:
    """Both have the same bits, and no NaN."""
    return all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def rows_of(n: int, seed: int = 0) -> torch.Tensor:
    return random_rows(SPEC, n, seed).to(DEVICE)


def tiny_engine(tuning: TuningConfig | None = None, **options: Any) -> TritonPersistent:
    """An engine on TINY's talker with 30 cached rows."""
    weights = random_weights(TINY.talker, 3).to(DEVICE)
    engine = TritonPersistent(TINY.talker, weights, max_positions=64, tuning=tuning, **options)
    engine.cache.fill_random(30, seed=4)
    return engine


def tiny_tuning(**changes: Any) -> TuningConfig:
    """The default for TINY on this GPU, changed."""
    return replace(default_tuning(TINY.talker, DeviceInfo.read(0)), source="a test", **changes)


@pytest.fixture(scope="module")
def weights() -> DecoderWeights:
    free, _ = torch.cuda.mem_get_info()
    if free < FREE_BYTES:
        pytest.skip(f"needs {FREE_BYTES / 1e9:.0f} GB of free GPU memory, has {free / 1e9:.1f}")
    return random_weights(SPEC, 0, DEVICE)


@pytest.fixture(scope="module")
def history() -> KVCache:
    cache = KVCache.allocate(SPEC, MAX_POSITIONS, device=DEVICE)
    cache.fill_random(HISTORY, seed=1)
    return cache


@pytest.fixture(scope="module")
def compiled_engines(weights: DecoderWeights) -> dict[str, TritonPersistent]:
    """One engine for each variant of the kernel."""
    tiny_engine()  # Triton sets up its own state for this GPU in one thread
    tuning = default_tuning(SPEC, DeviceInfo.read(0))
    half = tuning.num_programs // 2
    variants: dict[str, dict[str, Any]] = {
        "plain": {},
        "jitter": {"jitter": True},
        "half": {"tuning": replace(tuning, num_programs=half, source="half the grid")},
    }

    def make(options: dict[str, Any]) -> TritonPersistent:
        return TritonPersistent(SPEC, weights, max_positions=MAX_POSITIONS, **options)

    with ThreadPoolExecutor(len(variants)) as pool:
        made = {name: pool.submit(make, options) for name, options in variants.items()}
        return {name: future.result() for name, future in made.items()}


@pytest.fixture
def engines(
    compiled_engines: dict[str, TritonPersistent], history: KVCache
) -> dict[str, TritonPersistent]:
    """The same engines, all with the same cached rows again."""
    for engine in compiled_engines.values():
        engine.cache.copy_from(history)
    return compiled_engines


def compiled_kernels() -> int:
    """How many kernels this process has compiled, or read from Triton's cache on disk."""
    kernels = (decode_persistent_kernel, *STAGE_KERNELS.values())
    return sum(len(found[0]) for kernel in kernels for found in kernel.device_caches.values())


# The same bits, whatever the timing


def test_a_thousand_launches_give_the_same_bits(engines: dict[str, TritonPersistent]) -> None:
    engine, rows = engines["plain"], rows_of(STEPS)
    want = launch(engine, rows, HISTORY)
    differing = [i for i in range(LAUNCHES) if not same(launch(engine, rows, HISTORY), want)]
    engine.synchronize()
    assert torch.isfinite(want.logits).all()
    assert differing == []
    assert not same(launch(engine, rows_of(STEPS, seed=1), HISTORY), want)


@pytest.mark.parametrize("position", [0, 1, 33, HISTORY])
def test_jitter_build_gives_the_same_bits(
    engines: dict[str, TritonPersistent], position: int
) -> None:
    rows = rows_of(STEPS)
    want = launch(engines["plain"], rows, position)
    for _ in range(10):
        assert same(launch(engines["jitter"], rows, position), want)
    engines["jitter"].synchronize()


def test_jitter_build_is_another_kernel(engines: dict[str, TritonPersistent]) -> None:
    """It takes longer, or it has not idled."""
    rows = rows_of(STEPS)

    def fastest_ms(engine: TritonPersistent) -> float:
        times = []
        for _ in range(5):
            events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
            events[0].record()
            engine.run_steps(rows, HISTORY)
            events[1].record()
            events[1].synchronize()
            times.append(events[0].elapsed_time(events[1]))
        return min(times)

    plain, jitter = (fastest_ms(engines[name]) for name in ("plain", "jitter"))
    print(f"plain {plain:.3f} ms, jitter {jitter:.3f} ms for {STEPS} steps")
    assert jitter > 1.2 * plain


@pytest.mark.parametrize("grid", ["half", "plain"])
def test_two_engines_on_two_streams_agree_with_each_alone(
    engines: dict[str, TritonPersistent], weights: DecoderWeights, grid: str
) -> None:
    """Half grids are resident together; of two whole ones the second waits for the first."""
    left = engines[grid]
    right = TritonPersistent(SPEC, weights, max_positions=MAX_POSITIONS, tuning=left.tuning)
    right.cache.fill_random(HISTORY + 7, seed=9)
    pair = ((left, rows_of(4), HISTORY), (right, rows_of(4, seed=2), HISTORY + 7))
    streams = [torch.cuda.Stream() for _ in pair]
    alone = [launch(*each) for each in pair]
    torch.cuda.synchronize()
    together: list[list[Result]] = [[], []]
    for _ in range(20):
        for results, each, stream in zip(together, pair, streams, strict=True):
            with torch.cuda.stream(stream):
                results.append(launch(*each))
    torch.cuda.synchronize()
    for (engine, _, _), results, want in zip(pair, together, alone, strict=True):
        engine.synchronize()
        assert [i for i, got in enumerate(results) if not same(got, want)] == []
    assert not torch.equal(alone[0].logits, alone[1].logits)


# Barriers that cannot complete


def test_grid_that_cannot_be_resident_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    default, device = tiny_engine(), DeviceInfo.read(0)
    programs = 8 * device.sm_count
    with pytest.raises(ValueError, match=r"tuning\.num_programs: at most \d+ can be") as caught:
        tiny_engine(tiny_tuning(num_programs=programs))
    assert str(caught.value).endswith(f"got {programs}")
    most = int(re.findall(r"at most (\d+)", str(caught.value))[0])
    assert default.tuning.num_programs <= most < programs

    rows = random_rows(TINY.talker, 3).to(DEVICE)
    largest = tiny_engine(tiny_tuning(num_programs=most))
    got, want = launch(largest, rows, 30), launch(default, rows, 30)
    largest.synchronize()
    assert_close(got.logits, want.logits, KV_FLIP_BOUND)
    # The driver draws the line at the same place.
    monkeypatch.setattr(TritonPersistent, "_check_resident", lambda self: None)
    beyond = tiny_engine(tiny_tuning(num_programs=most + 1))
    with pytest.raises(RuntimeError, match="too many blocks in cooperative launch"):
        beyond.run_steps(rows, 30)


def test_a_program_out_of_patience_is_named_and_the_engine_works_again(
    engines: dict[str, TritonPersistent], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, rows = engines["plain"], rows_of(STEPS)
    want = launch(engine, rows, HISTORY)
    engine.synchronize()
    programs = engine.tuning.num_programs
    stages = "qkv_proj|attention|o_proj|gate_up_proj|down_proj"
    for _ in range(3):
        with monkeypatch.context() as impatient:
            impatient.setattr(engine, "spin_limit", 0)
            engine.run_steps(rows, HISTORY)
            with pytest.raises(
                BarrierTimeout,
                match=rf"program \d+ of {programs} gave up after 0 polls at "
                rf"step \d, layer \d+, after ({stages}); outputs",
            ):
                engine.synchronize()
        engine.synchronize()  # said once
        assert same(launch(engine, rows, HISTORY), want)
        engine.synchronize()


def test_a_barrier_that_never_completes_ends_the_launch(
    engines: dict[str, TritonPersistent], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, rows = engines["jitter"], rows_of(STEPS)
    want = launch(engine, rows, HISTORY)
    engine._sync[COUNTER.value] -= 1  # an arrival is lost
    with monkeypatch.context() as patient:
        patient.setattr(engine, "spin_limit", 10_000)
        engine.run_steps(rows, HISTORY)
        with pytest.raises(BarrierTimeout, match="gave up after 10000 polls at the start of the"):
            engine.synchronize()
    assert same(launch(engine, rows, HISTORY), want)
    engine.synchronize()


# Compiled once, and captured


def test_no_compile_after_the_engine_is_made(
    engines: dict[str, TritonPersistent],
) -> None:
    engine, before = engines["plain"], compiled_kernels()
    rows = rows_of(65)
    for position in range(65):
        engine.run_steps(rows[position : position + 1], position)
    for n in (1, 2, 16, 65):
        engine.run_steps(rows[:n], 0)
    engine.trace_step(rows[:1], 65)
    engine.run_steps(rows[:1], MAX_POSITIONS - 1)
    engine.synchronize()
    assert compiled_kernels() == before
    tiny_engine(tiny_tuning(attention_t=8))  # no other test has this kernel
    assert compiled_kernels() == before + 1


@pytest.mark.parametrize("kind", [TritonPersistent, TritonStaged])
def test_no_compile_for_another_position_or_head(kind: type[DecodeBackend]) -> None:
    spec = TINY.predictor
    engine = kind(spec, random_weights(spec, 3).to(DEVICE), max_positions=64)
    row = random_rows(spec, 1).to(DEVICE)
    engine.run_steps(row, 0)
    before = compiled_kernels()
    for position in range(64):
        engine.run_steps(row, position, position % spec.num_lm_heads)
    engine.trace_step(row, 63)
    engine.synchronize()
    assert compiled_kernels() == before > 0


def captured(call: Callable[[], Any]) -> tuple[torch.cuda.CUDAGraph, Any]:
    """``call`` as a CUDA graph, and what it returned."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = call()
    return graph, output


def test_first_call_can_be_captured_in_a_cuda_graph() -> None:
    tuning = tiny_tuning(splits=3)  # no other test has this kernel
    engine, plain = (tiny_engine(tuning) for _ in range(2))
    before = compiled_kernels()
    rows = random_rows(TINY.talker, 4).to(DEVICE)
    graph, output = captured(lambda: engine.run_steps(rows, 30))
    assert compiled_kernels() == before
    for seed in range(3):
        rows.copy_(random_rows(TINY.talker, 4, seed))
        want = launch(plain, rows, 30)
        for tensor in (output.hidden, output.logits, engine.cache.k[:, :, 30:]):
            tensor.fill_(float("nan"))
        graph.replay()
        engine.synchronize()
        rows_written = (tensor[:, :, 30:34] for tensor in (engine.cache.k, engine.cache.v))
        assert same(Result(output.hidden, output.logits, *rows_written), want)


def test_full_shape_in_a_cuda_graph(engines: dict[str, TritonPersistent]) -> None:
    engine, rows = engines["plain"], rows_of(STEPS)
    want = launch(engine, rows, HISTORY)
    graph, output = captured(lambda: engine.run_steps(rows, HISTORY))
    for _ in range(20):
        output.logits.fill_(float("nan"))
        graph.replay()
        assert torch.equal(output.logits, want.logits)
    engine.synchronize()
    assert same(launch(engine, rows, HISTORY), want)  # launches and replays share the barrier


# The full shape against the reference


@pytest.mark.parametrize(
    ("position", "steps"),
    [*((p, 1) for p in (0, 1, 31, 32, 33, 127, 128, 1500, MAX_POSITIONS - 1)), (120, 16)],
)
def test_full_shape_is_right(
    engines: dict[str, TritonPersistent], weights: DecoderWeights, position: int, steps: int
) -> None:
    oracle = gate.Oracle.build(
        SPEC, weights, position=position, steps=steps, max_positions=MAX_POSITIONS, seed=position
    )
    found = gate.check_backend(engines["plain"], oracle).correctness
    print(f"position {position}: hidden {found.hidden}, logits {found.logits}")
    assert found.passed, found.first_divergence
    assert found.hidden.error <= found.hidden.bound == 1e-4
    assert found.logits.error <= 1e-4

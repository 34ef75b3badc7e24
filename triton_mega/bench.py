"""How fast is a backend that passed the gate, and how fast could it be on this chip?

What is timed is the call that was checked (``gate.py``). Knows nothing about configs or how results
are shown.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from triton_mega.backends import DecodeBackend
from triton_mega.device import DeviceInfo
from triton_mega.gate import Check
from triton_mega.schedule import Schedule
from triton_mega.spec import DecoderSpec
from triton_mega.tuning import default_tuning
from triton_mega.weights import DecoderWeights

CEILING_BYTES = 1 << 31
LOAD_PROGRAMS_PER_SM = (2, 3, 4)
"""Grids tried for the plain read; the best one is the ceiling."""

BULK_STAGES = (2, 3, 4, 6)
"""Ring sizes tried for the bulk read; the best one is the ceiling."""

BARRIER_ROUNDS = 1000
BARRIER_SPIN_LIMIT = 1 << 24

KERNEL_SAMPLES = 31

Clock = Literal["cuda_events", "perf_counter"]


@dataclass(frozen=True)
class Timing:
    """How long to warm a candidate up, and how many samples to take of it in how long a time.

    A candidate takes no further turn once its samples have lasted ``max_s``; it has one at least.
    """

    warmup_s: float
    repeats: int
    max_s: float

    def __post_init__(self) -> None:
        for name in ("warmup_s", "max_s"):
            if getattr(self, name) < 0:
                raise ValueError(f"timing.{name}: expected 0 or more, got {getattr(self, name)}")
        if self.repeats < 1:
            raise ValueError(f"timing.repeats: expected at least 1, got {self.repeats}")


@dataclass(frozen=True)
class Started:
    """A backend that has made its first step, and what that took."""

    backend: DecodeBackend
    cold_start_s: float
    peak_bytes: int | None


@dataclass(frozen=True)
class Latency:
    """Percentiles of one step's time in ``n`` samples."""

    clock: Clock
    n: int
    p20_us: float
    p50_us: float
    p80_us: float
    p99_us: float


class TimingFailed(RuntimeError):
    """A candidate raised while it was timed; the cause is chained."""

    def __init__(self, check: Check) -> None:
        super().__init__(f"{check.backend.name} failed while it was timed")
        self.check = check


def start(
    backend_class: type[DecodeBackend],
    spec: DecoderSpec,
    weights: DecoderWeights,
    *,
    max_positions: int,
    **options: Any,
) -> Started:
    """Makes a backend and one step with it, timed from nothing to the finished output.

    Compilers' disk caches are left as they are found. ``peak_bytes`` counts the weights and what
    the backend added at its peak; None without a GPU.
    """
    device = weights.qkv.device
    row = torch.zeros(1, spec.hidden_size, dtype=torch.bfloat16, device=device)
    before = 0
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
    began = time.perf_counter()
    backend = backend_class(spec, weights, max_positions=max_positions, **options)
    backend.run_steps(row, 0)
    backend.synchronize()
    cold_start_s = time.perf_counter() - began
    if device.type != "cuda":
        return Started(backend, cold_start_s, None)
    added = torch.cuda.max_memory_allocated(device) - before
    held = sum(tensor.nbytes for tensor in vars(weights).values())
    return Started(backend, cold_start_s, held + added)


def time_backends(checks: Sequence[Check], timing: Timing) -> tuple[list[Latency], float]:
    """Times one step of every checked backend, and the fastest a second time as if it were another.

    Candidates take turns and every round starts with another one. A sample is the whole call that
    was checked, divided by its steps; the GPU is idle when it begins.

    Returns:
        One latency per check, and the A/A difference in us: what a difference must exceed to count.

    Raises:
        ValueError: a check did not pass: wrong results have no latency.
        TimingFailed: a candidate raised.
    """
    for check in checks:
        if not check.correctness.passed:
            raise ValueError(
                f"{check.backend.name}: not timed, its check at position {check.oracle.position} "
                "did not pass"
            )
    if not checks:
        return [], 0.0
    warm = [_warm_up(check, timing.warmup_s) for check in checks]
    fastest = warm.index(min(warm))
    candidates = [*checks, checks[fastest]]
    samples: list[list[float]] = [[] for _ in candidates]
    for turn in range(timing.repeats):
        for place in rotation(len(candidates), turn):
            steps = candidates[place].oracle.rows.shape[0]
            if turn == 0 or sum(samples[place]) * steps < timing.max_s * 1e6:
                samples[place].append(_step_us(candidates[place]))
    latencies = [_latency(values, check) for values, check in zip(samples, candidates, strict=True)]
    twin = latencies.pop()
    return latencies, abs(twin.p50_us - latencies[fastest].p50_us)


def rotation(size: int, turn: int) -> list[int]:
    """Order in which ``size`` candidates run in a round: each round starts one further on."""
    return [(place + turn) % size for place in range(size)]


def step_bytes(spec: DecoderSpec, position: int, steps: int) -> int:
    """Bytes that a step must move, averaged over ``steps`` from ``position`` on."""
    schedule = Schedule(spec, default_tuning(spec, None))
    return sum(schedule.step_bytes(position + i) for i in range(steps)) // steps


def read_ceilings(device: torch.device) -> dict[str, float]:
    """Returns how fast this chip reads memory in GB/s: "loads", and "bulk" where it has them.

    Empty without a GPU. Medians; every read is checked to have seen every word.
    """
    if device.type != "cuda":
        return {}
    from triton_mega.kernels import ceilings

    words = torch.arange(CEILING_BYTES // 4, dtype=torch.int32, device=device)
    sm_count = torch.cuda.get_device_properties(device).multi_processor_count

    def gbps(programs: int, read: Callable[[torch.Tensor], None]) -> float:
        sums = torch.zeros(programs, dtype=torch.int32, device=device)
        read(sums)
        want = words.sum(dtype=torch.int64).to(torch.int32)
        if int(sums.sum(dtype=torch.int64).to(torch.int32)) != int(want):
            raise RuntimeError("a read kernel did not see every word; its speed means nothing")
        return CEILING_BYTES / _median_kernel_us(lambda: read(sums)) / 1e3

    def read_loads(sums: torch.Tensor) -> None:
        ceilings.read_loads(words, sums)

    found = {"loads": max(gbps(n * sm_count, read_loads) for n in LOAD_PROGRAMS_PER_SM)}
    if torch.cuda.get_device_capability(device) >= ceilings.BULK_CAPABILITY:
        programs = max(sm_count // 8 * 8, 1)
        most = DeviceInfo.read(device.index or 0).limits.shared_bytes_per_program
        found["bulk"] = max(
            gbps(programs, lambda sums, stages=stages: ceilings.read_bulk(words, sums, stages))  # type: ignore[misc]
            for stages in BULK_STAGES
            if ceilings.ring_bytes(stages) <= most
        )
    return found


def barrier_us(device: torch.device) -> float | None:
    """Returns the cost of one grid barrier on an idle memory system; None without a GPU.

    Numerics: median over launches of ``BARRIER_ROUNDS`` barriers, one program per multiprocessor.

    Raises:
        RuntimeError: a program gave up waiting.
    """
    if device.type != "cuda":
        return None
    from triton_mega.kernels import sync

    programs = torch.cuda.get_device_properties(device).multi_processor_count
    words = torch.zeros(sync.SYNC_WORDS, dtype=torch.int32, device=device)

    def run() -> None:
        sync.barrier_kernel[(programs,)](
            words,
            BARRIER_ROUNDS,
            BARRIER_SPIN_LIMIT,
            programs,
            num_warps=8,
            launch_cooperative_grid=True,
        )

    cost = _median_kernel_us(run) / BARRIER_ROUNDS
    if error := int(words[sync.ERROR.value]):
        raise RuntimeError(f"grid barrier: program {error - 1} gave up waiting")
    return cost


def _warm_up(check: Check, seconds: float) -> float:
    """Runs until ``seconds`` have passed, once at least; returns the last step's time."""
    began = time.perf_counter()
    while True:
        step_us = _step_us(check)
        if time.perf_counter() - began >= seconds:
            return step_us


def _step_us(check: Check) -> float:
    backend, rows = check.backend, check.oracle.rows
    try:
        call_us = _call_us(lambda: backend.run_steps(rows, check.oracle.position), backend.device)
        backend.synchronize()
    except Exception as error:
        raise TimingFailed(check) from error
    return call_us / rows.shape[0]


def _call_us(call: Callable[[], object], device: torch.device) -> float:
    """Time from the call, on an idle GPU, to the end of its work: launch latency counts."""
    if device.type != "cuda":
        began = time.perf_counter()
        call()
        return (time.perf_counter() - began) * 1e6
    torch.cuda.synchronize(device)
    return _between_events_us(call)


def _between_events_us(call: Callable[[], object]) -> float:
    first = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    last = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    first.record()
    call()
    last.record()
    last.synchronize()
    return float(first.elapsed_time(last)) * 1e3


def _latency(samples: list[float], check: Check) -> Latency:
    clock: Clock = "cuda_events" if check.backend.device.type == "cuda" else "perf_counter"
    levels = torch.tensor([0.2, 0.5, 0.8, 0.99], dtype=torch.float64)
    percentiles = torch.tensor(samples, dtype=torch.float64).quantile(levels)
    return Latency(clock, len(samples), *percentiles.tolist())


def _median_kernel_us(launch: Callable[[], object], warmup_s: float = 0.2) -> float:
    """Median time of a kernel on a GPU that is still busy with the same one when it is launched.

    So its launch latency is not counted: a ceiling that it is part of would be too low.
    """
    began = time.perf_counter()
    samples: list[float] = []
    while len(samples) < KERNEL_SAMPLES:
        launch()
        kernel_us = _between_events_us(launch)
        if time.perf_counter() - began >= warmup_s:
            samples.append(kernel_us)
    return float(torch.tensor(samples).median())

"""Gate, then time: checks a backend against the reference, and times only what passed.

What is checked and what is timed is the same call: ``n`` teacher-forced steps at a position, behind
a random K/V history. Knows nothing about records, configs or how results are shown.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from triton_mega.backends import DecodeBackend
from triton_mega.device import DeviceInfo
from triton_mega.record import Accuracy, Correctness
from triton_mega.reference import CONTRACTS, decode
from triton_mega.rope import rope_tables
from triton_mega.schedule import Schedule
from triton_mega.spec import DecoderSpec
from triton_mega.state import KVCache
from triton_mega.testing import first_divergence, relative_error
from triton_mega.tuning import default_tuning
from triton_mega.weights import DecoderWeights

FP32_BOUND = 1e-4
"""Largest relative error of contract fp32_activations against the fp32 reference."""

KV_BOUND = 2.0**-7
"""Largest relative error of the new K/V rows of contract fp32_activations: one bf16 spacing."""

BF16_FACTORS = {"hf_bf16": 2.0, "bf16_operands": 1.0}
"""Largest error of the other contracts, in units of the official bf16 arithmetic's own."""

CEILING_BYTES = 1 << 31
LOAD_PROGRAMS_PER_SM = (2, 3, 4)
"""Grids tried for the plain read; the best one is the ceiling."""

BULK_STAGES = (2, 3, 4, 6)
"""Ring sizes tried for the bulk read; the best one is the ceiling."""

BARRIER_ROUNDS = 1000
BARRIER_SPIN_LIMIT = 1 << 24

KERNEL_SAMPLES = 31

Clock = Literal["cuda_events", "perf_counter"]
Trace = dict[str, torch.Tensor]


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
class Reply:
    """Hidden states, logits and new K/V rows of all steps, and the stages of the first one."""

    hidden: torch.Tensor  # [n, D]
    logits: torch.Tensor  # [n, V]
    kv: Trace  # "k" and "v", [L, HKV * n * HD] each
    trace: Trace


@dataclass(frozen=True)
class Oracle:
    """``n`` steps from ``position`` on, and what the reference makes of them."""

    position: int
    rows: torch.Tensor  # [n, D] bf16
    history: KVCache
    exact: Reply
    official: Reply

    @classmethod
    def build(
        cls,
        spec: DecoderSpec,
        weights: DecoderWeights,
        *,
        position: int,
        steps: int,
        max_positions: int,
        seed: int,
    ) -> Oracle:
        """Draws rows and K/V history, and runs the reference over them, row by row.

        Numerics: ``exact`` is fp32 behind a bf16 cache (contract fp32_activations), ``official``
        is the official package's bf16 (contract hf_bf16).
        """
        device = weights.qkv.device
        history = KVCache.allocate(spec, max_positions, device=device)
        history.fill_random(position, seed)
        generator = torch.Generator().manual_seed(seed)
        rows = torch.randn(steps, spec.hidden_size, generator=generator).bfloat16().to(device)

        def reply(contract: str) -> Reply:
            cache = KVCache.allocate(spec, max_positions, device=device)
            cache.copy_from(history)
            return reference_reply(spec, weights, rows, position, cache, contract)

        return cls(position, rows, history, reply("fp32_activations"), reply("hf_bf16"))

    def exact_behind(self, backend: DecodeBackend) -> Reply:
        """Returns the exact reply behind the K/V rows that ``backend`` has written for the steps.

        Two sums that are equally right may round to neighbouring bf16 values of K and V. Behind few
        rows each such element moves what follows by more than ``FP32_BOUND``, which is no error.
        """
        return reference_reply(
            backend.spec,
            backend.weights,
            self.rows,
            self.position,
            backend.cache,
            "fp32_activations",
            kv_given=True,
        )


def reference_reply(
    spec: DecoderSpec,
    weights: DecoderWeights,
    rows: torch.Tensor,  # [n, D]
    position: int,
    cache: KVCache,
    contract: str,
    *,
    head: int = 0,
    kv_given: bool = False,
) -> Reply:
    """Runs the reference row by row, each axis of a position equal; see ``reference.decode``."""
    tables = rope_tables(torch.arange(cache.max_positions), spec)
    cos, sin = (table.to(rows.device) for table in tables)
    first: Trace = {}
    outputs = [
        decode(
            spec,
            weights,
            rows[i : i + 1],
            position + i,
            cache,
            cos,
            sin,
            CONTRACTS[contract],
            head=head,
            trace=None if i else first,
            kv_given=kv_given,
        )
        for i in range(rows.shape[0])
    ]
    hidden, logits = (torch.cat(tensors) for tensors in zip(*outputs, strict=True))
    return Reply(hidden, logits, new_rows(cache, position, len(outputs)), first)


def new_rows(cache: KVCache, position: int, steps: int) -> Trace:
    """Returns a copy of the rows from ``position`` on, "k" and "v", [L, HKV * steps * HD] each."""
    rows = slice(position, position + steps)
    return {name: getattr(cache, name)[:, :, rows].flatten(1).clone() for name in ("k", "v")}


@dataclass(frozen=True)
class Started:
    """A backend that has made its first step, and what that took."""

    backend: DecodeBackend
    cold_start_s: float
    peak_bytes: int | None


@dataclass(frozen=True)
class Check:
    """What a backend's steps at one position are worth: the ticket for being timed there."""

    backend: DecodeBackend
    oracle: Oracle
    correctness: Correctness


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


def check_backend(backend: DecodeBackend, oracle: Oracle) -> Check:
    """Runs the oracle's steps on a backend and compares stages, K/V rows, hidden states and logits.

    Stages are those of the first step; a backend that does not show them is judged by the rest.
    """
    factor = BF16_FACTORS.get(backend.contract)
    backend.cache.copy_from(oracle.history)
    try:
        trace = backend.trace_step(oracle.rows[:1], oracle.position)
    except NotImplementedError:
        trace = None
    backend.cache.copy_from(oracle.history)
    output = backend.run_steps(oracle.rows, oracle.position)
    backend.synchronize()
    exact, official = oracle.exact, oracle.official
    if factor is None:
        exact = oracle.exact_behind(backend)

    def accuracy(
        got: torch.Tensor, want: torch.Tensor, baseline: torch.Tensor, bound: float = FP32_BOUND
    ) -> Accuracy:
        baseline_error = relative_error(baseline, want)
        bound = bound if factor is None else factor * baseline_error
        return Accuracy(relative_error(got, want), bound, baseline_error)

    kv = new_rows(backend.cache, oracle.position, oracle.rows.shape[0])
    yardsticks = (None, None) if factor is None else (official.trace, official.kv)
    divergence = first_divergence(kv, oracle.exact.kv, factor or KV_BOUND, yardsticks[1])
    stages = {
        name: accuracy(kv[name], oracle.exact.kv[name], official.kv[name], KV_BOUND) for name in kv
    }
    if trace is not None:
        first = first_divergence(trace, exact.trace, factor or FP32_BOUND, yardsticks[0])
        divergence = first or divergence
        stages |= {
            stage: accuracy(trace[stage], exact.trace[stage], official.trace[stage])
            for stage in exact.trace
        }
    agreed = output.logits.argmax(-1) == exact.logits.argmax(-1)
    correctness = Correctness(
        contract=backend.contract,
        hidden=accuracy(output.hidden, exact.hidden, official.hidden),
        logits=accuracy(output.logits, exact.logits, official.logits),
        stages=stages,
        first_divergence=None if divergence is None else str(divergence),
        argmax_agreement=float(agreed.float().mean()),
        steps_checked=oracle.rows.shape[0],
    )
    return Check(backend, oracle, correctness)


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

"""The gate lets the right through and stops the wrong; candidates take turns."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch

from triton_mega import bench
from triton_mega.backends import DecodeBackend, StepOutput
from triton_mega.bench import Timing, time_backends
from triton_mega.gate import FP32_BOUND, KV_BOUND, Oracle, check_backend
from triton_mega.reference import CONTRACTS, decode
from triton_mega.schedule import Schedule
from triton_mega.spec import TINY
from triton_mega.testing import relative_error
from triton_mega.tuning import default_tuning
from triton_mega.weights import random_weights

SPEC = TINY.talker
WEIGHTS = random_weights(SPEC, seed=0)
MAX_POSITIONS = 24
QUICK = Timing(warmup_s=0.0, repeats=3, max_s=60.0)


class Right(DecodeBackend):
    """The reference under a contract of its own, without stages."""

    name = "right"
    contract = "fp32_activations"
    calls: ClassVar[list[str]] = []

    def _run(self, inputs_embeds: torch.Tensor, position: int, head: int) -> StepOutput:
        Right.calls.append(self.name)
        rules, tables = CONTRACTS[self.contract], (self.cos, self.sin)
        outputs = [
            decode(SPEC, self.weights, row, position + i, self.cache, *tables, rules, head=head)
            for i, row in enumerate(inputs_embeds.split(1))
        ]
        hidden, logits = (torch.cat(tensors) for tensors in zip(*outputs, strict=True))
        return StepOutput(hidden, logits)


class RightShown(Right):
    """The same, and it shows its stages."""

    name = "shown"
    fault: ClassVar[tuple[str, int] | None] = None

    def trace_step(
        self, inputs_embeds: torch.Tensor, position: int, head: int = 0
    ) -> dict[str, torch.Tensor]:
        trace: dict[str, torch.Tensor] = {}
        rules, tables = CONTRACTS[self.contract], (self.cos, self.sin)
        decode(SPEC, self.weights, inputs_embeds, position, self.cache, *tables, rules, trace=trace)
        if self.fault is not None:
            stage, layer = self.fault
            trace[stage][layer] *= 1.1
        return trace


class Official(RightShown):
    """The official arithmetic."""

    name = "official"
    contract = "hf_bf16"


class Wrong(Right):
    """Fast, because it does nothing; the right shapes."""

    name = "wrong"

    def _run(self, inputs_embeds: torch.Tensor, position: int, head: int) -> StepOutput:
        n = inputs_embeds.shape[0]
        zeros = inputs_embeds.new_zeros
        return StepOutput(zeros(n, SPEC.hidden_size), zeros(n, SPEC.vocab_size))


class ForgetsItsOwnRows(Right):
    """Right on the first step; later steps do not see the row that the step before appended."""

    name = "forgets"

    def _run(self, inputs_embeds: torch.Tensor, position: int, head: int) -> StepOutput:
        outputs = []
        for row in inputs_embeds.split(1):
            outputs.append(super()._run(row, position, head))
        return StepOutput(
            torch.cat([o.hidden for o in outputs]), torch.cat([o.logits for o in outputs])
        )


class NotANumber(Right):
    """One NaN among the logits."""

    name = "nan"

    def _run(self, inputs_embeds: torch.Tensor, position: int, head: int) -> StepOutput:
        output = super()._run(inputs_embeds, position, head)
        output.logits[-1, -1] = float("nan")
        return output


class Coarse(Right):
    """Official bf16 that claims to be fp32."""

    name = "coarse"

    def _run(self, inputs_embeds: torch.Tensor, position: int, head: int) -> StepOutput:
        output = super()._run(inputs_embeds, position, head)
        return StepOutput(output.hidden.bfloat16().float(), output.logits)


class Raises(Right):
    """Passes its check, then fails."""

    name = "raises"

    def _run(self, inputs_embeds: torch.Tensor, position: int, head: int) -> StepOutput:
        if Raises.calls.count(self.name) > 0:
            raise RuntimeError("out of luck")
        return super()._run(inputs_embeds, position, head)


class ChangesItsRows(RightShown):
    """Decodes with a new K/V row that was changed after it was rounded: right behind that row."""

    name = "changes"
    other: ClassVar[str] = "v"

    def change(self, row: torch.Tensor) -> None:  # [HKV, HD] bf16
        raise NotImplementedError

    def _decode(self, row: torch.Tensor, position: int, trace: Any = None) -> Any:
        rules, tables = CONTRACTS[self.contract], (self.cos, self.sin)
        decode(SPEC, self.weights, row, position, self.cache, *tables, rules)
        self.change(getattr(self.cache, self.other)[0, :, position])
        args = (row, position, self.cache, *tables, rules)
        return decode(SPEC, self.weights, *args, trace=trace, kv_given=True)

    def _run(self, inputs_embeds: torch.Tensor, position: int, head: int) -> StepOutput:
        outputs = [self._decode(row, position + i) for i, row in enumerate(inputs_embeds.split(1))]
        hidden, logits = (torch.cat(tensors) for tensors in zip(*outputs, strict=True))
        return StepOutput(hidden, logits)

    def trace_step(
        self, inputs_embeds: torch.Tensor, position: int, head: int = 0
    ) -> dict[str, torch.Tensor]:
        trace: dict[str, torch.Tensor] = {}
        self._decode(inputs_embeds, position, trace)
        return trace


class RoundsTheOtherWay(ChangesItsRows):
    """A few elements of V are the next bf16 value, as a sum a little larger would have given."""

    def change(self, row: torch.Tensor) -> None:
        row.view(torch.int16)[0, :3] += 1


class WrongValues(ChangesItsRows):
    """V is the right one of another head."""

    def change(self, row: torch.Tensor) -> None:
        row.copy_(row.roll(1, 0))


class WrongKeys(WrongValues):
    """K is the right one of another head."""

    other = "k"


class StoresAnotherRow(RightShown):
    """Right outputs; the row that it leaves in the cache is not the one that it used."""

    name = "stores"

    def _run(self, inputs_embeds: torch.Tensor, position: int, head: int) -> StepOutput:
        output = super()._run(inputs_embeds, position, head)
        self.cache.v[0, :, position] = self.cache.v[0, :, position].roll(1, 0)
        return output


def make(backend_class: type[DecodeBackend]) -> DecodeBackend:
    return backend_class(SPEC, WEIGHTS, max_positions=MAX_POSITIONS)


@pytest.fixture(scope="module")
def oracle() -> Oracle:
    return Oracle.build(SPEC, WEIGHTS, position=17, steps=3, max_positions=MAX_POSITIONS, seed=5)


@pytest.fixture(autouse=True)
def _fresh_calls() -> None:
    Right.calls.clear()


@pytest.mark.parametrize("backend_class", [Right, RightShown, Official])
def test_the_right_passes(backend_class: type[DecodeBackend], oracle: Oracle) -> None:
    found = check_backend(make(backend_class), oracle).correctness
    assert found.passed
    assert found.steps_checked == 3
    assert found.hidden.baseline_error > 1e-3
    shown = set() if backend_class is Right else set(oracle.exact.trace)
    assert set(found.stages) == {"k", "v"} | shown
    if backend_class is not Official:
        assert found.hidden.error < 1e-6
        assert found.argmax_agreement == 1.0
        assert found.hidden.bound == FP32_BOUND
    else:
        assert found.hidden.bound == pytest.approx(2 * found.hidden.error)


@pytest.mark.parametrize("backend_class", [Wrong, ForgetsItsOwnRows, NotANumber, Coarse])
def test_the_wrong_fails_and_has_no_latency(
    backend_class: type[DecodeBackend], oracle: Oracle
) -> None:
    wrong, right = check_backend(make(backend_class), oracle), check_backend(make(Right), oracle)
    assert not wrong.correctness.passed
    with pytest.raises(ValueError, match=f"{backend_class.name}: not timed.*position 17"):
        time_backends([right, wrong], QUICK)


def test_bf16_twice_as_coarse_as_the_official_fails(oracle: Oracle) -> None:
    class TwiceAsCoarse(Official):
        name = "twice"

        def _run(self, inputs_embeds: torch.Tensor, position: int, head: int) -> StepOutput:
            output = super()._run(inputs_embeds, position, head)
            error = output.hidden.float() - oracle.exact.hidden
            return StepOutput(oracle.exact.hidden + 2.1 * error, output.logits)

    assert not check_backend(make(TwiceAsCoarse), oracle).correctness.passed


@pytest.mark.parametrize("base", [RightShown, Official])
def test_a_wrong_stage_is_named(base: type[RightShown], oracle: Oracle) -> None:
    class Faulty(base):  # type: ignore[misc, valid-type]
        fault = ("gate_up_proj", 1)

    found = check_backend(make(Faulty), oracle).correctness
    assert not found.passed
    assert str(found.first_divergence).startswith("layer 1, stage gate_up_proj: ")


def test_a_new_row_that_rounds_the_other_way_is_no_error() -> None:
    oracle = Oracle.build(SPEC, WEIGHTS, position=0, steps=2, max_positions=MAX_POSITIONS, seed=5)
    check = check_backend(make(RoundsTheOtherWay), oracle)
    found = check.correctness
    assert found.passed, found.first_divergence
    assert found.hidden.error < 1e-6
    assert 0 < found.stages["v"].error < KV_BOUND
    # It would be one against rows of the reference's own: that is why they are given to it.
    got = check.backend.run_steps(oracle.rows, 0)
    assert relative_error(got.hidden, oracle.exact.hidden) > FP32_BOUND


@pytest.mark.parametrize(
    ("backend_class", "name"), [(WrongKeys, "k"), (WrongValues, "v"), (StoresAnotherRow, "v")]
)
def test_a_wrong_new_row_is_named(
    backend_class: type[DecodeBackend], name: str, oracle: Oracle
) -> None:
    found = check_backend(make(backend_class), oracle).correctness
    assert not found.passed
    assert found.stages[name].error > 10 * KV_BOUND
    if backend_class is not StoresAnotherRow:  # right behind the row, so nothing else tells
        assert str(found.first_divergence).startswith(f"layer 0, stage {name}: ")


def test_history_is_the_same_whatever_ran_before(oracle: Oracle) -> None:
    backend = make(Right)
    backend.cache.k.fill_(7.0)
    assert check_backend(backend, oracle).correctness.passed
    assert check_backend(backend, oracle).correctness.passed


def test_candidates_take_turns_and_the_fastest_runs_twice(oracle: Oracle) -> None:
    class Slow(Right):
        name = "slow"

        def _run(self, inputs_embeds: torch.Tensor, position: int, head: int) -> StepOutput:
            torch.arange(3_000_000).float().sin().sum()
            return super()._run(inputs_embeds, position, head)

    checks = [check_backend(make(Slow), oracle), check_backend(make(Right), oracle)]
    Right.calls.clear()
    latencies, aa_us = time_backends(checks, QUICK)
    warm_up, rounds = Right.calls[:2], Right.calls[2:]
    assert warm_up == ["slow", "right"]
    assert rounds == ["slow", "right", "right", "right", "right", "slow", "right", "slow", "right"]
    assert len(latencies) == 2
    assert latencies[0].p50_us > latencies[1].p50_us
    assert aa_us >= 0
    for latency in latencies:
        assert latency.n == 3
        assert latency.clock == "perf_counter"
        assert latency.p20_us <= latency.p50_us <= latency.p80_us <= latency.p99_us


def test_every_round_starts_with_another_candidate() -> None:
    assert [bench.rotation(3, turn) for turn in range(4)] == [
        [0, 1, 2],
        [1, 2, 0],
        [2, 0, 1],
        [0, 1, 2],
    ]


def test_a_candidate_that_raises_is_named(oracle: Oracle) -> None:
    checks = [check_backend(make(each), oracle) for each in (Right, Raises)]
    with pytest.raises(bench.TimingFailed, match="raises failed") as caught:
        time_backends(checks, QUICK)
    assert caught.value.check is checks[1]
    assert "out of luck" in str(caught.value.__cause__)


def test_a_launch_that_fails_on_the_device_is_seen(oracle: Oracle) -> None:
    class Abandoned(Right):
        """Its launches return at once; only waiting for them tells that they were given up."""

        name = "abandoned"
        waits: ClassVar[int] = 0

        def synchronize(self) -> None:
            Abandoned.waits += 1
            if Abandoned.waits > 1:
                raise RuntimeError("gave up at a barrier")

    check = check_backend(make(Abandoned), oracle)
    with pytest.raises(bench.TimingFailed) as caught:
        time_backends([check], QUICK)
    assert "gave up" in str(caught.value.__cause__)
    with pytest.raises(RuntimeError, match="gave up"):
        check_backend(make(Abandoned), oracle)


def test_nothing_to_time_is_no_error() -> None:
    assert time_backends([], QUICK) == ([], 0.0)


def test_a_sample_is_divided_by_its_steps(oracle: Oracle, monkeypatch: pytest.MonkeyPatch) -> None:
    check = check_backend(make(Right), oracle)
    monkeypatch.setattr(bench, "_call_us", lambda call, device: 30.0)
    (latency,), aa_us = time_backends([check], QUICK)
    assert latency.p50_us == 10.0
    assert aa_us == 0.0


def test_a_slow_candidate_takes_fewer_turns(
    oracle: Oracle, monkeypatch: pytest.MonkeyPatch
) -> None:
    check = check_backend(make(Right), oracle)
    monkeypatch.setattr(bench, "_call_us", lambda call, device: 2e6)
    for max_s, n in ((0.0, 1), (3.0, 2), (60.0, 5)):
        (latency,), _ = time_backends([check], Timing(warmup_s=0.0, repeats=5, max_s=max_s))
        assert latency.n == n


def test_start_measures_construction_and_first_step() -> None:
    started = bench.start(Right, SPEC, WEIGHTS, max_positions=MAX_POSITIONS)
    assert Right.calls == ["right"]
    assert started.cold_start_s > 0
    assert started.peak_bytes is None


def test_bytes_come_from_the_schedule() -> None:
    schedule = Schedule(SPEC, default_tuning(SPEC, None))
    want = [schedule.step_bytes(position) for position in (4, 5, 6)]
    assert bench.step_bytes(SPEC, 4, 3) == sum(want) // 3
    assert bench.step_bytes(SPEC, 4, 1) == want[0]


def test_without_a_gpu_there_is_no_ceiling() -> None:
    cpu = torch.device("cpu")
    assert bench.read_ceilings(cpu) == {}
    assert bench.barrier_us(cpu) is None


@pytest.mark.parametrize("values", [{"warmup_s": -1.0}, {"repeats": 0}, {"max_s": -1.0}])
def test_wrong_timing_is_named(values: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"timing.{next(iter(values))}"):
        Timing(**({"warmup_s": 0.0, "repeats": 1, "max_s": 1.0} | values))


@pytest.mark.gpu
def test_ceilings_and_barrier_on_a_gpu() -> None:
    device = torch.device("cuda")
    ceilings = bench.read_ceilings(device)
    assert 100 < ceilings["loads"] < 20_000
    if torch.cuda.get_device_capability() >= (9, 0):
        assert 0.8 < ceilings["bulk"] / ceilings["loads"] < 1.5
    cost = bench.barrier_us(device)
    assert cost is not None
    assert 0.2 < cost < 20

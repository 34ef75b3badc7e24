"""The parity experiment: what is right passes, one wrong stage of one layer does not."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from experiments import parity
from experiments.config import CONF, Parity, build, overrides
from triton_mega import record
from triton_mega.backends import BACKENDS, BackendUnavailable, DecodeBackend, StepOutput
from triton_mega.record import ROOT, Git, Record
from triton_mega.reference import CONTRACTS, decode


class Exact(DecodeBackend):
    """The reference under contract fp32_activations."""

    name = "exact"
    contract = "fp32_activations"
    fault: ClassVar[str | None] = None

    def _run(self, inputs_embeds: torch.Tensor, position: int, head: int) -> StepOutput:
        outputs = [
            self._decode(inputs_embeds[i : i + 1], position + i, head)
            for i in range(len(inputs_embeds))
        ]
        hidden, logits = (torch.cat(tensors) for tensors in zip(*outputs, strict=True))
        return StepOutput(hidden, logits)

    def trace_step(
        self, inputs_embeds: torch.Tensor, position: int, head: int = 0
    ) -> dict[str, torch.Tensor]:
        trace: dict[str, torch.Tensor] = {}
        self._decode(inputs_embeds, position, head, trace)
        if self.fault is not None:
            stage, layer = self.fault.split(".")
            trace[stage][int(layer)] *= 1.001
        return trace

    def _decode(self, row: torch.Tensor, position: int, head: int, trace: Any = None) -> Any:
        args = (row, position, self.cache, self.cos, self.sin, CONTRACTS[self.contract])
        return decode(self.spec, self.weights, *args, head=head, trace=trace)


class Official(Exact):
    """The official arithmetic."""

    name = "official"
    contract = "hf_bf16"


class Silent(Exact):
    """It does not show its stages."""

    name = "silent"

    def trace_step(self, *args: Any, **options: Any) -> dict[str, torch.Tensor]:
        raise NotImplementedError("silent")


class WrongStage(Exact):
    name = "wrong_stage"
    fault = "gate_up_proj.1"


class Coarse(Silent):
    """Its hidden states are rounded to bf16."""

    name = "coarse"

    def _run(self, inputs_embeds: torch.Tensor, position: int, head: int) -> StepOutput:
        output = super()._run(inputs_embeds, position, head)
        return StepOutput(output.hidden.bfloat16().float(), output.logits)


class OtherValues(Exact):
    """Caches, and uses, the V of another head: right behind its own rows, and nowhere else."""

    name = "other_values"

    def _decode(self, row: torch.Tensor, position: int, head: int, trace: Any = None) -> Any:
        super()._decode(row, position, head)
        new = self.cache.v[:, :, position]
        new.copy_(new.roll(1, 1))
        args = (row, position, self.cache, self.cos, self.sin, CONTRACTS[self.contract])
        return decode(self.spec, self.weights, *args, head=head, trace=trace, kv_given=True)


class SkipsARow(Exact):
    """Does not see the row before."""

    name = "skips"

    def _decode(self, row: torch.Tensor, position: int, head: int, trace: Any = None) -> Any:
        kept = self.cache.v[:, :, position - 1].clone()
        self.cache.v[:, :, position - 1] = 0
        output = super()._decode(row, position, head, trace)
        self.cache.v[:, :, position - 1] = kept
        return output


class Absent(Exact):
    name = "absent"

    @classmethod
    def check_available(cls, device: torch.device) -> None:
        raise BackendUnavailable(cls.name, "no such chip")


FAKES = (Exact, Official, Silent, WrongStage, Coarse, OtherValues, SkipsARow, Absent)


@pytest.fixture(autouse=True)
def _fakes(monkeypatch: pytest.MonkeyPatch) -> None:
    for fake in FAKES:
        monkeypatch.setitem(BACKENDS, fake.name, f"{fake.__module__}:{fake.__qualname__}")


def composed(*given: str) -> Any:
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return OmegaConf.to_container(compose("parity", list(given)), resolve=True)


def run(*names: str, given: tuple[str, ...] = ()) -> dict[tuple[str, str], Record]:
    """Checks fakes on the tiny trace; records by backend and decoder."""
    config = composed("trace=tiny", f"backend.names=[{','.join(names)}]", *given)
    records = parity.run(build(Parity, config), config, Git("abc", False), "a command")
    return {(each.backend, each.spec.partition(".")[2]): each for each in records}


def test_the_right_pass_and_every_place_has_its_errors() -> None:
    found = run("exact", "official", "silent", "absent")
    assert len(found) == 8
    for (name, role), each in found.items():
        if name == "absent":
            assert each.status == "unavailable"
            continue
        assert each.status == "passed", (name, role, each.reason)
        assert each.correctness is not None
        assert each.correctness.steps_checked == 3
        stages = each.correctness.stages
        layers = 3 if role == "talker" else 2
        assert len(stages) == (4 if name == "silent" else 6 * layers + 4)
        assert stages["official.final_norm"].baseline_error > 1e-3
        if name == "exact":
            assert each.correctness.hidden.error < 1e-6
            assert stages["attention.1"].baseline_error > 1e-3
            assert stages["official.down_proj.1"].error > 1e-4  # K and V in bf16 alone


@pytest.mark.parametrize(
    ("name", "where"),
    [
        ("wrong_stage", "gate_up_proj.1: "),
        ("coarse", "final_norm: "),
        ("skips", "attention.0: "),
        ("other_values", "official.down_proj.0: "),
    ],
)
def test_a_fault_is_named_and_fails_the_run(
    name: str, where: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = run(name, "exact", given=("trace.roles=[talker]",))
    wrong = found[name, "talker"]
    assert wrong.status == "incorrect"
    assert str(wrong.reason).startswith(where)
    assert parity.conclude(list(found.values()), tmp_path) == 1
    out = capsys.readouterr().out
    last = json.loads(out.splitlines()[-1])
    assert last["failed"] == [name]
    assert f"incorrect: {where}" in out
    records = record.read(Path(last["records"]))
    assert [each.status for each in records] == ["incorrect", "passed"]
    assert {each.run_id for each in records} == {last["run_id"]}


def test_a_dump_that_this_device_does_not_reproduce_is_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(parity, "REFERENCE_BOUND", 1e-12)
    found = run("exact", "official", given=("trace.roles=[talker]",))
    for each in found.values():
        assert each.status == "error"
        assert "from the dump at down_proj.0" in str(each.reason)


@pytest.mark.slow
def test_fewer_rows_check_the_same_last_step() -> None:
    one = run("exact", given=("trace.last_rows=1",))
    all_rows = run("exact", given=("trace.last_rows=null",))
    for role, rows in (("talker", 21), ("code_predictor", 16)):
        found = [records["exact", role].correctness for records in (one, all_rows)]
        assert [each.steps_checked for each in found if each is not None] == [1, rows]
        assert all(each is not None and each.passed for each in found)


def test_the_table_shows_every_layer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = run("exact", "silent", "absent", given=("trace.roles=[talker]",))
    assert parity.conclude(list(found.values()), tmp_path) == 0
    out = capsys.readouterr().out
    stages = found["exact", "talker"].correctness
    assert stages is not None
    error = stages.stages["o_proj.2"]
    assert f"{error.error:.1e} ({error.baseline_error:.1e})" in out
    assert "silent, tiny.talker, CPU, Triton in its interpreter: passed (it does not show" in out
    assert "absent, tiny.talker, CPU, Triton in its interpreter: unavailable: no such chip" in out


def test_configs_compose_and_name_wrong_values() -> None:
    asked = build(Parity, composed())
    assert asked.trace.fixture == "full_1p7b"
    assert asked.trace.last_rows is None
    assert asked.backend.names == ("triton_persistent",)
    assert overrides([], False, parity.NO_GPU) == list(parity.NO_GPU)
    chosen = overrides(["tuning=default"], False, parity.NO_GPU)
    assert chosen == ["trace=tiny", "results_dir=outputs", "tuning=default"]
    assert overrides(["a=b"], True, parity.NO_GPU) == ["a=b"]
    for given, message in (
        ("trace.last_rows=0", r"trace\.last_rows: expected 1 or more"),
        ("trace.roles=[singer]", r"trace\.roles\[0\]: expected one of talker, code_predictor"),
        ("trace.roles=[]", r"trace\.roles: expected some"),
        ("+trace.rows=1", r"trace\.rows: unknown key"),
    ):
        with pytest.raises(ValueError, match=message):
            build(Parity, composed(given))


@pytest.mark.slow
def test_the_command_without_a_gpu(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    environment.pop("TRITON_INTERPRET", None)
    command = [sys.executable, "-m", "experiments.parity", "results_dir=here", "commit=abc"]
    result = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=200
    )
    assert result.returncode == 0, result.stdout + result.stderr
    records = record.read(tmp_path / "here" / "parity.jsonl")
    assert [(each.backend, each.status) for each in records] == [
        ("triton_persistent", "passed")
    ] * 2
    for each in records:
        assert each.correctness is not None
        assert all(math.isfinite(one.error) for one in each.correctness.stages.values())
        assert each.correctness.hidden.error < 1e-5

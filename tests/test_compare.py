"""The main experiment: right, wrong, failing and absent backends in one run, and its exit code."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf
from rich.console import Console
from safetensors.torch import save_file

from experiments import compare
from experiments.config import CONF, Compare, build
from tests.fixtures import config as published
from tests.test_bench import Official, Right, RightShown, Wrong
from triton_mega import record
from triton_mega.backends import BACKENDS, BackendUnavailable, StepOutput
from triton_mega.checkpoint import checkpoint_shapes
from triton_mega.record import ROOT, Git, Record
from triton_mega.spec import TTSSpec


class Absent(Right):
    name = "absent"

    @classmethod
    def check_available(cls, device: torch.device) -> None:
        raise BackendUnavailable(cls.name, "no such chip", "buy one")


class NeverStarts(Right):
    name = "never_starts"

    def __init__(self, *args: Any, **options: Any) -> None:
        raise RuntimeError("out of memory")


class FailsLate(Right):
    """Passes its check at position 1, fails while timed there; raises in the check at 15."""

    name = "fails_late"

    def _run(self, inputs_embeds: torch.Tensor, position: int, head: int) -> StepOutput:
        if position == 15:
            raise RuntimeError("illegal access")
        if Right.calls.count(self.name) > 1:
            raise RuntimeError("a bad launch")
        return super()._run(inputs_embeds, position, head)


class WrongStage(RightShown):
    name = "wrong_stage"
    fault = ("attention", 2)


FAKES = (Right, RightShown, Official, Wrong, Absent, NeverStarts, FailsLate, WrongStage)


@pytest.fixture(autouse=True)
def _fakes(monkeypatch: pytest.MonkeyPatch) -> None:
    Right.calls.clear()
    for fake in FAKES:
        monkeypatch.setitem(BACKENDS, fake.name, f"{fake.__module__}:{fake.__qualname__}")


def run(
    *names: str,
    given: tuple[str, ...] = (),
    keep: Callable[[list[Record]], None] = lambda records: None,
) -> list[Record]:
    """Compares fakes on the tiny model."""
    overrides = ["experiment=cpu", f"backend.names=[{','.join(names)}]", *given]
    with initialize_config_dir(str(CONF), version_base="1.3"):
        config: Any = OmegaConf.to_container(compose("compare", overrides), resolve=True)
    asked = build(Compare, config)
    weights = compare.load_weights(asked.model, torch.device("cpu"))
    git, console = Git("abc", False), Console(quiet=True)
    return compare.run(asked, weights, config, git, "a command", console, keep)


def by_place(records: list[Record]) -> dict[tuple[str, int], Record]:
    return {(each.backend, each.position): each for each in records}


def test_a_run_goes_on_past_every_kind_of_failure(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    records = run(*(fake.name for fake in FAKES))
    found = by_place(records)
    assert len(records) == len(found) == 2 * len(FAKES)
    statuses = {name: [found[name, at].status for at in (1, 15)] for name, _ in found}
    assert statuses == {
        "right": ["passed"] * 2,
        "shown": ["passed"] * 2,
        "official": ["passed"] * 2,
        "wrong": ["incorrect"] * 2,
        "absent": ["unavailable"] * 2,
        "never_starts": ["error"] * 2,
        "fails_late": ["error"] * 2,
        "wrong_stage": ["incorrect"] * 2,
    }
    for each in records:
        assert (each.performance is None) == (each.status != "passed"), each.backend
    assert found["absent", 1].reason == "no such chip (buy one)"
    assert found["never_starts", 1].reason == "RuntimeError: out of memory"
    assert found["fails_late", 1].reason == "RuntimeError: a bad launch"
    assert found["fails_late", 15].reason == "RuntimeError: illegal access"
    assert str(found["wrong_stage", 15].reason).startswith("layer 2, stage attention: ")
    assert str(found["wrong", 1].reason).startswith("layer 0, stage k: relative error inf")

    assert compare.conclude(records, tmp_path) == 1
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert last["failed"] == ["fails_late", "never_starts", "wrong", "wrong_stage"]
    assert last["records"] == str(tmp_path / "compare.jsonl")


def test_an_interrupted_run_has_kept_the_positions_before(tmp_path: Path) -> None:
    path = tmp_path / "compare.jsonl"

    def keep(records: list[Record]) -> None:
        if records[0].position == 15:
            raise KeyboardInterrupt
        record.append(path, records)

    with pytest.raises(KeyboardInterrupt):
        run("right", "absent", keep=keep)
    kept = by_place(record.read(path))
    assert {place: each.status for place, each in kept.items()} == {
        ("right", 1): "passed",
        ("absent", 1): "unavailable",
    }


def test_the_right_and_the_absent_alone_are_no_failure(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    records = run("right", "absent")
    assert compare.conclude(records, tmp_path) == 0
    out = capsys.readouterr().out
    assert json.loads(out.splitlines()[-1])["failed"] == []
    assert "absent: unavailable: no such chip (buy one)" in out
    assert (tmp_path / f"compare_{records[0].run_id}.png").read_bytes()[:4] == b"\x89PNG"


def test_a_record_says_what_was_run() -> None:
    (first, _) = run("right", given=("timing.repeats=4", "model.seed=3"))
    assert first.git == Git("abc", False)
    assert first.package_sha == record.package_sha(record.package_files())
    assert (first.spec, first.weights, first.seed) == ("tiny", "random", 3)
    assert first.correctness is not None
    assert first.correctness.steps_checked == 2
    assert first.performance is not None
    assert first.performance.n == 4
    assert first.performance.steps_per_launch == 2
    want = first.performance.bytes / first.performance.p50_us / 1e3
    assert first.performance.gbps == pytest.approx(want)
    assert run("right")[0].run_id != first.run_id


def test_nothing_right_is_shown_all_the_same(tmp_path: Path) -> None:
    assert compare.conclude(run("wrong", "absent"), tmp_path) == 1


def test_a_checkpoint_is_read_and_another_shape_refused(tmp_path: Path) -> None:
    spec = TTSSpec.from_config(published("tiny"))
    generator = torch.Generator().manual_seed(0)
    tensors = {
        name: (torch.randn(shape, generator=generator) * 0.05).bfloat16()
        for name, shape in checkpoint_shapes(spec).items()
    }
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(published("tiny")))
    given = f"model.checkpoint={tmp_path}"
    with pytest.raises(ValueError, match=r"model.spec.hidden_size: the checkpoint has 64"):
        run("torch_eager", given=(given,))
    fields = {
        "hidden_size": spec.talker.hidden_size,
        "intermediate_size": spec.talker.intermediate_size,
        "num_hidden_layers": spec.talker.num_hidden_layers,
        "num_attention_heads": spec.talker.num_attention_heads,
        "num_key_value_heads": spec.talker.num_key_value_heads,
        "head_dim": spec.talker.head_dim,
        "vocab_size": spec.talker.vocab_size,
        "rms_norm_eps": spec.talker.rms_norm_eps,
        "rope_theta": spec.talker.rope_theta,
        "mrope_section": list(spec.talker.mrope_section or ()),
        "max_position_embeddings": spec.talker.max_position_embeddings,
    }
    shapes = tuple(f"model.spec.{key}={value}" for key, value in fields.items())
    (first, _) = run("torch_eager", given=(given, *shapes))
    assert first.status == "passed"
    assert first.weights == "checkpoint"
    assert str(tmp_path) not in first.to_json()


def command(*given: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    environment.pop("TRITON_INTERPRET", None)
    arguments = [sys.executable, "-m", "experiments.compare", *given, "commit=abc-dirty"]
    return subprocess.run(
        arguments, cwd=cwd, env=environment, capture_output=True, text=True, timeout=300
    )


def test_a_checkpoint_that_is_not_there_is_a_wrong_config(tmp_path: Path) -> None:
    result = command("model.checkpoint=/no/such/model", cwd=tmp_path)
    assert result.returncode == 2
    assert "config: /no/such/model: no such directory" in result.stderr
    assert not list(tmp_path.rglob("compare.jsonl"))


def test_the_command_works_from_any_directory(tmp_path: Path) -> None:
    result = command("backend.names=[torch_eager,torch_graph]", "results_dir=here", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert "no NVIDIA GPU: the tiny model" in result.stderr
    last = json.loads(result.stdout.splitlines()[-1])
    records = record.read(tmp_path / last["records"])
    assert [each.status for each in records] == ["passed", "unavailable"] * 2
    assert records[0].run_id == last["run_id"]
    assert records[0].git == Git("abc", True)
    assert (tmp_path / last["figure"]).exists()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_main_job_without_a_gpu(tmp_path: Path) -> None:
    result = command(f"results_dir={tmp_path}", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    found = by_place(record.read(tmp_path / "compare.jsonl"))
    for name in ("torch_eager", "triton_staged", "triton_persistent"):
        for position in (1, 15):
            each = found[name, position]
            assert each.status == "passed", each.reason
            assert each.correctness is not None
            assert each.correctness.stages
    assert {found[name, 1].status for name in ("torch_graph", "torch_compile")} == {"unavailable"}

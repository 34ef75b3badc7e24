"""Every config composes into what the experiment takes; a wrong key is named before any work."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_dir
from hydra.errors import HydraException
from omegaconf import OmegaConf

from experiments.config import CONF, NO_GPU_EXPERIMENT, Compare, build, overrides
from tests.fixtures import config as published
from triton_mega.record import ROOT
from triton_mega.spec import TINY, TTSSpec

EXPERIMENTS = sorted((CONF / "experiment").glob("*.yaml"))
GROUPS = ("model", "backend", "tuning", "workload", "timing")
OPTIONS = [f"{group}={path.stem}" for group in GROUPS for path in (CONF / group).glob("*.yaml")]


def composed(*given: str) -> Any:
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return OmegaConf.to_container(compose("compare", list(given)), resolve=True)


def test_there_is_something_to_compose() -> None:
    assert {"cpu", "talker_0p6b"} <= {path.stem for path in EXPERIMENTS}
    assert len(OPTIONS) > len(GROUPS)
    for group in GROUPS:
        assert any(option.startswith(f"{group}=") for option in OPTIONS)


@pytest.mark.parametrize("path", EXPERIMENTS, ids=lambda path: path.stem)
def test_every_experiment_composes_and_its_first_comment_runs_it(path: Path) -> None:
    lines = path.read_text(encoding="utf-8").splitlines()
    comments = [line for line in lines if re.match(r"# (?!@)", line)]
    assert comments[0] == f"# python -m experiments.compare experiment={path.stem}"
    build(Compare, composed(f"experiment={path.stem}"))


@pytest.mark.parametrize("option", sorted(OPTIONS))
def test_every_option_composes(option: str) -> None:
    asked = build(Compare, composed(option, "workload=tiny"))
    group, name = option.split("=")
    if group == "model":
        assert asked.model.name == name


def test_no_config_names_a_python_object() -> None:
    for path in CONF.rglob("*.yaml"):
        assert "_target_" not in path.read_text(encoding="utf-8"), path


def test_shapes_are_those_of_the_published_configs() -> None:
    large, small = (
        TTSSpec.from_config(published(f"{size}-CustomVoice")) for size in ("1.7B", "0.6B")
    )
    wanted = {
        "tiny": TINY.talker,
        "talker_1p7b": large.talker,
        "talker_0p6b": small.talker,
        "predictor": large.predictor,
    }
    assert small.predictor == large.predictor
    for name, spec in wanted.items():
        assert build(Compare, composed(f"model={name}", "workload=tiny")).model.spec == spec
    assert set(wanted) == {path.stem for path in (CONF / "model").glob("*.yaml")}


def test_default_is_the_large_talker_and_every_backend() -> None:
    asked = build(Compare, composed())
    assert asked.model.name == "talker_1p7b"
    assert asked.model.weights == "random"
    assert asked.results == ROOT / "experiments" / "results"
    assert {"torch_compile", "triton_persistent"} <= set(asked.backend.names)
    assert {100, 1500} <= set(asked.workload.positions)
    checkpoint = build(Compare, composed("model.checkpoint=/weights")).model
    assert checkpoint.weights == "checkpoint"


def test_the_command_line_wins_over_an_experiment() -> None:
    asked = build(Compare, composed("experiment=cpu", "timing=fast", "workload.positions=[3]"))
    assert asked.model.name == "tiny"
    assert asked.timing.repeats == 10
    assert asked.workload.positions == (3,)


def test_without_a_gpu_the_tiny_model_is_chosen() -> None:
    assert overrides([], has_gpu=True) == []
    assert overrides(["timing=fast"], has_gpu=False) == [NO_GPU_EXPERIMENT, "timing=fast"]
    assert overrides(["experiment=predictor"], has_gpu=False) == ["experiment=predictor"]
    assert build(Compare, composed(NO_GPU_EXPERIMENT)).model.name == "tiny"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("+timing.repeat=3", "timing.repeat: unknown key; known are warmup_s, repeats, max_s"),
        ("+colour=red", "colour: unknown key"),
        ("~timing.repeats", "timing.repeats: missing"),
        ("timing.repeats=0", "timing.repeats: expected at least 1"),
        ("timing.repeats=many", "timing.repeats: expected int, got 'many'"),
        ("timing.repeats=true", "timing.repeats: expected int, got True"),
        ("workload.positions=[]", "workload.positions: expected some"),
        ("workload.positions=[1,x]", r"workload.positions\[1\]: expected int, got 'x'"),
        ("workload.positions=7", "workload.positions: expected a list"),
        ("workload.positions=[40000]", "workload.positions: .* has 32768 positions"),
        ("backend.names=[cuda]", "backend.names: expected some of torch_eager.*'cuda'"),
        ("backend.names=[]", "backend.names: expected some"),
        ("model.spec.role=singer", "model.spec.role: expected one of talker, code_predictor"),
        ("model.spec.mrope_section=[1,2,3]", "model.spec.talker.mrope_section"),
        ("tuning.values={num_warps: 4}", r"tuning.values.\w+: missing"),
        ("commit=7", "commit: expected str, got 7"),
    ],
)
def test_a_wrong_value_is_named(given: str, message: str) -> None:
    with pytest.raises((ValueError, HydraException), match=message):
        build(Compare, composed(given))


@pytest.mark.parametrize("path", sorted((CONF / "tuning").glob("*.yaml")), ids=lambda p: p.stem)
def test_every_tuning_names_where_it_comes_from(path: Path) -> None:
    values = build(Compare, composed(f"tuning={path.stem}")).tuning.values
    assert values is None or values.source == f"conf/tuning/{path.name}"


@pytest.mark.parametrize(
    ("given", "message", "code"),
    [
        ("+timing.repeat=3", "config: timing.repeat: unknown key", 2),
        ("commit=HEAD", "config: commit: expected a hash", 2),
        ("timing.repeat=3", "Key 'repeat' is not in struct", 1),
        ("model=large", "Could not find 'model/large'", 1),
    ],
)
def test_the_command_names_a_wrong_key_and_does_nothing(
    given: str, message: str, code: int, tmp_path: Path
) -> None:
    results = tmp_path / "results"
    command = [sys.executable, "-m", "experiments.compare", given, f"results_dir={results}"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    result = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60
    )
    assert result.returncode == code
    assert message in result.stderr
    assert result.stdout == ""
    assert not results.exists()

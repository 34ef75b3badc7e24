"""The two pytest processes: together they run every test, and each kernel is what it should be."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import triton
import triton.language as tl

from tests.conftest import IN_INTERPRETER, missing_part, runs_in

ROOT = Path(__file__).parent.parent


@triton.jit
def copy_kernel(x_ptr, y_ptr, BLOCK: tl.constexpr):
    offs = tl.arange(0, BLOCK)
    tl.store(y_ptr + offs, tl.load(x_ptr + offs))


@pytest.mark.interpret
def test_a_kernel_is_interpreted_in_the_interpreter_process() -> None:
    assert IN_INTERPRETER
    assert type(copy_kernel).__name__ == "InterpretedFunction"


@pytest.mark.compile
def test_a_kernel_is_compiled_in_the_other_process() -> None:
    assert not IN_INTERPRETER
    assert type(copy_kernel).__name__ == "JITFunction"


@pytest.mark.parametrize("marks", [set(), {"interpret"}, {"compile"}, {"gpu", "slow"}, {"hf"}])
def test_every_test_belongs_to_one_process(marks: set[str]) -> None:
    assert runs_in(marks, interpreter=True) != runs_in(marks, interpreter=False)


def test_contradictory_marks_are_an_error() -> None:
    with pytest.raises(pytest.UsageError, match="both interpret and gpu"):
        runs_in({"interpret", "gpu"}, interpreter=False)


def test_a_skip_names_the_missing_part(monkeypatch: pytest.MonkeyPatch) -> None:
    assert missing_part(set()) is None
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert missing_part({"gpu"}) == "needs an NVIDIA GPU"
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "make hf" in str(missing_part({"hf"}))


@pytest.mark.slow
def test_the_two_processes_together_run_the_whole_suite() -> None:
    interpreted, rest, everything = (_collect(mode) for mode in ("interpret", "rest", "all"))
    assert interpreted
    assert rest
    assert not interpreted & rest
    assert interpreted | rest == everything


def _collect(mode: str) -> set[str]:
    """Node ids that one process would run; mode "all" collects without the conftest's choice."""
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider"]
    if mode == "all":
        command.append("--noconftest")
    environment = {**os.environ, "TRITON_INTERPRET": "1" if mode == "interpret" else "0"}
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    return {line for line in result.stdout.splitlines() if "::" in line}

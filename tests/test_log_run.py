"""A log says what was run, of which code, and how it ended."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from experiments.log_run import header, shorten
from triton_mega import record
from triton_mega.record import ROOT, Git


def log_run(directory: Path, *given: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "experiments.log_run", *given[:1]]
    command += ["--results", str(directory), *given[1:]]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        command, cwd=directory, env=environment, capture_output=True, text=True, timeout=60
    )


def entries(text: str) -> dict[str, str]:
    """The ``# key: value`` lines of a log."""
    return dict(re.findall(r"^# (\w+): (.*)$", text, re.MULTILINE))


def test_a_log_holds_the_output_of_both_streams_and_how_it_ended(tmp_path: Path) -> None:
    code = "import sys; print('out'); print('err', file=sys.stderr); sys.exit(3)"
    result = log_run(tmp_path, "a_run", "--commit", "abc", "--", sys.executable, "-c", code)
    assert result.returncode == 3
    assert set(result.stdout.split()) == {"out", "err"}
    text = (tmp_path / "a_run.log").read_text()
    found = entries(text)
    assert list(found) == [
        *("command", "time_utc", "commit", "package_sha", "environment"),
        *("exit_code", "seconds"),
    ]
    assert found["command"] == shorten(shlex.join([sys.executable, "-c", code]))
    assert (found["commit"], found["exit_code"]) == ("abc", "3")
    assert 0 < float(found["seconds"]) < 60
    body = text.split("\n\n")[1]
    assert sorted(body.split()) == ["err", "out"]


def test_the_header_hashes_the_files_that_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    found = entries(header(["make", "test"], Git("abc", True)))
    assert found["package_sha"] == record.package_sha(record.package_files())
    assert found["commit"] == "abc-dirty"
    assert json.loads(found["environment"])["python"].startswith("3.")
    sources = {"triton_mega/a.py": b"changed"}
    monkeypatch.setattr("experiments.log_run.package_files", lambda: sources)
    assert entries(header(["true"], Git("abc", False)))["package_sha"] != found["package_sha"]


def test_paths_of_the_machine_are_shortened() -> None:
    line = f"{ROOT}/tests/x.py {sys.prefix}/bin/python {Path.home()}/.cache {ROOT}-other {ROOT}"
    assert shorten(line).endswith(f"{ROOT}-other .")
    assert shorten(line).startswith("./tests/x.py PYTHON/bin/python ")


def test_a_killed_and_a_missing_command_are_failures(tmp_path: Path) -> None:
    killed = f"import os; os.kill(os.getpid(), {int(signal.SIGKILL)})"
    result = log_run(tmp_path, "killed", "--commit", "a", "--", sys.executable, "-c", killed)
    assert result.returncode == 137
    assert entries((tmp_path / "killed.log").read_text())["exit_code"] == "137"
    result = log_run(tmp_path, "missing", "--commit", "a", "--", "no-such-command")
    assert result.returncode == 127
    assert "no-such-command" in (tmp_path / "missing.log").read_text()


@pytest.mark.parametrize(
    ("name", "commit", "message"), [("a/b", "abc", "name: expected"), ("a", "HEAD", "commit:")]
)
def test_wrong_arguments_run_nothing(name: str, commit: str, message: str, tmp_path: Path) -> None:
    result = log_run(tmp_path, name, "--commit", commit, "--", "touch", "ran")
    assert result.returncode == 2
    assert message in result.stderr
    assert list(tmp_path.iterdir()) == []

"""The `triton-mega` command: doctor's findings, and that it needs neither a GPU nor a checkout."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest

import triton_mega
from triton_mega import doctor
from triton_mega.backends import BACKENDS, BackendUnavailable
from triton_mega.cli import format_report, main
from triton_mega.device import DeviceInfo

H200 = dataclasses.replace(
    DeviceInfo.of_chip((9, 0), sm_count=132, name="NVIDIA H200"),
    driver="580.65.06",
    cuda_driver="13.0",
)
GOOD = {"torch": "2.13.0+cpu", "triton": "3.6.0", "numpy": "2.3.5", "transformers": "4.57.3"}


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_info:
        main(["--version"])
    assert exit_info.value.code == 0
    assert capsys.readouterr().out.strip() == triton_mega.__version__


def test_json_report_names_every_backend(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    backends = {backend["name"]: backend for backend in report["backends"]}
    assert list(backends) == list(BACKENDS)
    assert backends["torch_eager"]["available"]
    assert all(b["available"] or b["reason"] for b in backends.values())
    assert {"platform", "gpu", "C compiler", "Python.h"} <= {f["name"] for f in report["findings"]}


def test_text_report_shows_reasons_and_hints() -> None:
    report = doctor.Report(
        version="1.2.3",
        packages={"torch": "2.13.0", "qwen-tts": None},
        device=None,
        findings=[doctor.Finding("gpu", "missing", "no NVIDIA driver", "CPU work remains")],
        backends=[
            doctor.BackendFinding("torch_eager", True, "cpu"),
            doctor.BackendFinding("hf", False, "cpu", "qwen-tts is not installed", "make hf"),
        ],
    )
    lines = [" ".join(line.split()) for line in format_report(report).splitlines()]
    assert "missing gpu: no NVIDIA driver" in lines
    assert "-> CPU work remains" in lines
    assert "- qwen-tts" in lines
    assert "ok torch_eager on cpu" in lines
    assert lines[-2:] == ["no hf: qwen-tts is not installed", "-> make hf"]


def test_an_unavailable_backend_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    def unavailable(name: str) -> type:
        raise BackendUnavailable(name, "no such part", "get one")

    monkeypatch.setattr("triton_mega.backends.load_backend", unavailable)
    for finding in doctor.examine_backends():
        assert (finding.available, finding.reason, finding.hint) == (
            False,
            "no such part",
            "get one",
        )


@pytest.mark.parametrize(
    ("changed", "finding", "hint"),
    [
        ({}, None, ""),
        ({"torch": None}, "torch", "install torch >= 2.11"),
        ({"torch": "2.10.1+cu128"}, "torch", "torch >= 2.11"),
        ({"triton": "3.5.1"}, "triton", "triton >= 3.6, < 3.10"),
        ({"triton": "3.10.0"}, "triton", "triton >= 3.6, < 3.10"),
        ({"numpy": "2.4.0"}, "triton and numpy", "numpy < 2.4"),
        ({"numpy": "2.4.0", "triton": "3.7.0"}, None, ""),
        ({"qwen-tts": "0.1.1"}, None, ""),
        ({"qwen-tts": "0.1.1", "transformers": "4.58.0"}, "qwen-tts and transformers", "make hf"),
    ],
)
def test_bad_versions_are_found(
    monkeypatch: pytest.MonkeyPatch, changed: dict[str, str | None], finding: str | None, hint: str
) -> None:
    monkeypatch.setattr("importlib.metadata.requires", lambda package: [])
    bad = [f for f in doctor.examine_versions({**GOOD, **changed}) if f.status != "ok"]
    assert [f.name for f in bad] == ([finding] if finding else [])
    assert all(hint in f.hint for f in bad)


def test_a_triton_that_torch_was_not_built_with_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    pin = ["numpy", "triton==3.7.1; platform_system == 'Linux'"]
    monkeypatch.setattr("importlib.metadata.requires", lambda package: pin)
    bad = [f for f in doctor.examine_versions(GOOD) if f.status != "ok"]
    assert [(f.name, f.hint) for f in bad] == [("torch and triton", "install triton 3.7.1")]


def test_a_good_gpu_gives_driver_capability_and_largest_grid() -> None:
    findings = {f.name: f for f in doctor.device_findings(H200)}
    assert {f.status for f in findings.values()} == {"ok"}
    assert "580.65.06" in findings["driver"].detail
    assert "compute capability 9.0" in findings["gpu"].detail
    assert "up to 132" in findings["cooperative launch"].detail


@pytest.mark.parametrize(
    ("change", "finding"),
    [({"capability": (7, 5)}, "gpu"), ({"cooperative_launch": False}, "cooperative launch")],
)
def test_a_gpu_that_will_not_do_is_found(change: dict[str, object], finding: str) -> None:
    device = dataclasses.replace(H200, **change)  # type: ignore[arg-type]
    assert [f.name for f in doctor.device_findings(device) if f.status != "ok"] == [finding]


def test_the_launcher_needs_a_compiler_and_headers(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("sysconfig.get_paths", lambda scheme: {"include": str(tmp_path)})
    assert [f.status for f in doctor.examine_launcher(has_gpu=True)] == ["missing", "missing"]
    assert [f.status for f in doctor.examine_launcher(has_gpu=False)] == ["ok", "ok"]
    compiler = tmp_path / "gcc"
    compiler.touch(mode=0o755)
    (tmp_path / "Python.h").touch()
    found = doctor.examine_launcher(has_gpu=True)
    assert [f.detail for f in found] == [str(compiler), str(tmp_path / "Python.h")]


def test_doctor_reports_a_torch_that_does_not_import(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('broken on purpose')")
    program = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r}); "
        "from triton_mega.cli import main; sys.exit(main(['doctor']))"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert "torch does not import: broken on purpose" in result.stdout

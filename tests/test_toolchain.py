"""What is missing on a machine is found before a compiler fails on it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from triton_mega import toolchain
from triton_mega.backends import BackendUnavailable, load_backend, triton_common

CUDA = torch.device("cuda", 0)


@pytest.mark.parametrize(
    ("triton", "numpy", "works"),
    [
        ("3.6.0", "2.3.5", True),
        ("3.6.0", "2.4.0", False),
        ("3.6.1+git", "2.5.2", False),
        ("3.7.0", "2.4.0", True),
    ],
)
def test_version_pairs_that_crash(triton: str, numpy: str, works: bool) -> None:
    fault = toolchain.interpreter_fault(triton, numpy)
    assert (fault is None) == works
    if fault is not None:
        assert triton in fault
        assert numpy in fault


def test_versions_are_read_up_to_their_suffix() -> None:
    assert toolchain.release("2.13.0+cpu") == (2, 13, 0)
    assert toolchain.release("unknown") == ()


def test_compiler_is_that_of_cc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mine = tmp_path / "mycc"
    mine.write_text("#!/bin/sh\n")
    mine.chmod(0o755)
    monkeypatch.setenv("CC", str(mine))
    assert toolchain.find_compiler() == str(mine)
    monkeypatch.setenv("CC", "no-such-compiler")
    assert toolchain.find_compiler() is None
    assert toolchain.launcher_fault() == (
        "no C compiler (no-such-compiler)",
        "install gcc, or set CC",
    )


def test_missing_header_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(toolchain, "find_compiler", lambda: "/usr/bin/cc")
    monkeypatch.setattr(toolchain, "python_header", lambda: tmp_path / "Python.h")
    fault = toolchain.launcher_fault()
    assert fault is not None
    assert fault[0] == f"no {tmp_path / 'Python.h'}"
    (tmp_path / "Python.h").touch()
    assert toolchain.launcher_fault() is None


@pytest.mark.parametrize("name", ["torch_compile", "triton_staged", "triton_persistent"])
def test_backends_that_compile_a_launcher_say_so(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setenv("CC", "no-such-compiler")
    with pytest.raises(BackendUnavailable, match="no C compiler") as caught:
        load_backend(name).check_available(CUDA)
    assert caught.value.hint == "install gcc, or set CC"


def test_old_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    with pytest.raises(BackendUnavailable, match=r"compute capability 7\.5 is below 8\.0"):
        load_backend("triton_persistent").check_available(CUDA)


def test_interpreter_that_would_crash_is_not_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_common, "interpreted", lambda: True)
    monkeypatch.setattr(triton_common, "installed_interpreter_fault", lambda: "it crashes")
    with pytest.raises(BackendUnavailable, match="it crashes") as caught:
        load_backend("triton_staged").check_available(torch.device("cpu"))
    assert caught.value.hint == "install numpy < 2.4"

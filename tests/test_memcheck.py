"""The launches that run under compute-sanitizer are checked ones."""

from __future__ import annotations

import pytest

from experiments import memcheck
from triton_mega.backends.triton_persistent import TritonPersistent

pytestmark = pytest.mark.interpret

COMMAND = ["memcheck", "triton_persistent", "--models", "tiny"]


def test_a_correct_launch_is_said_to_be_correct(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", COMMAND)
    assert memcheck.main() == 0
    assert "triton_persistent tiny: correct, hidden " in capsys.readouterr().out


def test_a_wrong_result_is_a_failure(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def with_a_wrong_weight(*args: object, **options: object) -> TritonPersistent:
        backend = TritonPersistent(*args, **options)  # type: ignore[arg-type]
        backend._weights[0].down[1, 0] = 0
        return backend

    monkeypatch.setattr(memcheck, "load_backend", lambda name: with_a_wrong_weight)
    monkeypatch.setattr("sys.argv", COMMAND)
    assert memcheck.main() == 1
    assert "INCORRECT layer 1, stage down_proj" in capsys.readouterr().out

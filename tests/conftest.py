"""Which tests a pytest process runs, and which of those this machine can run.

Triton reads ``TRITON_INTERPRET`` when a kernel is defined, so one process cannot hold both
interpreted and compiled kernels. With ``TRITON_INTERPRET=1`` a process runs the tests marked
``interpret`` and no other; without it, all the rest. ``make test`` runs both processes. What
belongs to the other process is deselected; what this machine cannot run is skipped with a reason.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Set as AbstractSet

import pytest
import torch

from triton_mega.toolchain import installed_interpreter_fault

IN_INTERPRETER = os.environ.get("TRITON_INTERPRET") == "1"
NOT_INTERPRETED = {"compile", "gpu"}
GPU_TIMEOUT_S = 180


def runs_in(marks: AbstractSet[str], interpreter: bool) -> bool:
    """Returns whether a test with these marks belongs to this kind of process.

    Every test belongs to exactly one kind.

    Raises:
        pytest.UsageError: the marks ask for both kinds.
    """
    both = NOT_INTERPRETED & marks
    if "interpret" in marks and both:
        raise pytest.UsageError(f"a test cannot be both interpret and {', '.join(sorted(both))}")
    return ("interpret" in marks) == interpreter


def missing_part(marks: AbstractSet[str]) -> str | None:
    """Returns why this machine cannot run a test with these marks, None where it can."""
    if "gpu" in marks and not torch.cuda.is_available():
        return "needs an NVIDIA GPU"
    if "hf" in marks and importlib.util.find_spec("qwen_tts") is None:
        return "needs the official qwen-tts package (make hf)"
    if "interpret" in marks:
        return installed_interpreter_fault()
    return None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    kept: list[pytest.Item] = []
    other: list[pytest.Item] = []
    for item in items:
        marks = {mark.name for mark in item.iter_markers()}
        (kept if runs_in(marks, IN_INTERPRETER) else other).append(item)
        if reason := missing_part(marks):
            item.add_marker(pytest.mark.skip(reason=reason))
        if "gpu" in marks and "timeout" not in marks:
            item.add_marker(pytest.mark.timeout(GPU_TIMEOUT_S))
    if other:
        config.hook.pytest_deselected(items=other)
        items[:] = kept

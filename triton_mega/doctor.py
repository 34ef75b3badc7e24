"""What this machine has, which backends it can run, and why it cannot run the others.

Every finding is a value: a missing driver or package ends up in the report, never in a traceback.
Knows nothing about how the report is shown (``cli.py``).
"""

from __future__ import annotations

import importlib.metadata
import platform
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

import triton_mega
from triton_mega import toolchain
from triton_mega.device import MIN_CAPABILITY, DeviceInfo, DeviceUnavailable

Status = Literal["ok", "warning", "missing"]

PACKAGES = (
    *("torch", "triton", "numpy", "safetensors", "huggingface-hub", "transformers"),
    *("qwen-tts", "cuda-core", "nvidia-cuda-nvrtc", "hydra-core", "rich", "matplotlib", "pandas"),
)
MIN_TRITON, END_TRITON = (3, 6), (3, 10)
MIN_TORCH = (2, 11)
MIN_PYTHON, END_PYTHON = (3, 11), (3, 14)
OFFICIAL_TRANSFORMERS = "4.57.3"


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at."""

    name: str
    status: Status
    detail: str
    hint: str = ""


@dataclass(frozen=True)
class BackendFinding:
    """Whether one backend can run on ``device``, and what is in the way where it cannot."""

    name: str
    available: bool
    device: str
    reason: str = ""
    hint: str = ""


@dataclass(frozen=True)
class Report:
    """Everything that ``triton-mega doctor`` says."""

    version: str
    packages: dict[str, str | None]
    device: DeviceInfo | None
    findings: list[Finding]
    backends: list[BackendFinding]

    def as_dict(self) -> dict[str, Any]:
        """Returns the report as values that JSON can hold."""
        return asdict(self)


def examine() -> Report:
    """Looks at this machine. Reads the driver, allocates no GPU memory, runs no kernel."""
    packages = {name: _installed(name) for name in PACKAGES}
    device, device_findings = examine_device()
    findings = [examine_platform(), *examine_versions(packages), *device_findings]
    findings += [examine_torch(device is not None), *examine_launcher(device is not None)]
    return Report(triton_mega.__version__, packages, device, findings, examine_backends())


def examine_platform() -> Finding:
    """Checks Python's version and that Triton has wheels for this kind of machine."""
    detail = f"Python {platform.python_version()}, {platform.system()} {platform.machine()}"
    version = tuple(int(part) for part in platform.python_version_tuple()[:2])
    if not MIN_PYTHON <= version < END_PYTHON:
        return Finding("platform", "warning", detail, "Python 3.11 to 3.13 is supported")
    if (platform.system(), platform.machine()) != ("Linux", "x86_64"):
        return Finding("platform", "warning", detail, "Triton's wheels are for Linux x86-64")
    return Finding("platform", "ok", detail)


def examine_versions(packages: Mapping[str, str | None]) -> list[Finding]:
    """Checks the installed versions against each other and against what the package supports."""
    findings = []
    torch, triton, numpy = (packages.get(name) for name in ("torch", "triton", "numpy"))
    for name, version, low, end in (
        ("torch", torch, MIN_TORCH, None),
        ("triton", triton, MIN_TRITON, END_TRITON),
    ):
        wanted = f"{name} >= {_dotted(low)}" + (f", < {_dotted(end)}" if end else "")
        if version is None:
            findings.append(Finding(name, "missing", "not installed", f"install {wanted}"))
        elif toolchain.release(version) < low or (
            end is not None and toolchain.release(version) >= end
        ):
            findings.append(Finding(name, "warning", version, f"supported: {wanted}"))
        else:
            findings.append(Finding(name, "ok", version))
    pin = _triton_that_torch_wants() if torch and triton else None
    if pin is not None and pin != triton:
        detail = f"torch {torch} was built with triton {pin}, installed is {triton}"
        findings.append(Finding("torch and triton", "warning", detail, f"install triton {pin}"))
    if triton and numpy and (fault := toolchain.interpreter_fault(triton, numpy)):
        hint = "install numpy < 2.4; only the interpreter is affected"
        findings.append(Finding("triton and numpy", "warning", fault, hint))
    transformers = packages.get("transformers")
    if packages.get("qwen-tts") and transformers != OFFICIAL_TRANSFORMERS:
        detail = f"qwen-tts needs transformers {OFFICIAL_TRANSFORMERS}, installed is {transformers}"
        findings.append(Finding("qwen-tts and transformers", "warning", detail, "make hf"))
    return findings


def examine_device() -> tuple[DeviceInfo | None, list[Finding]]:
    """Reads the first visible GPU and checks what the persistent kernel asks of it."""
    try:
        device = DeviceInfo.read()
    except DeviceUnavailable as error:
        return None, [Finding("gpu", "missing", str(error), "CPU work and the interpreter remain")]
    return device, device_findings(device)


def device_findings(device: DeviceInfo) -> list[Finding]:
    """Checks driver, compute capability and cooperative launch of a GPU."""
    capability = _dotted(device.capability)
    detail = f"{device.name}: {device.sm_count} multiprocessors, compute capability {capability}"
    old = device.capability < MIN_CAPABILITY
    hint = f"the kernels need {_dotted(MIN_CAPABILITY)} or newer" if old else ""
    findings = [
        Finding("driver", "ok", f"NVIDIA {device.driver or '?'}, up to CUDA {device.cuda_driver}"),
        Finding("gpu", "warning" if old else "ok", detail, hint),
    ]
    if device.cooperative_launch:
        detail = f"all programs of a grid up to {device.resident_programs(8, 255, 0)} run at once"
        detail += " at 8 warps and 255 registers each"
        return [*findings, Finding("cooperative launch", "ok", detail)]
    detail = "this GPU does not start a grid as a whole, so a grid barrier could wait forever"
    return [*findings, Finding("cooperative launch", "missing", detail)]


def examine_torch(has_gpu: bool) -> Finding:
    """Says which build torch is and whether it sees the GPU that the driver shows."""
    try:
        import torch
    except ImportError as error:
        return Finding("torch build", "missing", f"torch does not import: {error}")
    if torch.version.cuda is None:
        hint = "install a CUDA build of torch to use the GPU" if has_gpu else ""
        return Finding("torch build", "warning" if has_gpu else "ok", "CPU", hint)
    if has_gpu and not torch.cuda.is_available():
        hint = "is the driver older than that CUDA version?"
        return Finding("torch build", "warning", f"CUDA {torch.version.cuda} sees no GPU", hint)
    return Finding("torch build", "ok", f"CUDA {torch.version.cuda}")


def examine_launcher(has_gpu: bool) -> list[Finding]:
    """Checks what Triton builds its launcher with: a C compiler and Python's headers.

    They are needed on a machine with a GPU only.
    """
    absent: Status = "missing" if has_gpu else "ok"
    suffix = "" if has_gpu else " (needed with a GPU only)"
    compiler, header = toolchain.find_compiler(), toolchain.python_header()
    findings = [
        Finding("C compiler", "ok", compiler)
        if compiler
        else Finding(
            "C compiler",
            absent,
            f"no {toolchain.wanted_compiler()}{suffix}",
            "install gcc, or set CC",
        )
    ]
    if header.exists():
        return [*findings, Finding("Python.h", "ok", str(header))]
    hint = "install your distribution's python3-dev"
    return [*findings, Finding("Python.h", absent, f"no {header}{suffix}", hint)]


def examine_backends() -> list[BackendFinding]:
    """Asks each backend whether it can run here: on the GPU where torch sees one, else the CPU."""
    try:
        import torch

        from triton_mega.backends import BACKENDS, BackendUnavailable, load_backend
    except ImportError as error:
        return [BackendFinding("all", False, "none", f"torch does not import: {error}")]
    device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    findings = []
    for name in BACKENDS:
        try:
            load_backend(name).check_available(device)
        except BackendUnavailable as error:
            finding = BackendFinding(name, False, str(device), error.reason, error.hint)
        else:
            finding = BackendFinding(name, True, str(device))
        findings.append(finding)
    return findings


def _installed(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(str(part) for part in version)


def _triton_that_torch_wants() -> str | None:
    """Triton version that the installed torch pins; a CPU build pins none."""
    for requirement in importlib.metadata.requires("torch") or []:
        if match := re.match(r"triton\s*==\s*([\d.]+)", requirement):
            return match.group(1)
    return None

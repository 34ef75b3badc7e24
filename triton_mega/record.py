"""What one measurement was, on what machine, of which code, and what came out: one JSON line each.

A record cannot hold a latency of something that was not checked, and its ``run_id`` can be
recomputed from it. Knows nothing about how anything is measured (``bench.py``).
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import math
import platform
import subprocess
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args

import torch

_T = TypeVar("_T")

SCHEMA = 1
ROOT = Path(__file__).resolve().parent.parent

Status = Literal["passed", "incorrect", "unavailable", "compile_error", "timeout", "error"]

PATHS = frozenset({"results_dir", "checkpoint", "commit"})
DEVICE_INDEX = "device_index"

HASHED_DIRECTORIES = ("triton_mega", "cuda_ref")
HASHED_SUFFIXES = frozenset({".py", ".json", ".cu", ".cuh", ".h"})


@dataclass(frozen=True)
class Git:
    """The commit that the code is at; ``dirty`` where files differ from it."""

    commit: str
    dirty: bool

    @classmethod
    def read(cls, root: Path = ROOT) -> Git:
        """Asks git about the checkout at ``root``; results of experiments do not make it dirty.

        Raises:
            ValueError: git is not installed, or ``root`` is no checkout.
        """
        status = ("status", "--porcelain", "--", ".", ":!experiments/results")
        try:
            commit, changes = (
                subprocess.run(
                    ["git", "-C", str(root), *command], capture_output=True, text=True, check=True
                ).stdout
                for command in (("rev-parse", "HEAD"), status)
            )
        except (OSError, subprocess.CalledProcessError) as error:
            raise ValueError(
                f"commit: git cannot say which it is in {root} ({error}); give it as an argument"
            ) from error
        return cls(commit.strip(), bool(changes.strip()))

    @classmethod
    def parse(cls, text: str) -> Git:
        """Reads a commit given by hand: its hash, with ``-dirty`` behind it where files differ."""
        commit, dirty, rest = text.partition("-dirty")
        if rest or not commit or not set(commit) <= set("0123456789abcdef"):
            raise ValueError(f"commit: expected a hash in lower case, or HASH-dirty, got {text!r}")
        return cls(commit, bool(dirty))


@dataclass(frozen=True)
class Environment:
    """The machine and the packages; "unknown: reason" where something could not be read."""

    gpu: str
    sm_count: int | str
    driver: str
    cuda: str
    clocks: str
    cpu: str
    torch: str
    triton: str
    numpy: str
    python: str

    @classmethod
    def read(cls, device_index: int = 0) -> Environment:
        """Probes this machine; never raises, each failure becomes a value."""
        from triton_mega.device import DeviceInfo, DeviceUnavailable

        gpu: dict[str, Any]
        try:
            device = DeviceInfo.read(device_index)
        except DeviceUnavailable as error:
            gpu = dict.fromkeys(("gpu", "sm_count", "driver", "clocks"), f"unknown: {error}")
        else:
            gpu = {
                "gpu": device.name,
                "sm_count": device.sm_count,
                "driver": device.driver or "unknown: the driver does not say",
                "clocks": _clocks(device_index),
            }
        versions = {name: _version(name) for name in ("torch", "triton", "numpy")}
        return cls(
            **gpu,
            **versions,
            cuda=torch.version.cuda or "unknown: a CPU build of torch",
            cpu=platform.processor() or platform.machine(),
            python=platform.python_version(),
        )


@dataclass(frozen=True)
class Accuracy:
    """Relative error against the oracle, the bound it was judged by, and official bf16's own."""

    error: float
    bound: float
    baseline_error: float


@dataclass(frozen=True)
class Correctness:
    """What a check found; each stage's error is over all layers.

    ``stages`` has the new K/V rows (``k``, ``v``), and the stages where the backend shows them.
    """

    contract: str
    hidden: Accuracy
    logits: Accuracy
    stages: Mapping[str, Accuracy]
    first_divergence: str | None
    argmax_agreement: float
    steps_checked: int

    @property
    def passed(self) -> bool:
        """True where no error is above its bound."""
        whole = all(each.error <= each.bound for each in (self.hidden, self.logits))
        return whole and self.first_divergence is None


@dataclass(frozen=True)
class Performance:
    """How long one ``what`` took, and what that says about the memory system.

    ``aa_us`` is the difference between two equal candidates of the same run: less is noise.
    ``peak_bytes`` is GPU memory: the weights, and what the backend added up to its first output.
    """

    what: Literal["step"]
    clock: Literal["cuda_events", "perf_counter"]
    n: int
    steps_per_launch: int
    p20_us: float
    p50_us: float
    p80_us: float
    p99_us: float
    bytes: int
    gbps: float
    read_ceiling_gbps: Mapping[str, float]
    share_of_ceiling: float | None
    barrier_us: float | None
    aa_us: float
    cold_start_s: float
    wall_s: float
    peak_bytes: int | None

    def __post_init__(self) -> None:
        if self.n < 1:
            raise ValueError(f"performance.n: expected at least 1, got {self.n}")
        percentiles = [self.p20_us, self.p50_us, self.p80_us, self.p99_us]
        if percentiles != sorted(percentiles) or not 0 < percentiles[0] < math.inf:
            raise ValueError(f"performance.p20_us to p99_us: expected rising, got {percentiles}")


@dataclass(frozen=True)
class Record:
    """One line of ``experiments/results/<experiment>.jsonl``.

    ``config`` is kept as ``run_id`` sees it: no device index, and of a path whether there was one.
    """

    experiment: str
    time_utc: str
    command: str
    git: Git
    package_sha: str
    environment: Environment
    config: Mapping[str, Any]
    backend: str
    spec: str
    position: int
    dtype: str
    weights: Literal["checkpoint", "random", "hash"]
    seed: int
    status: Status
    tuning: Mapping[str, Any] | None = None
    reason: str | None = None
    correctness: Correctness | None = None
    performance: Performance | None = None
    schema: int = SCHEMA
    run_id: str = field(default="")

    def __post_init__(self) -> None:
        object.__setattr__(self, "config", _without_paths(self.config))
        computed = run_id(self.config, self.git.commit)
        if self.run_id not in ("", computed):
            raise ValueError(f"run_id: expected {computed} for this config, got {self.run_id}")
        object.__setattr__(self, "run_id", computed)
        if self.schema != SCHEMA:
            raise ValueError(f"schema: expected {SCHEMA}, got {self.schema}")
        if self.status not in get_args(Status):
            raise ValueError(f"status: expected one of {get_args(Status)}, got {self.status!r}")
        if self.performance is not None and self.status != "passed":
            raise ValueError(f"performance: only a passed record has one, this is {self.status}")
        verdicts: dict[str, bool | None] = {"passed": True, "incorrect": False}
        verdict = None if self.correctness is None else self.correctness.passed
        if verdicts.get(self.status, verdict) != verdict:
            raise ValueError(f"status: {self.status} does not follow from correctness")
        if (self.status == "passed") == bool(self.reason):
            raise ValueError(f"reason: a {self.status} record has {self.reason!r}")

    def to_json(self) -> str:
        """Returns the record as one line of JSON; numbers that are not finite become strings."""
        return json.dumps(_finite(asdict(self)), allow_nan=False)

    @classmethod
    def from_json(cls, line: str) -> Record:
        """Reads and validates one line.

        Raises:
            ValueError: a field is missing, unknown or contradicts another; names it.
        """
        values = dict(json.loads(line))
        values["git"] = _build(Git, values.get("git"), "git")
        values["environment"] = _build(Environment, values.get("environment"), "environment")
        if values.get("correctness") is not None:
            found = dict(values["correctness"])
            for name in ("hidden", "logits"):
                found[name] = _accuracy(found.get(name), f"correctness.{name}")
            stages = dict(found.get("stages", {}))
            found["stages"] = {
                name: _accuracy(stages[name], f"correctness.stages.{name}") for name in stages
            }
            values["correctness"] = _build(Correctness, found, "correctness")
        if values.get("performance") is not None:
            values["performance"] = _build(Performance, values["performance"], "performance")
        return _build(cls, values, "record")


def run_id(config: Mapping[str, Any], commit: str) -> str:
    """Returns the first 10 hex digits of SHA-256 over canonical JSON of config and commit.

    The device's index is left out, and of a path only whether there is one.
    """
    text = json.dumps(
        {"config": _without_paths(config), "commit": commit}, sort_keys=True, separators=(",", ":")
    )
    return hashlib.sha256(text.encode()).hexdigest()[:10]


def package_files(root: Path = ROOT) -> dict[str, bytes]:
    """Returns the source files of the package below ``root`` by relative path."""
    paths = [path for name in HASHED_DIRECTORIES for path in (root / name).rglob("*")]
    sources = [path for path in paths if path.suffix in HASHED_SUFFIXES]
    return {path.relative_to(root).as_posix(): path.read_bytes() for path in sources}


def package_sha(sources: Mapping[str, bytes]) -> str:
    """Returns SHA-256 over path and content of every file, in order of path."""
    digest = hashlib.sha256()
    for path in sorted(sources):
        digest.update(f"{path}\0{len(sources[path])}\0".encode())
        digest.update(sources[path])
    return digest.hexdigest()


def append(path: Path, records: list[Record]) -> None:
    """Adds records to the end of a JSON-lines file; makes the file and its directory."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.writelines(record.to_json() + "\n" for record in records)


def read(path: Path) -> list[Record]:
    """Returns all records of a JSON-lines file, oldest first; none where there is no file.

    Raises:
        ValueError: a line is not a valid record; names file and line.
    """
    if not path.exists():
        return []
    records = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            records.append(Record.from_json(line))
        except ValueError as error:
            raise ValueError(f"{path.name}, line {number}: {error}") from error
    return records


def _build(cls: type[_T], values: Any, where: str) -> _T:
    if not isinstance(values, Mapping):
        raise ValueError(f"{where}: expected a mapping, got {values!r}")
    names = {f.name for f in fields(cls)}  # type: ignore[arg-type]
    for key in values:
        if key not in names:
            raise ValueError(f"{where}.{key}: unknown")
    try:
        return cls(**values)
    except TypeError as error:
        raise ValueError(f"{where}: {error}") from error


def _accuracy(values: Any, where: str) -> Accuracy:
    if isinstance(values, Mapping):
        values = {key: float(value) for key, value in values.items()}
    return _build(Accuracy, values, where)


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _without_paths(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {
            key: each not in (None, False) if key in PATHS else _without_paths(each)
            for key, each in value.items()
            if key != DEVICE_INDEX
        }
    return [_without_paths(each) for each in value] if isinstance(value, list) else value


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "unknown: not installed"


def _clocks(device_index: int) -> str:
    query = "--query-gpu=clocks.sm,clocks.mem,clocks.max.sm,clocks.max.mem"
    command = ["nvidia-smi", f"--id={device_index}", query, "--format=csv,noheader"]
    try:
        result = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20)
    except (OSError, subprocess.SubprocessError) as error:
        return f"unknown: {error}"
    return result.stdout.strip()

"""From a composed Hydra config to plain dataclasses, checked before any work starts.

Every complaint names the key as it would be written on the command line.
"""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from triton_mega.backends import BACKENDS
from triton_mega.bench import Timing
from triton_mega.record import ROOT
from triton_mega.spec import DecoderSpec, Role
from triton_mega.tuning import TuningConfig

CONF = ROOT / "conf"
NO_GPU_EXPERIMENT = "experiment=cpu"

T = TypeVar("T")


@dataclass(frozen=True)
class Model:
    """Which decoder, and where its weights come from: a checkpoint, or random numbers by seed.

    With a checkpoint, its own config.json decides the shapes and must agree with ``spec``.
    """

    name: str
    seed: int
    checkpoint: str | None
    spec: DecoderSpec

    @property
    def weights(self) -> Literal["checkpoint", "random"]:
        """Where the weights come from, as records say it."""
        return "random" if self.checkpoint is None else "checkpoint"


@dataclass(frozen=True)
class Backend:
    """The backends to compare, by name."""

    names: tuple[str, ...]

    def __post_init__(self) -> None:
        if not self.names:
            raise ValueError(f"names: expected some of {', '.join(BACKENDS)}, got none")
        for name in self.names:
            if name not in BACKENDS:
                raise ValueError(f"names: expected some of {', '.join(BACKENDS)}, got {name!r}")


@dataclass(frozen=True)
class Tuning:
    """The Triton kernels' launch shape; ``values`` None means the default for model and device."""

    values: TuningConfig | None


@dataclass(frozen=True)
class Workload:
    """Steps to check and time: ``steps_per_launch`` from each position on."""

    positions: tuple[int, ...]
    steps_per_launch: int

    def __post_init__(self) -> None:
        if not self.positions or min(self.positions) < 0:
            raise ValueError(f"positions: expected some, 0 or more, got {list(self.positions)}")
        if self.steps_per_launch < 1:
            raise ValueError(f"steps_per_launch: expected 1 or more, got {self.steps_per_launch}")

    @property
    def max_positions(self) -> int:
        """Cache rows that hold every position's steps."""
        return max(self.positions) + self.steps_per_launch


@dataclass(frozen=True)
class Trace:
    """Which committed dump of the official package to follow, and how many of its last rows."""

    fixture: str
    roles: tuple[Role, ...]
    last_rows: int | None

    def __post_init__(self) -> None:
        if not self.roles:
            raise ValueError(f"roles: expected some of {', '.join(get_args(Role))}, got none")
        if self.last_rows is not None and self.last_rows < 1:
            raise ValueError(f"last_rows: expected 1 or more, got {self.last_rows}")


@dataclass(frozen=True)
class Run:
    """What every experiment is asked: on which GPU, of which commit, and where records go."""

    device_index: int
    results_dir: str | None
    commit: str | None

    @property
    def results(self) -> Path:
        """Directory of records and figures; a relative one counts from the working directory."""
        return (
            ROOT / "experiments" / "results" if self.results_dir is None else Path(self.results_dir)
        )


@dataclass(frozen=True)
class Parity(Run):
    """Everything that ``experiments.parity`` is asked to do."""

    trace: Trace
    backend: Backend
    tuning: Tuning


@dataclass(frozen=True)
class Compare(Run):
    """Everything that ``experiments.compare`` is asked to do."""

    model: Model
    backend: Backend
    tuning: Tuning
    workload: Workload
    timing: Timing

    def __post_init__(self) -> None:
        longest = self.model.spec.max_position_embeddings
        if self.workload.max_positions > longest:
            raise ValueError(
                f"workload.positions: {self.workload.max_positions} rows with steps_per_launch, "
                f"{self.model.name} has {longest} positions"
            )


def overrides(
    given: Sequence[str], has_gpu: bool, no_gpu: Sequence[str] = (NO_GPU_EXPERIMENT,)
) -> list[str]:
    """Returns command-line overrides; without a GPU, choices that a CPU can do come first.

    A group that is named on the command line is left alone.
    """
    named = {each.lstrip("+").partition("=")[0] for each in given}
    chosen = [each for each in no_gpu if each.partition("=")[0] not in named]
    return list(given) if has_gpu else [*chosen, *given]


def build(cls: type[T], values: Any, where: str = "") -> T:
    """Returns a dataclass made of a config's values, nested ones too.

    Raises:
        ValueError: a key is unknown, missing or of another type; names it.
    """
    if not isinstance(values, Mapping):
        raise ValueError(f"{where or 'config'}: expected keys and values, got {values!r}")
    prefix = f"{where}." if where else ""
    hints = get_type_hints(cls)
    known = {f.name: f for f in dataclasses.fields(cls)}  # type: ignore[arg-type]
    for key in values:
        if key not in known:
            raise ValueError(f"{prefix}{key}: unknown key; known are {', '.join(known)}")
    made = {}
    for key, known_field in known.items():
        if key in values:
            made[key] = _convert(hints[key], values[key], prefix + key)
        elif known_field.default is dataclasses.MISSING:
            raise ValueError(f"{prefix}{key}: missing")
    try:
        return cls(**made)
    except ValueError as error:
        raise ValueError(f"{prefix}{str(error).removeprefix(prefix)}") from error


def _convert(hint: Any, value: Any, where: str) -> Any:
    origin, choices = get_origin(hint), get_args(hint)
    if origin is types.UnionType:
        if value is None and type(None) in choices:
            return None
        (hint,) = (choice for choice in choices if choice is not type(None))
        return _convert(hint, value, where)
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        return build(hint, value, where)
    if origin is Literal:
        fits = value in choices
        expected = f"one of {', '.join(choices)}"
    elif origin is tuple:
        fits = isinstance(value, Sequence) and not isinstance(value, str)
        expected = "a list"
    else:
        wider = (int, float) if hint is float else (hint,)
        fits = isinstance(value, wider) and not (isinstance(value, bool) and hint is not bool)
        expected = hint.__name__
    if not fits:
        raise ValueError(f"{where}: expected {expected}, got {value!r}")
    if origin is tuple:
        return tuple(_convert(choices[0], each, f"{where}[{i}]") for i, each in enumerate(value))
    return float(value) if hint is float else value

"""The project's only way to compare numbers: errors against an oracle, judged by a stated bound.

NaN never passes. Used by tests, experiments and the compare gate alike.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch


def relative_error(got: torch.Tensor, want: torch.Tensor) -> float:
    """Returns ``|got - want| / |want|`` in fp64; infinity where anything is not finite."""
    if got.shape != want.shape:
        raise ValueError(f"got: expected {list(want.shape)}, got {list(got.shape)}")
    got, want = got.detach().double().cpu(), want.detach().double().cpu()
    error = float((got - want).norm() / want.norm().clamp_min(1e-300))
    return error if torch.isfinite(got).all() and torch.isfinite(want).all() else float("inf")


def assert_close(
    got: torch.Tensor, want: torch.Tensor, bound: float, what: str = "result"
) -> float:
    """Returns the relative error; raises AssertionError where it is above ``bound``."""
    error = relative_error(got, want)
    if not error <= bound:
        raise AssertionError(f"{what}: relative error {error:.3e} is above {bound:.3e}")
    return error


@dataclass(frozen=True)
class Divergence:
    """The first place, in order of execution, where a trace leaves its oracle."""

    stage: str
    layer: int | None
    error: float
    bound: float

    def __str__(self) -> str:
        where = self.stage if self.layer is None else f"layer {self.layer}, stage {self.stage}"
        return f"{where}: relative error {self.error:.3e} is above {self.bound:.3e}"


def first_divergence(
    trace: Mapping[str, torch.Tensor],
    oracle: Mapping[str, torch.Tensor],
    bound: float,
    yardstick: Mapping[str, torch.Tensor] | None = None,
) -> Divergence | None:
    """Compares two traces (``DecodeBackend.trace_step``) layer by layer, stage by stage.

    Stages run in the oracle's key order; those with a leading layer axis come before the others.
    Where a ``yardstick`` trace is given, ``bound`` counts in its error at the same place.
    """
    if set(trace) != set(oracle):
        raise ValueError(f"trace: expected stages {list(oracle)}, got {list(trace)}")
    layered = [stage for stage in oracle if oracle[stage].dim() == 2]
    num_layers = max((oracle[stage].shape[0] for stage in layered), default=0)
    places: list[tuple[str, int | None]] = [(s, i) for i in range(num_layers) for s in layered]
    places += [(stage, None) for stage in oracle if stage not in layered]
    for stage, layer in places:
        index = ... if layer is None else layer
        got, want = trace[stage][index], oracle[stage][index]
        error, limit = relative_error(got, want), bound
        if yardstick is not None:
            limit *= relative_error(yardstick[stage][index], want)
        if not error <= limit:
            return Divergence(stage, layer, error, limit)
    return None

"""Which backend decodes one step fastest on this machine, and is it right?

    python -m experiments.compare                          # what this machine can do
    python -m experiments.compare experiment=talker_0p6b
    python -m experiments.compare model.checkpoint=DIRECTORY backend=triton

Every backend is checked against the reference at every position, and only what passes is timed. The
last line of stdout is a JSON document. Exit code: 0; 1 if a backend is incorrect or fails (one that
this machine cannot run is no failure); 2 on a wrong config.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import hydra
import torch
from omegaconf import DictConfig
from rich.console import Console
from rich.progress import Progress

from experiments import report
from experiments.config import CONF, NO_GPU_EXPERIMENT, Compare, Model, overrides
from experiments.start import begin
from triton_mega import bench, gate, record
from triton_mega.backends import BackendUnavailable, load_backend
from triton_mega.record import Correctness, Git, Performance, Record, Status
from triton_mega.weights import DecoderWeights, random_weights

RECORDS = "compare.jsonl"
TABLE_WIDTH = 140
"""Columns of a table that no terminal limits."""

log = logging.getLogger(__name__)
Outcome = dict[str, Any]  # the fields of a record that tell how it went


@dataclass(frozen=True)
class Chip:
    """What every backend is held against on this device."""

    gbps: Mapping[str, float]
    barrier_us: float | None


def load_weights(model: Model, device: torch.device) -> DecoderWeights:
    """Returns the model's weights; raises ValueError where a checkpoint has other shapes."""
    if model.checkpoint is None:
        return random_weights(model.spec, model.seed, device)
    from triton_mega.checkpoint import open_checkpoint

    checkpoint = open_checkpoint(model.checkpoint)
    found = checkpoint.spec.decoders[model.spec.role]
    for key, value in asdict(found).items():
        if value != asdict(model.spec)[key]:
            raise ValueError(f"model.spec.{key}: the checkpoint has {value}; choose another model=")
    return checkpoint.decoder_weights(model.spec.role, device)


def failure(name: str, error: BaseException | None) -> Outcome:
    """Returns the outcome that an exception stands for; what is not expected goes to the log."""
    from triton.errors import TritonError

    if isinstance(error, BackendUnavailable):
        hint = f" ({error.hint})" if error.hint else ""
        return {"status": "unavailable", "reason": error.reason + hint}
    log.error("%s failed", name, exc_info=error)
    status: Status = "compile_error" if isinstance(error, TritonError) else "error"
    return {"status": status, "reason": f"{type(error).__name__}: {error}"}


def start_backends(
    asked: Compare, weights: DecoderWeights, advance: Callable[[str], None]
) -> tuple[dict[str, bench.Started], dict[str, Outcome]]:
    """Makes every backend; returns those that made a step, and how it went for the others."""
    device = weights.qkv.device
    started: dict[str, bench.Started] = {}
    failed: dict[str, Outcome] = {}
    for name in asked.backend.names:
        tuned = asked.tuning.values is not None and name.startswith("triton_")
        options = {"tuning": asked.tuning.values} if tuned else {}
        rows = asked.workload.max_positions
        try:
            made = load_backend(name)
            made.check_available(device)
            started[name] = bench.start(
                made, asked.model.spec, weights, max_positions=rows, **options
            )
        except Exception as error:  # noqa: BLE001 - one backend's failure is a row, not the end
            failed[name] = failure(name, error)
        advance(f"{name}: started")
    return started, failed


def measure(
    asked: Compare,
    weights: DecoderWeights,
    position: int,
    started: Mapping[str, bench.Started],
    chip: Chip,
    advance: Callable[[str], None],
) -> dict[str, Outcome]:
    """Checks every started backend at one position, then times those that are right."""
    began = time.perf_counter()
    spec, steps = asked.model.spec, asked.workload.steps_per_launch
    oracle = gate.Oracle.build(
        spec,
        weights,
        position=position,
        steps=steps,
        max_positions=asked.workload.max_positions,
        seed=asked.model.seed + position,
    )
    outcomes: dict[str, Outcome] = {}
    checks: dict[str, gate.Check] = {}
    for name, start in started.items():
        try:
            checks[name] = gate.check_backend(start.backend, oracle)
        except Exception as error:  # noqa: BLE001 - as above
            outcomes[name] = failure(name, error)
        else:
            outcomes[name] = verdict(checks[name].correctness)
        advance(f"{name}: checked at position {position}")
    timed, aa_us = time_passed(checks, outcomes, asked.timing)
    wall_s = time.perf_counter() - began
    size, best = bench.step_bytes(spec, position, steps), max(chip.gbps.values(), default=None)
    for name, latency in timed.items():
        gbps = size / latency.p50_us / 1e3
        outcomes[name]["performance"] = Performance(
            what="step",
            **asdict(latency),
            steps_per_launch=steps,
            bytes=size,
            gbps=gbps,
            read_ceiling_gbps=chip.gbps,
            share_of_ceiling=None if best is None else gbps / best,
            barrier_us=chip.barrier_us,
            aa_us=aa_us,
            cold_start_s=started[name].cold_start_s,
            wall_s=wall_s,
            peak_bytes=started[name].peak_bytes,
        )
    advance(f"timed at position {position}")
    return outcomes


def run(
    asked: Compare,
    weights: DecoderWeights,
    config: Mapping[str, Any],
    git: Git,
    command: str,
    console: Console,
    keep: Callable[[list[Record]], None],
) -> list[Record]:
    """Checks and times what was asked for and returns one record per backend and position.

    ``keep`` is given a position's records as soon as they are there: a run that is ended early
    loses no more than the position that it was at.
    """
    model, names, positions = asked.model, asked.backend.names, asked.workload.positions
    new_record = partial(
        Record,
        experiment="compare",
        time_utc=datetime.now(UTC).isoformat(timespec="seconds"),
        command=command,
        git=git,
        package_sha=record.package_sha(record.package_files()),
        environment=record.Environment.read(asked.device_index),
        config=config,
        spec=model.name,
        dtype="bfloat16",
        weights=model.weights,
        seed=model.seed,
    )
    device = weights.qkv.device
    if device.type == "cuda":  # Triton launches, and events are recorded, on the current one
        torch.cuda.set_device(device)
    chip = Chip(bench.read_ceilings(device), bench.barrier_us(device))
    records: list[Record] = []
    with Progress(console=console, transient=True) as progress:
        total = len(names) * (1 + len(positions)) + len(positions)
        task = progress.add_task("start", total=total)

        def advance(what: str) -> None:
            progress.update(task, advance=1, description=what)

        started, failed = start_backends(asked, weights, advance)
        for position in positions:
            outcomes = failed | measure(asked, weights, position, started, chip, advance)
            found = []
            for name in names:
                tuning = getattr(started[name].backend, "tuning", None) if name in started else None
                tuning = None if tuning is None else asdict(tuning)
                found.append(
                    new_record(backend=name, position=position, tuning=tuning, **outcomes[name])
                )
            keep(found)
            records += found
    return records


def verdict(found: Correctness) -> Outcome:
    """Returns the outcome of a check, with the reason where it did not pass."""
    if found.passed:
        return {"status": "passed", "correctness": found}
    hidden = f"hidden states: relative error {found.hidden.error:.3e}"
    logits = f"logits: relative error {found.logits.error:.3e}"
    reason = found.first_divergence or f"{hidden}, {logits}"
    return {"status": "incorrect", "correctness": found, "reason": reason}


def time_passed(
    checks: dict[str, gate.Check], outcomes: dict[str, Outcome], timing: bench.Timing
) -> tuple[dict[str, bench.Latency], float]:
    """Times the checks that passed; a candidate that fails is noted, and the rest timed again."""
    left = {name: check for name, check in checks.items() if check.correctness.passed}
    while True:
        try:
            latencies, aa_us = bench.time_backends(list(left.values()), timing)
        except bench.TimingFailed as error:
            (name,) = (name for name, check in left.items() if check is error.check)
            outcomes[name] |= failure(name, error.__cause__)
            del left[name]
        else:
            return dict(zip(left, latencies, strict=True)), aa_us


@hydra.main(version_base="1.3", config_path=str(CONF), config_name="compare")
def main(composed: DictConfig) -> None:
    """Runs the composed config: table, records, figure, one line of JSON."""
    begun = begin(Compare, composed, "experiments.compare")
    asked, keep = begun.asked, partial(record.append, begun.asked.results / RECORDS)
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", asked.device_index) if on_gpu else torch.device("cpu")
    try:
        weights = load_weights(asked.model, device)
    except (OSError, ValueError) as error:
        print(f"config: {error}", file=sys.stderr)
        sys.exit(2)
    console = Console(stderr=True)
    records = run(asked, weights, begun.config, begun.git, begun.command, console, keep)
    sys.exit(conclude(records, asked.results))


def conclude(records: list[Record], results: Path) -> int:
    """Draws and shows the records of a run; returns the process's exit code."""
    path, figure = results / RECORDS, results / f"compare_{records[0].run_id}.png"
    report.draw(records, figure)
    report.print_table(records, Console(width=None if sys.stdout.isatty() else TABLE_WIDTH))
    failed = sorted({r.backend for r in records if r.status not in ("passed", "unavailable")})
    summary = {"run_id": records[0].run_id, "records": str(path), "figure": str(figure)}
    print(json.dumps({**summary, "failed": failed}))
    return 1 if failed else 0


if __name__ == "__main__":
    given = sys.argv[1:]
    sys.argv[1:] = overrides(given, torch.cuda.is_available())
    if sys.argv[1:] != given:
        print(
            "no NVIDIA GPU: the tiny model, Triton in its interpreter "
            f"({NO_GPU_EXPERIMENT}); its times say nothing about the kernels",
            file=sys.stderr,
        )
    main()

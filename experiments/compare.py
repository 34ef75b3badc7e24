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
import os
import shlex
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict
from datetime import UTC, datetime
from functools import partial
from typing import Any

import hydra
import torch
from omegaconf import DictConfig, OmegaConf
from rich.console import Console
from rich.progress import Progress

from experiments import report
from experiments.config import CONF, NO_GPU_EXPERIMENT, Compare, Model, build, overrides
from triton_mega import bench, record
from triton_mega.backends import BackendUnavailable, load_backend
from triton_mega.record import Performance, Record, Status
from triton_mega.weights import DecoderWeights, random_weights

TABLE_WIDTH = 140
"""Columns of a table that no terminal limits."""

log = logging.getLogger(__name__)
Outcome = dict[str, Any]  # the fields of a record that tell how it went


def load_weights(model: Model, device: torch.device) -> DecoderWeights:
    """Returns the model's weights; raises ValueError where a checkpoint has other shapes."""
    if model.checkpoint is None:
        return random_weights(model.spec, model.seed, device)
    from triton_mega.checkpoint import open_checkpoint

    checkpoint = open_checkpoint(model.checkpoint)
    found = checkpoint.spec.decoders[model.role]
    for key, value in asdict(found).items():
        if value != asdict(model.spec)[key]:
            raise ValueError(f"model.spec.{key}: the checkpoint has {value}; choose another model=")
    return checkpoint.decoder_weights(model.role, device)


def failure(name: str, error: BaseException | None) -> Outcome:
    """Returns the outcome that an exception stands for; what is not expected goes to the log."""
    from triton.errors import TritonError

    if isinstance(error, BackendUnavailable):
        hint = f" ({error.hint})" if error.hint else ""
        return {"status": "unavailable", "reason": error.reason + hint}
    log.error("%s failed", name, exc_info=error)
    status: Status = "compile_error" if isinstance(error, TritonError) else "error"
    return {"status": status, "reason": f"{type(error).__name__}: {error}"}


def run(asked: Compare, config: Mapping[str, Any], command: str, console: Console) -> list[Record]:
    """Checks and times what was asked for and returns one record per backend and position."""
    model, workload = asked.model, asked.workload
    git = record.Git.read() if asked.commit is None else record.Git.parse(asked.commit)
    sha = record.package_sha(record.package_files())
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", asked.device_index) if on_gpu else torch.device("cpu")
    weights = load_weights(model, device)
    ceilings, barrier_us = bench.read_ceilings(device), bench.barrier_us(device)
    started: dict[str, bench.Started] = {}
    never: dict[str, Outcome] = {}  # backends that did not start
    records: list[Record] = []
    new_record = partial(
        Record,
        experiment="compare",
        time_utc=datetime.now(UTC).isoformat(timespec="seconds"),
        command=command,
        git=git,
        package_sha=sha,
        environment=record.Environment.read(asked.device_index),
        config=config,
        spec=model.name,
        dtype="bfloat16",
        weights=model.weights,
        seed=model.seed,
    )
    names, positions = asked.backend.names, workload.positions
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("start", total=len(names) * (1 + len(positions)) + len(positions))

        def advance(what: str) -> None:
            progress.update(task, advance=1, description=what)

        for name in names:
            try:
                backend_class = load_backend(name)
                backend_class.check_available(device)
                tuned = asked.tuning.values is not None and name.startswith("triton_")
                options = {"tuning": asked.tuning.values} if tuned else {}
                started[name] = bench.start(
                    backend_class,
                    model.spec,
                    weights,
                    max_positions=workload.max_positions,
                    **options,
                )
            except Exception as error:  # noqa: BLE001 - one backend's failure is a row, not the end
                never[name] = failure(name, error)
            advance(f"{name}: started")

        for position in positions:
            began = time.perf_counter()
            oracle = bench.Oracle.build(
                model.spec,
                weights,
                position=position,
                steps=workload.steps_per_launch,
                max_positions=workload.max_positions,
                seed=model.seed + position,
            )
            outcomes, checks = dict(never), {}
            for name, start in started.items():
                try:
                    check = bench.check_backend(start.backend, oracle)
                except Exception as error:  # noqa: BLE001 - as above
                    outcomes[name] = failure(name, error)
                else:
                    outcomes[name] = verdict(check)
                    checks[name] = check
                advance(f"{name}: checked at position {position}")
            timed, aa_us = time_passed(checks, outcomes, asked.timing)
            size = bench.step_bytes(model.spec, position, workload.steps_per_launch)
            for name, latency in timed.items():
                gbps = size / latency.p50_us / 1e3
                best = max(ceilings.values(), default=None)
                outcomes[name]["performance"] = Performance(
                    what="step",
                    **asdict(latency),
                    steps_per_launch=workload.steps_per_launch,
                    bytes=size,
                    gbps=gbps,
                    read_ceiling_gbps=ceilings,
                    share_of_ceiling=None if best is None else gbps / best,
                    barrier_us=barrier_us,
                    aa_us=aa_us,
                    cold_start_s=started[name].cold_start_s,
                    wall_s=time.perf_counter() - began,
                    peak_bytes=started[name].peak_bytes,
                )
            advance(f"timed at position {position}")
            for name in names:
                tuning = getattr(started[name].backend, "tuning", None) if name in started else None
                fields = {"tuning": None if tuning is None else asdict(tuning), **outcomes[name]}
                records.append(new_record(backend=name, position=position, **fields))
    return records


def verdict(check: bench.Check) -> Outcome:
    """Returns the outcome of a check, with the reason where it did not pass."""
    found = check.correctness
    if found.passed:
        return {"status": "passed", "correctness": found}
    hidden = f"hidden states: relative error {found.hidden.error:.3e}"
    logits = f"logits: relative error {found.logits.error:.3e}"
    reason = found.first_divergence or f"{hidden}, {logits}"
    return {"status": "incorrect", "correctness": found, "reason": reason}


def time_passed(
    checks: dict[str, bench.Check], outcomes: dict[str, Outcome], timing: bench.Timing
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
    config = OmegaConf.to_container(composed, resolve=True)
    assert isinstance(config, dict)
    try:
        asked = build(Compare, config)
    except ValueError as error:
        print(f"config: {error}", file=sys.stderr)
        sys.exit(2)
    if not torch.cuda.is_available():
        os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is defined: none is, so far
    command = shlex.join(["python", "-m", "experiments.compare", *sys.argv[1:]])
    records = run(asked, config, command, Console(stderr=True))
    path = asked.results / "compare.jsonl"
    record.append(path, records)
    figure = asked.results / f"compare_{records[0].run_id}.png"
    report.draw(records, figure)
    report.print_table(records, Console(width=None if sys.stdout.isatty() else TABLE_WIDTH))
    failed = sorted({r.backend for r in records if r.status not in ("passed", "unavailable")})
    summary = {"run_id": records[0].run_id, "records": str(path), "figure": str(figure)}
    print(json.dumps({**summary, "failed": failed}))
    sys.exit(1 if failed else 0)


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

"""How far is every stage of every layer from exact arithmetic, over the official package's trace?

    python -m experiments.parity                                  # the full shape, on a GPU
    python -m experiments.parity backend.names=[triton_staged,torch_eager]
    python -m experiments.parity trace=tiny tuning=interpreter    # without a GPU: the default

The rows are those that the official ``qwen-tts`` package was fed with when its committed dump was
made (``tests/fixtures``), on the same hash weights: every step is teacher-forced. A backend is held
against two things:

exact     fp32 arithmetic on this device; for a backend with fp32 activations behind the K/V rows
          that it has cached itself, in bf16 by contract: what its own arithmetic is worth.
official  the dump of the official fp32 modules, whose K and V are fp32 too. Rounding K and V to
          bf16 moves the result from it by about 3e-3 at the full shape, and nothing else should.

Beside both stands the error of the official bf16 arithmetic. The last line of stdout is a JSON
document. Exit code: 0; 1 if a backend is incorrect or fails (one that this machine cannot run is no
failure); 2 on a wrong config.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import groupby
from pathlib import Path
from typing import Any

import hydra
import torch
from omegaconf import DictConfig
from rich.console import Console
from rich.table import Table

from experiments.compare import TABLE_WIDTH, Outcome, failure, verdict
from experiments.config import CONF, Parity, overrides
from experiments.report import machine
from experiments.start import begin
from tests import fixtures
from triton_mega import record
from triton_mega.backends import DecodeBackend, load_backend
from triton_mega.gate import BF16_FACTORS, FP32_BOUND, reference_reply
from triton_mega.record import Accuracy, Correctness, Git, Record
from triton_mega.reference import CONTRACTS
from triton_mega.schedule import LAYER_STAGES
from triton_mega.spec import DecoderSpec, Role, TTSSpec
from triton_mega.state import KVCache
from triton_mega.testing import relative_error
from triton_mega.weights import DecoderWeights, hash_weights

NO_GPU = ("trace=tiny", "tuning=interpreter", "results_dir=outputs")
REFERENCE_BOUND = 1e-5
"""Largest error of the reference on this device against the official fp32 dump."""

Values = dict[str, torch.Tensor]  # by place ("o_proj.3", "final_norm"), [checked positions, ...]


@dataclass(frozen=True)
class Trail:
    """Teacher-forced rows of one decoder, and what the official package made of them."""

    spec: DecoderSpec
    weights: DecoderWeights
    rows: torch.Tensor  # [n, D] bf16; row p stands at position p
    heads: list[int]  # lm head of each row
    start: int  # the first position that is checked; those before it are history
    dumped: int  # how many of the last positions the dumps below have
    fp32: Values  # of the places that a dump has, [dumped, ...]
    bf16: Values

    def history(self, contract: str) -> KVCache:
        """Returns a cache whose rows before ``start`` are the reference's."""
        dtype, device = CONTRACTS[contract].kv_dtype, self.rows.device
        cache = KVCache.allocate(self.spec, len(self.rows), dtype=dtype, device=device)
        if self.start:
            rows = self.rows[: self.start]
            reference_reply(self.spec, self.weights, rows, 0, cache, contract)
        return cache

    def reference(self, contract: str, cache: KVCache, *, kv_given: bool = False) -> Values:
        """Returns the reference's values at the checked positions."""
        traces = []
        for p in range(self.start, len(self.rows)):
            row, head = self.rows[p : p + 1], self.heads[p]
            args = (self.spec, self.weights, row, p, cache, contract)
            traces.append(reference_reply(*args, head=head, kv_given=kv_given).trace)
        return by_place(traces)


def read_trail(fixture_name: str, last_rows: int | None, role: Role, device: torch.device) -> Trail:
    """Returns a committed fixture's rows (the last ones to be checked), dumps and hash weights."""
    fixture = fixtures.load(fixture_name)
    spec = TTSSpec.from_config(fixtures.config(fixture.meta["config"])).decoders[role]
    if role == "talker":
        rows = torch.cat((fixture["rows.prefill"], fixture["rows.steps"]))
        heads = [0] * len(rows)
    else:  # the first frame: its first pass takes two rows
        rows = fixture["rows.predictor"][0]
        heads = [max(p - 1, 0) for p in range(len(rows))]

    def dump(dtype: str) -> Values:
        name = "talker" if role == "talker" else "predictor"
        stages = {"layers": "down_proj", "norm": "final_norm", "logits": "lm_head"}
        values = {stage: fixture[f"{dtype}.{name}.{key}"] for key, stage in stages.items()}
        if role == "code_predictor":
            values = {stage: value[0] for stage, value in values.items()}
        count = min(len(values["lm_head"]), last_rows or len(rows))
        return by_place([{s: v[i].float() for s, v in values.items()} for i in range(-count, 0)])

    fp32, bf16 = dump("fp32"), dump("bf16")
    start = max(len(rows) - last_rows, 0) if last_rows else 0
    weights = hash_weights(spec, device)
    count = len(fp32["lm_head"])
    return Trail(spec, weights, rows.to(device), heads, start, count, fp32, bf16)


def by_place(traces: list[dict[str, torch.Tensor]]) -> Values:
    """Traces of single steps, one after another, as values by place in order of execution."""
    layers = len(traces[0]["down_proj"])
    stages = [stage for stage in LAYER_STAGES if stage in traces[0]]
    places = [(f"{s}.{i}", [t[s][i] for t in traces]) for i in range(layers) for s in stages]
    places += [(stage, [t[stage] for t in traces]) for stage in ("final_norm", "lm_head")]
    return {place: torch.stack(values).float().cpu() for place, values in places}


def run_backend(backend: DecodeBackend, trail: Trail) -> Values:
    """Decodes the trail in as few launches as its heads allow, then row by row to see the stages.

    Final hidden states and logits are those of the launches; there are no other places where the
    backend does not show its stages.
    """
    backend.cache.copy_from(trail.history("fp32_activations"))
    checked = range(trail.start, len(trail.rows))
    outputs = []
    for head, group in groupby(checked, key=lambda p: trail.heads[p]):
        at = list(group)
        outputs.append(backend.run_steps(trail.rows[at[0] : at[-1] + 1], at[0], head))
    backend.synchronize()
    values: Values = {}
    with contextlib.suppress(NotImplementedError):
        values = by_place(
            [backend.trace_step(trail.rows[p : p + 1], p, trail.heads[p]) for p in checked]
        )
    hidden, logits = (torch.cat([getattr(o, n) for o in outputs]) for n in ("hidden", "logits"))
    return values | {"final_norm": hidden.float().cpu(), "lm_head": logits.float().cpu()}


def check_backend(
    backend: DecodeBackend, trail: Trail, rounded: Values, pure: Values
) -> Correctness:
    """Holds a backend against exact arithmetic and against the dump.

    Args:
        rounded: the official bf16 arithmetic on this device.
        pure: fp32 arithmetic with K and V in fp32 on this device.
    """
    factor = BF16_FACTORS.get(backend.contract)
    got = run_backend(backend, trail)
    exact = pure
    if factor is None:
        exact = trail.reference("fp32_activations", backend.cache, kv_given=True)
    found: dict[str, Accuracy] = {}
    for place, value in got.items():
        own = relative_error(rounded[place], pure[place])
        bound = FP32_BOUND if factor is None else factor * own
        found[place] = Accuracy(relative_error(value, exact[place]), bound, own)
    for place, want in trail.fp32.items():
        if place in got:
            own = relative_error(trail.bf16[place], want)
            error = relative_error(got[place][-trail.dumped :], want)
            found[f"official.{place}"] = Accuracy(error, (factor or 1.0) * own, own)
    failed = [
        f"{place}: relative error {each.error:.3e} is above {each.bound:.3e}"
        for place, each in found.items()
        if not each.error <= each.bound
    ]
    agreed = got["lm_head"].argmax(-1) == exact["lm_head"].argmax(-1)
    return Correctness(
        contract=backend.contract,
        hidden=found["final_norm"],
        logits=found["lm_head"],
        stages=found,
        first_divergence=failed[0] if failed else None,
        argmax_agreement=float(agreed.float().mean()),
        steps_checked=len(agreed),
    )


def run_role(asked: Parity, role: Role, device: torch.device) -> dict[str, Outcome]:
    """Checks every backend on one decoder's trail."""
    trail = read_trail(asked.trace.fixture, asked.trace.last_rows, role, device)
    rounded, pure = (trail.reference(c, trail.history(c)) for c in ("hf_bf16", "hf_fp32"))
    for place, want in trail.fp32.items():
        error = relative_error(pure[place][-trail.dumped :], want)
        if not error <= REFERENCE_BOUND:
            reason = f"the fp32 reference on this device is {error:.1e} from the dump at {place}"
            return {name: {"status": "error", "reason": reason} for name in asked.backend.names}
    outcomes = {}
    for name in asked.backend.names:
        tuned = asked.tuning.values is not None and name.startswith("triton_")
        options = {"tuning": asked.tuning.values} if tuned else {}
        try:
            made = load_backend(name)
            made.check_available(device)
            backend = made(trail.spec, trail.weights, max_positions=len(trail.rows), **options)
            outcomes[name] = verdict(check_backend(backend, trail, rounded, pure))
        except Exception as error:  # noqa: BLE001 - one backend's failure is a row, not the end
            outcomes[name] = failure(name, error)
    return outcomes


def run(asked: Parity, config: Mapping[str, Any], git: Git, command: str) -> list[Record]:
    """Checks what was asked for and returns one record per decoder and backend."""
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", asked.device_index) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    return [
        Record(
            experiment="parity",
            time_utc=datetime.now(UTC).isoformat(timespec="seconds"),
            command=command,
            git=git,
            package_sha=record.package_sha(record.package_files()),
            environment=record.Environment.read(asked.device_index),
            config=config,
            backend=name,
            spec=f"{asked.trace.fixture}.{role}",
            position=0,
            dtype="bfloat16",
            weights="hash",
            seed=0,
            **outcome,
        )
        for role in asked.trace.roles
        for name, outcome in run_role(asked, role, device).items()
    ]


def print_table(each: Record, console: Console) -> None:
    """Prints one backend's errors, a row per layer, the official bf16's own beside each."""
    title = f"{each.backend}, {each.spec}, {machine(each)}: {each.status}"
    found = each.correctness
    if found is None:
        console.print(f"{title}: {each.reason}", markup=False)
        return
    table = Table(title=title, caption="error (official bf16's own)")
    columns = [*LAYER_STAGES, "official.down_proj"]
    for heading in ("layer", *columns):
        table.add_column(heading, justify="right", no_wrap=True)

    def cell(place: str) -> str:
        one = found.stages.get(place)
        return "" if one is None else f"{one.error:.1e} ({one.baseline_error:.1e})"

    layers = 1 + max((int(p.split(".")[-1]) for p in found.stages if p[-1].isdigit()), default=-1)
    for i in range(layers):
        table.add_row(str(i), *(cell(f"{column}.{i}") for column in columns))
    if layers:
        console.print(table)
    else:
        console.print(f"{title} (it does not show its stages)", markup=False)
    behind = "" if found.contract in BF16_FACTORS else " behind its own bf16 K/V rows"
    for what, prefix in (
        (f"against fp32 arithmetic{behind}, bound {found.hidden.bound:.1e} on hidden", ""),
        ("against the official fp32 dump, whose K and V are fp32", "official."),
    ):
        pair = (f"hidden {cell(f'{prefix}final_norm')}", f"logits {cell(f'{prefix}lm_head')}")
        console.print(f"{what}: {', '.join(pair)}", markup=False)
    if each.reason:
        console.print(f"incorrect: {each.reason}", markup=False)


def conclude(records: list[Record], results: Path) -> int:
    """Writes and shows the records of a run; returns the process's exit code."""
    path = results / "parity.jsonl"
    record.append(path, records)
    console = Console(width=None if sys.stdout.isatty() else TABLE_WIDTH)
    for each in records:
        print_table(each, console)
    failed = sorted({r.backend for r in records if r.status not in ("passed", "unavailable")})
    print(json.dumps({"run_id": records[0].run_id, "records": str(path), "failed": failed}))
    return 1 if failed else 0


@hydra.main(version_base="1.3", config_path=str(CONF), config_name="parity")
def main(composed: DictConfig) -> None:
    """Runs the composed config: tables, records, one line of JSON."""
    begun = begin(Parity, composed, "experiments.parity")
    records = run(begun.asked, begun.config, begun.git, begun.command)
    sys.exit(conclude(records, begun.asked.results))


if __name__ == "__main__":
    sys.argv[1:] = overrides(sys.argv[1:], torch.cuda.is_available(), NO_GPU)
    main()

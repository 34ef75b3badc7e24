"""Shows records: a terminal table, a figure, and the README's tables.

    python -m experiments.report                        # write the README's tables again
    python -m experiments.report compare RUN_ID [...]   # let table "compare" quote these runs

A README table stands between ``<!-- table:NAME RUN_ID ... -->`` and ``<!-- /table -->`` and comes
from the committed records of the runs it names and from nothing else.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

from triton_mega.record import ROOT, Record, read

RESULTS = ROOT / "experiments" / "results"
README = ROOT / "README.md"
NO_RECORD = "no record yet"
MILLISECONDS = {"p20 ms": "p20_us", "p50 ms": "p50_us", "p80 ms": "p80_us", "p99 ms": "p99_us"}

MARKED = re.compile(
    r"<!-- table:(?P<name>[\w-]+)(?P<ids>(?: [0-9a-f]{10})*) -->\n.*?<!-- /table -->", re.DOTALL
)


def print_table(records: Sequence[Record], console: Console) -> None:
    """Prints one row per backend and position, then the reasons of those that have no time."""
    first = records[0]
    table = Table(title=f"{first.spec}, {first.weights} weights, {machine(first)}")
    for heading in ("backend", "position", "status"):
        table.add_column(heading, no_wrap=True)
    for heading in (
        *MILLISECONDS,
        "GB/s",
        "of ceiling",
        "error",
        "bf16's own",
        "cold s",
        "peak MB",
    ):
        table.add_column(heading, justify="right")
    for each in records:
        table.add_row(each.backend, str(each.position), each.status, *_cells(each))
    console.print(table)
    for backend, status, reason in dict.fromkeys((r.backend, r.status, r.reason) for r in records):
        if reason:
            console.print(f"{backend}: {status}: {reason}", markup=False)
    if line := conditions(records):
        console.print(line, markup=False)


def draw(records: Sequence[Record], path: Path) -> None:
    """Saves latency, and share of the read ceiling where one was measured, over positions."""
    passed = [record for record in records if record.performance is not None]
    has_ceiling = any(r.performance.share_of_ceiling is not None for r in passed if r.performance)
    figure = Figure(figsize=(11, 4.5), layout="constrained")
    latency, rate = figure.subplots(1, 2)
    for backend in dict.fromkeys(record.backend for record in passed):
        points = [
            (r.position, r.performance)
            for r in passed
            if r.backend == backend and r.performance is not None
        ]
        positions = [position for position, _ in points]
        p50, low, high = (
            [getattr(p, name) / 1e3 for _, p in points] for name in ("p50_us", "p20_us", "p80_us")
        )
        (line,) = latency.plot(positions, p50, marker="o", label=backend)
        latency.fill_between(positions, low, high, color=line.get_color(), alpha=0.2)
        shares = [p.share_of_ceiling if has_ceiling else p.gbps for _, p in points]
        rate.plot(positions, shares, marker="o", label=backend, color=line.get_color())
    latency.set(xlabel="position", ylabel="ms per step (p50, band p20 to p80)", yscale="log")
    rate.set(xlabel="position", ylabel="share of the read ceiling" if has_ceiling else "GB/s")
    rate.set_ylim(0, 1) if has_ceiling else rate.set_yscale("log")
    if passed:
        latency.legend()
    figure.suptitle(f"{records[0].spec}, {machine(records[0])}, run {records[0].run_id}")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def machine(record: Record) -> str:
    """Names the GPU of a record, or says that there was none."""
    gpu = record.environment.gpu
    return "CPU, Triton in its interpreter" if gpu.startswith("unknown") else gpu


def conditions(records: Sequence[Record]) -> str:
    """Says what the latencies of one run are to be read with; empty where nothing was timed."""
    timed = [record.performance for record in records if record.performance is not None]
    if not timed:
        return ""
    one = timed[0]
    parts = [f"{one.steps_per_launch} steps per launch, n = {one.n}, clock {one.clock}"]
    parts += [
        f"read ceiling ({name}) {gbps:.0f} GB/s" for name, gbps in one.read_ceiling_gbps.items()
    ]
    if one.barrier_us is not None:
        parts.append(f"idle grid barrier {one.barrier_us:.2f} us")
    noise = max(performance.aa_us for performance in timed)
    return "; ".join([*parts, f"A/A difference up to {noise:.1f} us"])


def render(text: str, results: Path = RESULTS) -> str:
    """Returns ``text`` with every marked table written again from the records.

    Raises:
        ValueError: no such table, no such run, or a run of a tree that differed from its commit.
    """

    def table(match: re.Match[str]) -> str:
        name, run_ids = match["name"], match["ids"].split()
        if name not in TABLES:
            raise ValueError(f"table:{name}: expected one of {', '.join(TABLES)}")
        found = [run_records(results / f"{name}.jsonl", run_id) for run_id in run_ids]
        body = "\n\n".join(map(TABLES[name], found)) or NO_RECORD
        return f"<!-- table:{name}{match['ids']} -->\n{body}\n<!-- /table -->"

    return MARKED.sub(table, text)


def quote(text: str, name: str, run_ids: Sequence[str]) -> str:
    """Returns ``text`` with table ``name`` naming other runs; its body is left for ``render``.

    Raises:
        ValueError: a run id is none, or the text has no such table.
    """
    for run_id in run_ids:
        if not re.fullmatch("[0-9a-f]{10}", run_id):
            raise ValueError(f"run {run_id}: expected 10 hexadecimal digits")
    mark = f"<!-- {' '.join([f'table:{name}', *run_ids])} -->"
    changed, count = re.subn(rf"<!-- table:{re.escape(name)}(?: [0-9a-f]{{10}})* -->", mark, text)
    if not count:
        raise ValueError(f"table:{name}: not in the text")
    return changed


def run_records(path: Path, run_id: str) -> list[Record]:
    """Returns the newest record of a run per backend and position, in order of measurement."""
    newest: dict[tuple[str, int], Record] = {}
    for each in read(path):
        if each.run_id == run_id:
            newest[each.backend, each.position] = each
    if not newest:
        raise ValueError(f"run {run_id}: no record in {path.name}")
    if any(each.git.dirty for each in newest.values()):
        raise ValueError(f"run {run_id}: measured on files that differ from their commit")
    return list(newest.values())


def compare_table(records: Sequence[Record]) -> str:
    """Returns one run of ``experiments.compare`` as Markdown, a row per backend."""
    first = records[0]
    positions = sorted({record.position for record in records})
    heading = [f"p50 ms at {position}" for position in positions]
    heading = ["backend", *heading, "of ceiling", "error", "bf16's own", "cold start s", "peak GB"]
    lines = [
        f"{machine(first)}, {first.spec}, {first.weights} weights, commit {first.git.commit[:10]}, "
        f"torch {first.environment.torch}, triton {first.environment.triton}; "
        f"{conditions(records)}.",
        "",
        _row(heading),
        _row(["---"] + ["---:"] * (len(heading) - 1)),
    ]
    by_backend: dict[str, dict[int, Record]] = {}
    for each in records:
        by_backend.setdefault(each.backend, {})[each.position] = each
    lines += [_row(_compare_row(backend, at, positions)) for backend, at in by_backend.items()]
    return "\n".join(lines)


def _compare_row(backend: str, at: Mapping[int, Record], positions: Sequence[int]) -> list[str]:
    cells = [backend]
    for position in positions:
        performance = at[position].performance
        status = at[position].status
        cells.append(status if performance is None else f"{performance.p50_us / 1e3:.3f}")
    worst = max(
        (each.correctness.hidden for each in at.values() if each.correctness is not None),
        key=lambda accuracy: accuracy.error,
        default=None,
    )
    one = at[positions[0]].performance
    share = None if one is None else one.share_of_ceiling
    cells.append("" if share is None else f"{share:.0%}")
    cells += ["", ""] if worst is None else [f"{worst.error:.1e}", f"{worst.baseline_error:.1e}"]
    cells.append("" if one is None else f"{one.cold_start_s:.1f}")
    peak = None if one is None else one.peak_bytes
    return [*cells, "" if peak is None else f"{peak / 1e9:.2f}"]


def _cells(record: Record) -> list[str]:
    one, found = record.performance, record.correctness
    cells = [""] * 6
    if one is not None:
        share = "" if one.share_of_ceiling is None else f"{one.share_of_ceiling:.1%}"
        cells = [f"{getattr(one, name) / 1e3:.3f}" for name in MILLISECONDS.values()]
        cells += [f"{one.gbps:.4g}", share]
    errors = ["", ""]
    if found is not None:
        errors = [f"{found.hidden.error:.1e}", f"{found.hidden.baseline_error:.1e}"]
    cold = "" if one is None else f"{one.cold_start_s:.2f}"
    peak = "" if one is None or one.peak_bytes is None else f"{one.peak_bytes / 1e6:.0f}"
    return [*cells, *errors, cold, peak]


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


TABLES: dict[str, Callable[[Sequence[Record]], str]] = {"compare": compare_table}


def main() -> None:
    """Writes the README's tables."""
    parser = argparse.ArgumentParser(description="Write the README's tables from records.")
    parser.add_argument("table", nargs="?", choices=sorted(TABLES))
    parser.add_argument("run_ids", nargs="*", metavar="RUN_ID")
    parsed = parser.parse_args()
    text = README.read_text(encoding="utf-8")
    try:
        if parsed.table is not None:
            text = quote(text, parsed.table, parsed.run_ids)
        text = render(text)
    except ValueError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
    README.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()

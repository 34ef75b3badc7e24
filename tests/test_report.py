"""Tables and figures say what the records say, and the README says what its runs' records say."""

from __future__ import annotations

import dataclasses
import io
import re
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from experiments import report
from tests.test_record import make_performance, make_record
from triton_mega.record import Git, Record, append


def make_run(**changes: Any) -> list[Record]:
    """Two backends at two positions; one of them is incorrect at the second."""
    slower = make_performance(p50_us=2.5)
    bad = dataclasses.replace(
        make_record(**changes),
        status="unavailable",
        reason="no GPU",
        correctness=None,
        performance=None,
        backend="torch_graph",
        position=500,
    )
    return [
        make_record(**changes),
        make_record(**changes, backend="torch_graph", performance=slower),
        make_record(**changes, position=500),
        bad,
    ]


@pytest.fixture
def results(tmp_path: Path) -> Path:
    append(tmp_path / "compare.jsonl", make_run())
    return tmp_path


RUN_ID = make_record().run_id


def readme(mark: str, body: str = "old\n") -> str:
    return f"before\n<!-- table:{mark} -->\n{body}<!-- /table -->\nafter\n"


def test_a_table_without_a_run_says_so(results: Path) -> None:
    want = readme("compare", "no record yet\n")
    assert report.render(readme("compare"), results) == want
    assert report.render(want, results / "absent") == want


def test_a_table_comes_from_the_run_it_names(results: Path) -> None:
    rendered = report.render(readme(f"compare {RUN_ID}"), results)
    assert rendered.startswith(f"before\n<!-- table:compare {RUN_ID} -->\n")
    assert rendered.endswith("\n<!-- /table -->\nafter\n")
    lines = rendered.splitlines()
    rows = {line.split(" | ")[0].strip("| "): line for line in lines if line.startswith("|")}
    assert rows["backend"].startswith("| backend | p50 ms at 100 | p50 ms at 500 | of ceiling |")
    assert rows["triton_persistent"].startswith("| triton_persistent | 0.002 | 0.002 | 50% | 1.0e")
    assert rows["torch_graph"].startswith("| torch_graph | 0.003 | unavailable | 50% |")
    assert "read ceiling (loads) 0 GB/s" in rendered
    assert report.render(rendered, results) == rendered


def test_the_newest_record_of_a_run_counts(results: Path) -> None:
    newer = make_record(performance=make_performance(p50_us=2.9))
    append(results / "compare.jsonl", [newer, make_record(config={"other": 1}, position=7)])
    rendered = report.render(readme(f"compare {RUN_ID}"), results)
    assert "| triton_persistent | 0.003 | 0.002 |" in rendered
    assert "at 7" not in rendered


def test_two_runs_are_two_tables(results: Path) -> None:
    other = make_run(config={"other": 1}, spec="talker_0p6b")
    append(results / "compare.jsonl", other)
    mark = f"compare {RUN_ID} {other[0].run_id}"
    rendered = report.render(readme(mark), results)
    assert rendered.count("| backend |") == 2
    assert "talker_0p6b" in rendered


@pytest.mark.parametrize(
    ("mark", "message"),
    [
        ("speed", "table:speed: expected one of compare"),
        ("compare 0123456789", "run 0123456789: no record in compare.jsonl"),
    ],
)
def test_an_unknown_table_or_run_is_refused(mark: str, message: str, results: Path) -> None:
    with pytest.raises(ValueError, match=message):
        report.render(readme(mark), results)


def test_a_run_of_changed_files_is_not_quoted(tmp_path: Path) -> None:
    append(tmp_path / "compare.jsonl", make_run(git=Git("abc123", True)))
    with pytest.raises(ValueError, match="differ from their commit"):
        report.render(readme(f"compare {RUN_ID}"), tmp_path)


def test_a_table_can_be_pointed_at_another_run(results: Path) -> None:
    text = report.quote(readme("compare 0123456789"), "compare", [RUN_ID])
    assert text == readme(f"compare {RUN_ID}")
    assert report.quote(text, "compare", []) == readme("compare")
    with pytest.raises(ValueError, match="table:tune: not in the text"):
        report.quote(text, "tune", [RUN_ID])
    with pytest.raises(ValueError, match="run nonsense: expected 10 hexadecimal digits"):
        report.quote(text, "compare", [RUN_ID, "nonsense"])


@pytest.mark.parametrize("run_id", ["nonsense", "0123456789"])
def test_the_command_refuses_an_unknown_run_and_changes_nothing(
    run_id: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = readme("compare")
    monkeypatch.setattr(report, "README", tmp_path / "README.md")
    report.README.write_text(text, encoding="utf-8")
    monkeypatch.setattr("sys.argv", ["report", "compare", run_id])
    with pytest.raises(SystemExit) as exited:
        report.main()
    assert exited.value.code == 2
    assert f"run {run_id}: " in capsys.readouterr().err
    assert report.README.read_text(encoding="utf-8") == text


def test_the_readme_is_what_the_records_say() -> None:
    text = report.README.read_text(encoding="utf-8")
    assert len(report.MARKED.findall(text)) == len(re.findall("<!-- table:", text)) > 0
    assert report.render(text) == text, "run: python -m experiments.report"


def test_the_terminal_table_shows_every_percentile_and_reason() -> None:
    out = io.StringIO()
    report.print_table(make_run(), Console(file=out, width=160))
    text = out.getvalue()
    for part in ("talker_1p7b", "GPU", "torch_graph: unavailable: no GPU", "A/A difference"):
        assert part in text
    row = next(line for line in text.splitlines() if "triton_persistent" in line)
    cells = [cell.strip() for cell in row.strip("│").split("│")]
    assert cells[1:7] == ["100", "passed", "0.001", "0.002", "0.003", "0.004"]
    assert cells[8] == "50.0%"


def test_a_figure_is_drawn_of_any_run(tmp_path: Path) -> None:
    nothing = [each for each in make_run() if each.performance is None]
    for name, records in {"run": make_run(), "nothing": nothing}.items():
        path = tmp_path / "new" / f"{name}.png"
        report.draw(records, path)
        assert path.read_bytes()[:4] == b"\x89PNG"

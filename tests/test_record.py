"""Records: no latency without a passed check, an id that can be recomputed, a hash of the code."""

from __future__ import annotations

import dataclasses
import json
import math
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from triton_mega import record
from triton_mega.record import ROOT, Accuracy, Correctness, Environment, Git, Performance, Record

RESULTS = sorted((ROOT / "experiments" / "results").glob("*.jsonl"))
GOOD, BAD = Accuracy(1e-6, 1e-4, 1e-2), Accuracy(math.inf, 1e-4, 1e-2)


def make_correctness(**changes: Any) -> Correctness:
    values = {
        "contract": "fp32_activations",
        "hidden": GOOD,
        "logits": GOOD,
        "stages": {"qkv_proj": GOOD},
        "first_divergence": None,
        "argmax_agreement": 1.0,
        "steps_checked": 2,
    }
    return Correctness(**(values | changes))


def make_performance(**changes: Any) -> Performance:
    values: dict[str, Any] = {
        "what": "step",
        "clock": "cuda_events",
        "n": 5,
        "steps_per_launch": 2,
        "p20_us": 1.0,
        "p50_us": 2.0,
        "p80_us": 3.0,
        "p99_us": 4.0,
        "bytes": 100,
        "gbps": 0.05,
        "read_ceiling_gbps": {"loads": 0.1},
        "share_of_ceiling": 0.5,
        "barrier_us": 1.0,
        "aa_us": 0.1,
        "cold_start_s": 1.0,
        "wall_s": 2.0,
        "peak_bytes": 1000,
    }
    return Performance(**(values | changes))


def make_record(**changes: Any) -> Record:
    values: dict[str, Any] = {
        "experiment": "compare",
        "time_utc": "2026-01-01T00:00:00+00:00",
        "command": "python -m experiments.compare",
        "git": Git("abc123", False),
        "package_sha": "0" * 64,
        "environment": Environment("GPU", 132, *["1"] * 8),
        "config": {"device_index": 1, "results_dir": "/a", "timing": {"repeats": 5}},
        "backend": "triton_persistent",
        "spec": "talker_1p7b",
        "position": 100,
        "dtype": "bfloat16",
        "weights": "random",
        "seed": 0,
        "status": "passed",
        "correctness": make_correctness(),
        "performance": make_performance(),
    }
    return Record(**(values | changes))


def test_a_record_survives_the_file(tmp_path: Path) -> None:
    wrong = make_correctness(hidden=BAD, first_divergence="layer 1, stage qkv_proj")
    records = [
        make_record(),
        make_record(
            status="incorrect",
            reason="layer 1",
            correctness=wrong,
            performance=None,
            tuning={"a": 1},
        ),
        make_record(status="unavailable", reason="no GPU", correctness=None, performance=None),
    ]
    path = tmp_path / "new" / "compare.jsonl"
    record.append(path, records[:1])
    record.append(path, records[1:])
    assert record.read(path) == records
    assert record.read(tmp_path / "absent.jsonl") == []


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"status": "error", "reason": "boom"}, "performance: only a passed record"),
        ({"correctness": None}, "does not follow"),
        ({"correctness": make_correctness(hidden=BAD)}, "does not follow"),
        ({"correctness": make_correctness(first_divergence="layer 0")}, "does not follow"),
        ({"status": "incorrect", "performance": None, "reason": "bad"}, "does not follow"),
        ({"status": "unavailable", "performance": None, "correctness": None}, "reason"),
        ({"reason": "why?"}, "reason"),
        ({"status": "fine"}, "status: expected one of"),
        ({"run_id": "0123456789"}, "run_id"),
        ({"schema": 0}, "schema"),
    ],
)
def test_a_contradiction_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_record(**changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"n": 0}, "n"), ({"p20_us": 2.5}, "rising"), ({"p20_us": 0.0}, "rising")],
)
def test_an_impossible_latency_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_performance(**changes)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda v: v.pop("backend"), "backend"),
        (lambda v: v.update(colour="red"), "record.colour: unknown"),
        (lambda v: v["git"].pop("dirty"), "git: .*dirty"),
        (lambda v: v["correctness"]["hidden"].pop("bound"), "correctness.hidden: .*bound"),
        (lambda v: v["performance"].update(mean_us=1), "performance.mean_us: unknown"),
        (lambda v: v["correctness"]["hidden"].update(error="inf"), "does not follow"),
        (lambda v: v["config"]["timing"].update(repeats=6), "run_id"),
    ],
)
def test_an_edited_line_is_refused_by_name(edit: Any, message: str, tmp_path: Path) -> None:
    values = json.loads(make_record().to_json())
    edit(values)
    path = tmp_path / "compare.jsonl"
    path.write_text(make_record().to_json() + "\n" + json.dumps(values) + "\n")
    with pytest.raises(ValueError, match=f"compare.jsonl, line 2: .*{message}"):
        record.read(path)


def test_run_id_names_config_and_commit_but_no_place() -> None:
    config = {"device_index": 0, "results_dir": None, "model": {"checkpoint": None, "seed": 0}}
    same = {"device_index": 3, "results_dir": None, "model": {"checkpoint": None, "seed": 0}}
    first = record.run_id(config, "abc")
    assert len(first) == 10
    assert record.run_id(same, "abc") == first
    assert record.run_id(config, "abd") != first
    assert record.run_id({**config, "model": {"checkpoint": None, "seed": 1}}, "abc") != first
    with_checkpoint = [
        record.run_id({**config, "model": {"checkpoint": path, "seed": 0}}, "abc")
        for path in ("/here", "/there")
    ]
    assert with_checkpoint[0] == with_checkpoint[1] != first
    kept = make_record(config={"results_dir": "/secret", "device_index": 1, "a": 1}).config
    assert kept == {"results_dir": True, "a": 1}


def test_environment_turns_every_failure_into_a_value(monkeypatch: pytest.MonkeyPatch) -> None:
    from triton_mega.device import DeviceInfo, DeviceUnavailable

    def absent(index: int = 0) -> DeviceInfo:
        raise DeviceUnavailable("no NVIDIA driver")

    monkeypatch.setattr(DeviceInfo, "read", absent)
    found = Environment.read()
    assert found.gpu == found.driver == "unknown: no NVIDIA driver"
    assert found.triton[0].isdigit()
    monkeypatch.setattr(DeviceInfo, "read", lambda index=0: DeviceInfo.of_chip((9, 0), 132))
    monkeypatch.setenv("PATH", "")
    found = Environment.read()
    assert found.sm_count == 132
    assert found.clocks.startswith("unknown: ")


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
def test_git_tells_commit_and_dirt(tmp_path: Path) -> None:
    def git(*command: str) -> None:
        identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
        subprocess.run(["git", "-C", str(tmp_path), *identity, *command], check=True)

    with pytest.raises(ValueError, match="commit: git cannot say"):
        Git.read(tmp_path)
    git("init", "-q")
    (tmp_path / "code.py").write_text("a")
    git("add", "code.py")
    git("commit", "-qm", "first")
    clean = Git.read(tmp_path)
    assert len(clean.commit) == 40
    assert not clean.dirty
    (tmp_path / "experiments" / "results").mkdir(parents=True)
    (tmp_path / "experiments" / "results" / "compare.jsonl").write_text("{}")
    assert Git.read(tmp_path) == clean
    (tmp_path / "code.py").write_text("b")
    assert Git.read(tmp_path) == dataclasses.replace(clean, dirty=True)


def test_a_commit_given_by_hand() -> None:
    assert Git.parse("0af3") == Git("0af3", False)
    assert Git.parse("0af3-dirty") == Git("0af3", True)
    for text in ("", "HEAD", "-dirty", "0af3-dirty2"):
        with pytest.raises(ValueError, match="commit"):
            Git.parse(text)


def test_package_sha_sees_every_source_and_nothing_else(tmp_path: Path) -> None:
    package = tmp_path / "triton_mega"
    (package / "__pycache__").mkdir(parents=True)
    (package / "a.py").write_text("a")
    first = record.package_sha(record.package_files(tmp_path))
    (package / "__pycache__" / "a.pyc").write_text("b")
    (tmp_path / "README.md").write_text("b")
    assert record.package_sha(record.package_files(tmp_path)) == first
    (package / "b.py").write_text("")
    second = record.package_sha(record.package_files(tmp_path))
    assert second != first
    (package / "b.py").rename(package / "c.py")
    assert record.package_sha(record.package_files(tmp_path)) not in (first, second)
    assert "triton_mega/record.py" in record.package_files()


def sources_at(commit: str) -> dict[str, bytes] | None:
    """The package's sources as git has them at a commit; None where this clone lacks it."""
    if shutil.which("git") is None:
        return None
    listing = subprocess.run(
        ["git", "-C", str(ROOT), "ls-tree", "-r", "--name-only", commit],
        capture_output=True,
        text=True,
    )
    if listing.returncode:
        return None
    paths = [
        path
        for path in listing.stdout.splitlines()
        if path.split("/")[0] in record.HASHED_DIRECTORIES
        and Path(path).suffix in record.HASHED_SUFFIXES
    ]
    show = ["git", "-C", str(ROOT), "show"]
    return {
        path: subprocess.run([*show, f"{commit}:{path}"], capture_output=True, check=True).stdout
        for path in paths
    }


def false_claims(records: Sequence[Record]) -> list[str]:
    """Run ids of records whose hash is not that of the clean commit they name."""
    claims = {(r.git.commit, r.package_sha): r.run_id for r in records if not r.git.dirty}
    found = []
    for (commit, sha), run_id in claims.items():
        sources = sources_at(commit)
        if sources is not None and record.package_sha(sources) != sha:
            found.append(run_id)
    return found


def test_committed_records_are_valid_and_of_the_code_they_name() -> None:
    for path in RESULTS:
        assert false_claims(record.read(path)) == [], path.name


@pytest.mark.skipif(sources_at("HEAD") is None, reason="needs git and a checkout")
def test_a_false_claim_is_found() -> None:
    commit = Git.read().commit
    sources = sources_at(commit)
    assert sources is not None
    assert "triton_mega/spec.py" in sources
    honest = make_record(git=Git(commit, False), package_sha=record.package_sha(sources))
    lying = dataclasses.replace(honest, package_sha="0" * 64)
    assert false_claims([honest]) == []
    assert false_claims([honest, lying]) == [lying.run_id]

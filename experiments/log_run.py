"""Runs a command and keeps what it printed, with what is needed to know what was run.

    python -m experiments.log_run gpu_tests -- python -m pytest -m gpu --durations=0
    python -m experiments.log_run make_test --commit HASH -- make test

The output is shown as it comes and goes to ``results/NAME.log``, which replaces an earlier log of
that name. Its first lines say command, commit, hash of the package's files, and environment; its
last ones exit code and seconds. Exits as the command does; 2 where the arguments are wrong.

A log is committed, so paths of this machine are shortened: the checkout is ``.``, Python's prefix
``PYTHON``, the home directory ``~``.
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path

from triton_mega.record import ROOT, Environment, Git, package_files, package_sha

RESULTS = ROOT / "experiments" / "results"
NOT_FOUND = 127
"""Exit code where there is no such command, as of a shell."""


def header(command: Sequence[str], git: Git) -> str:
    """Returns the first lines of a log, each ``# key: value``."""
    lines = {
        "command": shorten(shlex.join(command)),
        "time_utc": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": git.commit + ("-dirty" if git.dirty else ""),
        "package_sha": package_sha(package_files()),
        "environment": json.dumps(asdict(Environment.read())),
    }
    return "".join(f"# {key}: {value}\n" for key, value in lines.items()) + "\n"


def footer(exit_code: int, seconds: float) -> str:
    """Returns the last lines of a log."""
    return f"\n# exit_code: {exit_code}\n# seconds: {seconds:.2f}\n"


def shorten(text: str) -> str:
    """Returns ``text`` without this machine's longest-lived paths."""
    for path, name in ((sys.prefix, "PYTHON"), (str(ROOT), "."), (str(Path.home()), "~")):
        text = re.sub(rf"{re.escape(path)}(?![\w.-])", name, text)
    return text


def run(command: Sequence[str], log: Path, git: Git) -> int:
    """Runs ``command``, writes its log, and returns its exit code (128 + signal if killed)."""
    log.parent.mkdir(parents=True, exist_ok=True)
    began = time.perf_counter()
    with log.open("w", encoding="utf-8") as file:
        file.write(header(command, git))
        file.flush()
        try:
            process = subprocess.Popen(
                command,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                encoding="utf-8",
                errors="replace",
            )
        except OSError as error:
            file.write(f"{error}\n")
            print(error, file=sys.stderr)
            code = NOT_FOUND
        else:
            assert process.stdout is not None
            for line in process.stdout:
                print(line, end="", flush=True)
                file.write(shorten(line))
                file.flush()
            code = process.wait()
        code = 128 - code if code < 0 else code
        file.write(footer(code, time.perf_counter() - began))
    return code


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description="Run a command and keep its log.")
    parser.add_argument("name", help="of the log: letters, digits and _")
    parser.add_argument("--commit", help="HASH or HASH-dirty, where git is absent")
    parser.add_argument("--results", type=Path, default=RESULTS, metavar="DIRECTORY")
    parser.add_argument("command", nargs="+", help="after --")
    parsed = parser.parse_args()
    try:
        if not re.fullmatch(r"\w+", parsed.name):
            raise ValueError(f"name: expected letters, digits and _, got {parsed.name!r}")
        git = Git.read() if parsed.commit is None else Git.parse(parsed.commit)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    return run(parsed.command, parsed.results / f"{parsed.name}.log", git)


if __name__ == "__main__":
    sys.exit(main())

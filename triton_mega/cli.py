"""The ``triton-mega`` command. Needs no checkout and no Hydra; each subcommand imports its own."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING

import triton_mega

if TYPE_CHECKING:
    from triton_mega.doctor import Report


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command line and returns the process's exit code."""
    parser = argparse.ArgumentParser(
        prog="triton-mega", description="Qwen3-TTS decode as one persistent Triton kernel."
    )
    parser.add_argument("--version", action="version", version=triton_mega.__version__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    doctor = commands.add_parser(
        "doctor", help="say what this machine has and why a backend is unavailable"
    )
    doctor.add_argument("--json", action="store_true", help="print the report as JSON")
    parsed = parser.parse_args(arguments)
    return _doctor(as_json=parsed.json)


def _doctor(as_json: bool) -> int:
    from triton_mega.doctor import examine

    report = examine()
    print(json.dumps(report.as_dict(), indent=2) if as_json else format_report(report))
    return 0


def format_report(report: Report) -> str:
    """Returns the report as lines for a terminal: findings, then backends, hints below each."""
    lines = [f"triton-mega {report.version}"]
    lines += ["", "machine"]
    for finding in report.findings:
        lines.append(f"  {finding.status:<8} {finding.name}: {finding.detail}")
        lines += _hint(finding.hint)
    lines += ["", "packages"]
    lines += [f"  {version or '-':<14} {name}" for name, version in report.packages.items()]
    lines += ["", "backends"]
    for backend in report.backends:
        if backend.available:
            lines.append(f"  ok       {backend.name} on {backend.device}")
        else:
            lines.append(f"  no       {backend.name}: {backend.reason}")
            lines += _hint(backend.hint)
    return "\n".join(lines)


def _hint(hint: str) -> list[str]:
    return [f"           -> {hint}"] if hint else []


if __name__ == "__main__":
    raise SystemExit(main())

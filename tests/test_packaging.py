"""The package's metadata, and that what is built from it works away from the checkout."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import triton_mega

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def _pins() -> dict[str, Requirement]:
    lines = (ROOT / "constraints-ci.txt").read_text(encoding="utf-8").splitlines()
    pins = [Requirement(line) for line in lines if line and not line.startswith("#")]
    return {pin.name: pin for pin in pins}


def test_the_package_has_ranges_and_ci_has_pins_within_them() -> None:
    pins = _pins()
    assert {"torch", "triton", "numpy", "transformers"} <= pins.keys()
    extras = PROJECT["optional-dependencies"].values()
    for text in [*PROJECT["dependencies"], *(text for extra in extras for text in extra)]:
        requirement = Requirement(text)
        assert "==" not in str(requirement.specifier), (
            f"{text}: a pin belongs in constraints-ci.txt"
        )
        for pin in pins[requirement.name].specifier if requirement.name in pins else ():
            if pin.operator == "==":
                assert requirement.specifier.contains(pin.version), f"{text} excludes {pin}"


def test_core_dependencies_leave_out_what_only_experiments_use() -> None:
    core = {Requirement(text).name for text in PROJECT["dependencies"]}
    assert not core & {"hydra-core", "rich", "matplotlib", "pandas", "qwen-tts"}


def test_one_version_everywhere() -> None:
    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert f"version: {triton_mega.__version__}\n" in citation
    assert triton_mega.__version__ in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def test_make_hf_installs_the_transformers_that_ci_pins() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for name in ("transformers", "accelerate"):
        assert f"{name}{_pins()[name].specifier}" in makefile


def test_readme_links_exist() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    links = re.findall(r"\]\(([^)]+)\)", readme)
    assert "docs/step.svg" in links
    assert [link for link in links if not (ROOT / link).exists()] == []


@pytest.mark.parametrize("target", ["demo", "test", "lint"])
def test_make_refuses_an_environment_that_lacks_packages(target: str, tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')  # no site-packages
    python.chmod(0o755)
    result = subprocess.run(
        ["make", target, f"PYTHON={python}"], cwd=ROOT, capture_output=True, text=True
    )
    assert result.returncode != 0
    assert "is missing there; nothing was installed" in result.stderr


def test_make_names_the_pythons_it_can_use(tmp_path: Path) -> None:
    for name in ("Makefile", "pyproject.toml", "constraints-ci.txt"):
        shutil.copy(ROOT / name, tmp_path)
    result = subprocess.run(
        ["make", "test", "HOST_PYTHON=false"], cwd=tmp_path, capture_output=True, text=True
    )
    assert result.returncode != 0
    assert "no Python 3.11, 3.12 or 3.13 found" in result.stderr
    assert not (tmp_path / ".venv").exists()


@pytest.mark.slow
def test_the_wheel_works_in_an_empty_directory(tmp_path: Path) -> None:
    source, site, empty = tmp_path / "source", tmp_path / "site", tmp_path / "empty"
    skip = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "triton_mega", source / "triton_mega", ignore=skip)
    for name in ("pyproject.toml", "README.md", "LICENSE", "NOTICE"):
        shutil.copy(ROOT / name, source)
    build = "import setuptools.build_meta as b, sys; b.build_wheel(sys.argv[1])"
    subprocess.run(
        [sys.executable, "-c", build, str(tmp_path)], cwd=source, check=True, capture_output=True
    )
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        archive.extractall(site)
    built = {name for name in names if ".dist-info" not in name}
    sources = {str(path.relative_to(source)) for path in (source / "triton_mega").rglob("*.py")}
    assert built - sources == {"triton_mega/py.typed"} | {n for n in built if "/tuned/" in n}
    assert sources <= built
    assert any(name.endswith("licenses/LICENSE") for name in names)
    empty.mkdir()
    program = (
        "import sys, triton_mega; from triton_mega.cli import main; "
        f"assert triton_mega.__file__.startswith({str(site)!r}); sys.exit(main(['doctor']))"
    )
    result = subprocess.run(
        [sys.executable, "-c", program],
        cwd=empty,
        env={**os.environ, "PYTHONPATH": str(site)},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    assert "torch_eager on" in result.stdout

"""Imports point one way, and importing the package costs no GPU and no optional package.

The direction is read from the source (imports inside functions count as well); what an import
really does is seen in a process of its own.
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

LAYERS: tuple[frozenset[str], ...] = (
    frozenset({"", "spec", "device", "toolchain", "convert"}),
    frozenset({"weights", "state", "rope", "tuning", "schedule", "checkpoint", "testing"}),
    frozenset({"kernels", "reference"}),
    frozenset({"backends"}),
    frozenset({"prompt", "generate", "codec", "bench", "gate", "record"}),
    frozenset({"tts"}),
    frozenset({"voice", "serve"}),
    frozenset({"doctor", "cli"}),
)
"""Parts of the package, lowest first; "" is the package's own ``__init__``."""

AT_IMPORT_ONLY_IN: Mapping[str, tuple[str, ...]] = {
    "transformers": ("backends.hf",),
    "qwen_tts": ("backends.hf",),
    "pipecat": ("voice",),
    "cuda": (),
    "cuda_ref": (),
    "fastapi": ("serve",),
    "uvicorn": ("serve",),
    "rich": (),
    "matplotlib": (),
    "pandas": (),
    "soundfile": (),
}
"""Optional packages, and the modules (themselves loaded lazily) that import them at their top."""

NEVER = frozenset({"hydra", "omegaconf", "experiments", "tests", "notebooks", "conf"})
"""What no module of the package imports, not even lazily."""


def modules_of(package: Path) -> dict[str, str]:
    """Returns the source of every module below ``package``, by dotted name within it."""
    sources = {}
    for path in sorted(package.rglob("*.py")):
        parts = path.relative_to(package).with_suffix("").parts
        parts = parts[:-1] if parts[-1] == "__init__" else parts
        sources[".".join(parts)] = path.read_text(encoding="utf-8")
    return sources


def imports_of(source: str, sources: Mapping[str, str]) -> Iterator[tuple[str, bool]]:
    """Yields every imported module's full name, and whether it is imported at the top level.

    ``from package import module`` counts as the module. Imports for type checking do not count.
    """
    tree = ast.parse(source)
    lazy: set[ast.AST] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            lazy.update(ast.walk(node))
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            node.body = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, node not in lazy
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative import"
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                is_module = inner.removeprefix("triton_mega.") in sources
                yield (inner if is_module else str(node.module)), node not in lazy
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            # A name computed at run time, as in backends.load_backend, cannot be judged here.
            if isinstance(node.args[0], ast.Constant):
                yield str(node.args[0].value), node not in lazy


def layer_of(part: str) -> int | None:
    """Returns how high a part of the package stands, None where no layer holds it."""
    return next((i for i, layer in enumerate(LAYERS) if part in layer), None)


def violations(sources: Mapping[str, str]) -> list[str]:
    """Returns every import that breaks a rule, as "module imports other: rule"."""
    found = []
    for module, source in sources.items():
        if layer_of(module.split(".")[0]) is None:
            found.append(f"{module}: in no layer")
            continue
        for name, at_top in imports_of(source, sources):
            if rule := _broken_rule(module, name, at_top):
                found.append(f"{module} imports {name}: {rule}")
    return found


def _broken_rule(module: str, name: str, at_top: bool) -> str | None:
    top, _, other = name.partition(".")
    part = module.split(".")[0]
    if top in NEVER:
        return "never inside the package"
    if top == "cuda_ref" and module != "backends.cuda_persistent":
        return "the yardstick is behind its backend"
    if top == "triton" and part == "reference":
        return "the reference is plain torch"
    if at_top and top in AT_IMPORT_ONLY_IN:
        homes = AT_IMPORT_ONLY_IN[top]
        at_home = any(module == home or module.startswith(f"{home}.") for home in homes)
        return None if at_home else "lazily only"
    if top != "triton_mega":
        return None
    mine, theirs = layer_of(part), layer_of(other.split(".")[0])
    if mine is None or theirs is None:
        return "in no layer"
    if theirs > mine:
        return "points upwards"
    if {part, other.split(".")[0]} == {"kernels", "reference"}:
        return "reference and kernels never import each other"
    is_backend = other.startswith("backends.") and not other.endswith("_common")
    if part == "backends" and is_backend:
        return "backends never import one another"
    return None


def test_the_package_keeps_the_rules() -> None:
    assert violations(modules_of(ROOT / "triton_mega")) == []


@pytest.mark.parametrize(
    ("module", "source", "rule"),
    [
        ("spec", "import triton_mega.weights", "points upwards"),
        ("spec", "def f():\n    from triton_mega import backends", "points upwards"),
        ("kernels.norm", "from triton_mega.reference import decoder", "never import each other"),
        ("reference.decoder", "from triton_mega.kernels.norm import x", "never import each other"),
        ("reference.decoder", "import triton.language as tl", "plain torch"),
        ("backends.hf", "from triton_mega.backends.torch_eager import T", "one another"),
        ("backends.hf", "from triton_mega.backends import torch_eager", "one another"),
        ("backends", "from triton_mega.backends.hf import HFOfficial", "one another"),
        ("cli", "def f():\n    import hydra", "never inside"),
        ("bench", "from omegaconf import DictConfig", "never inside"),
        ("bench", "from tests.helpers import x", "never inside"),
        ("checkpoint", "import transformers", "lazily only"),
        ("backends.hf_other", "import transformers", "lazily only"),
        ("checkpoint", "try:\n    import pipecat\nexcept ImportError:\n    pass", "lazily only"),
        ("weights", "import importlib\nimportlib.import_module('cuda.core')", "lazily only"),
        ("kernels.norm", "def f():\n    import cuda_ref", "behind its backend"),
        ("bench", "def f():\n    from cuda_ref.build import build", "behind its backend"),
        ("backends.cuda_persistent", "from cuda_ref import build", "lazily only"),
        ("utils", "", "in no layer"),
        ("spec", "from triton_mega.utils import x", "in no layer"),
    ],
)
def test_a_planted_violation_is_caught(module: str, source: str, rule: str) -> None:
    planted = {"backends": "", "backends.torch_eager": "", "weights": "", module: source}
    found = violations(planted)
    assert len(found) == 1
    assert rule in found[0]


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("backends.hf", "import transformers"),
        ("prompt", "def f():\n    import transformers"),
        ("backends.triton_staged", "from triton_mega.backends.triton_common import Workspace"),
        ("backends.triton_staged", "from triton_mega.backends import DecodeBackend"),
        ("backends.cuda_persistent", "def f():\n    from cuda_ref.build import build"),
        ("spec", "from triton_mega import __version__"),
        ("spec", "if TYPE_CHECKING:\n    from triton_mega.backends import DecodeBackend"),
    ],
)
def test_an_allowed_import_is_not_reported(module: str, source: str) -> None:
    assert violations({"backends.triton_common": "", module: source}) == []


IMPORT_EVERYTHING = """
import importlib, pkgutil, sys

BLOCKED = {blocked!r}

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in BLOCKED:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Blocker())
import triton_mega
for module in pkgutil.walk_packages(triton_mega.__path__, "triton_mega."):
    try:
        importlib.import_module(module.name)
    except ModuleNotFoundError as error:
        if module.name not in {homes!r} or error.name.split(".")[0] not in BLOCKED:
            raise
import torch
assert not torch.cuda.is_initialized(), "an import initialized CUDA"
print("imported")
"""


@pytest.mark.parametrize("visible", ["", None], ids=["no visible GPU", "as it is"])
def test_importing_needs_no_gpu_and_no_optional_package(visible: str | None) -> None:
    blocked = {"hydra", "omegaconf", *AT_IMPORT_ONLY_IN}
    homes = {f"triton_mega.{home}" for homes in AT_IMPORT_ONLY_IN.values() for home in homes}
    environment = dict(os.environ)
    if visible is not None:
        environment["CUDA_VISIBLE_DEVICES"] = visible
    program = IMPORT_EVERYTHING.format(blocked=blocked, homes=homes)
    result = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert result.stdout == "imported\n", result.stderr

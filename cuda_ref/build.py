"""Compiles the kernel with NVRTC: no nvcc, no host compiler, no GPU. Cubins are cached by content.

A cubin runs on the compute capability that it was compiled for and holds no PTX, so the driver
never compiles anything at load time.
"""

from __future__ import annotations

import hashlib
import importlib.util
import io
import json
import os
import re
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

SOURCES = Path(__file__).parent
KERNEL = "decode_kernel"
STANDARD = "c++17"


@dataclass(frozen=True)
class Resources:
    """What one block of a compiled kernel takes."""

    registers_per_thread: int
    stack_bytes: int  # of a thread: what did not fit its registers
    shared_bytes: int


def arch_name(capability: tuple[int, int]) -> str:
    """Returns NVRTC's name of a compute capability: (9, 0) is "sm_90"."""
    return f"sm_{capability[0]}{capability[1]}"


def default_cache() -> Path:
    """Returns the directory that cubins are kept in: below ``XDG_CACHE_HOME`` or ``~/.cache``."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "triton_mega" / "cuda_ref"


def nvrtc_version() -> str:
    """Returns the version of the NVRTC that would compile, such as "13.0".

    Raises:
        ImportError, RuntimeError: NVRTC cannot be loaded.
    """
    from cuda.bindings import nvrtc

    error, major, minor = nvrtc.nvrtcVersion()
    if int(error):
        raise RuntimeError(f"nvrtcVersion failed with error {int(error)}")
    return f"{major}.{minor}"


def build(
    constants: Mapping[str, int], capability: tuple[int, int], cache: Path | None = None
) -> bytes:
    """Returns the kernel's cubin, from the cache where the same has been compiled before.

    Args:
        constants: ``options.defines``.
        cache: directory; None means ``default_cache``.

    Raises:
        RuntimeError: NVRTC refuses the source; carries its log.
    """
    path = (cache or default_cache()) / f"{cache_key(constants, capability)}.cubin"
    if path.exists():
        return path.read_bytes()
    cubin = compile_cubin(constants, capability)
    _write_whole(path, cubin)
    return cubin


def compile_cubin(constants: Mapping[str, int], capability: tuple[int, int]) -> bytes:
    """Compiles the kernel for a compute capability, whether or not such a GPU is here.

    Raises:
        RuntimeError: NVRTC refuses the source; carries its log.
    """
    from cuda.core import Program, ProgramOptions

    options = ProgramOptions(
        name="decode.cu",
        arch=arch_name(capability),
        std=STANDARD,
        define_macro=[(name, str(value)) for name, value in constants.items()],
        include_path=[str(SOURCES)],
    )
    log = io.StringIO()
    program = Program((SOURCES / "decode.cu").read_text(encoding="utf-8"), "c++", options)
    try:
        return bytes(program.compile("cubin", logs=log).code)
    finally:
        program.close()


def cache_key(constants: Mapping[str, int], capability: tuple[int, int]) -> str:
    """Returns a name for everything that the cubin depends on: sources, constants, chip, NVRTC."""
    about = {
        "sources": {path.name: path.read_text(encoding="utf-8") for path in source_files()},
        "constants": dict(constants),
        "arch": arch_name(capability),
        "standard": STANDARD,
        "nvrtc": nvrtc_version(),
    }
    return hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()[:32]


def source_files() -> list[Path]:
    """Returns the files that the kernel is compiled from."""
    return sorted([*SOURCES.glob("*.cu"), *SOURCES.glob("*.cuh")])


def read_resources(cubin: bytes) -> Resources:
    """Reads what a cubin takes, with the ``cuobjdump`` of Triton's wheel.

    Raises:
        RuntimeError: the cubin does not hold the kernel.
    """
    spec = importlib.util.find_spec("triton")
    if spec is None or spec.origin is None:
        raise RuntimeError("triton is not installed: its cuobjdump reads the resources")
    tool = Path(spec.origin).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(tool), "--dump-resource-usage", file.name]
        done = subprocess.run(command, capture_output=True, text=True)
    found = re.search(rf"Function {KERNEL}:\s+REG:(\d+) STACK:(\d+) SHARED:(\d+)", done.stdout)
    if found is None:
        said = done.stderr or done.stdout
        raise RuntimeError(f"cuobjdump reported no resources of {KERNEL}: {said!r}")
    return Resources(*(int(number) for number in found.groups()))


def _write_whole(path: Path, content: bytes) -> None:
    """Puts a file in place so that no other process ever sees a part of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=".part-", delete=False) as file:
        try:
            file.write(content)
            file.close()
            os.replace(file.name, path)
        except BaseException:
            Path(file.name).unlink(missing_ok=True)
            raise

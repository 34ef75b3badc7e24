"""Compiles the kernels for a chip that need not be here, and reads what they take.

The signature carries the pointer alignment that launches have (``tt.divisibility`` 16): without it
Triton compiles another kernel, with narrow loads and other register counts. Needs no GPU.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from triton_mega.kernels import arguments
from triton_mega.kernels.persistent import decode_persistent_kernel, launch_options
from triton_mega.kernels.staged import STAGE_KERNELS

ALIGNED = [["tt.divisibility", 16]]
POINTERS: dict[type[tuple[Any, ...]], str] = {
    arguments.Cache: "*bf16 *bf16 *fp32 *fp32",
    arguments.Buffers: "*fp32 " * 7,
    arguments.Steps: "*bf16 *fp32 *fp32",
    arguments.Weights: "*bf16 *bf16 *bf16 *i32 *i32 *bf16 *i32 *i32 *bf16 *i32",
}


@dataclass(frozen=True)
class Resources:
    """What one program of a compiled kernel takes."""

    registers_per_thread: int
    spill_bytes: int  # stack frame per thread; 0 where nothing is spilled
    shared_bytes: int


def compile_persistent(
    shape: arguments.Shape,
    tiles: arguments.Tiles,
    capability: tuple[int, int],
    *,
    jitter: bool = False,
) -> Any:
    """Returns the compiled persistent kernel for a compute capability such as (9, 0)."""
    scalars = {name: "i32" for name in ("n_steps", "position", "max_positions", "trace")}
    signature = {
        **_groups("weights", "cache", "buffers", "steps"),
        "sync_ptr": "*i32",
        **scalars,
        "spin_limit": "i32",
        "eps": "fp32",
        **_constants(shape, tiles),
        "JITTER": "constexpr",
    }
    options = launch_options(tiles.NUM_WARPS.value)
    values = (shape, tiles, jitter)
    return _compile(decode_persistent_kernel, signature, values, options, capability)


def compile_stage(
    stage: str, shape: arguments.Shape, tiles: arguments.Tiles, capability: tuple[int, int]
) -> Any:
    """Returns the compiled one-stage kernel of ``triton_staged``."""
    scalars = {name: "i32" for name in ("layer", "position", "max_positions", "trace")}
    signature = {
        **_groups("weights", "cache", "buffers", "steps"),
        **scalars,
        "eps": "fp32",
        **_constants(shape, tiles),
    }
    options = {"num_warps": tiles.NUM_WARPS.value, "enable_fp_fusion": True}
    return _compile(STAGE_KERNELS[stage], signature, (shape, tiles), options, capability)


def read_resources(compiled: Any) -> Resources:
    """Reads registers, spills and shared memory off a compiled kernel's machine code.

    Uses the ``cuobjdump`` of Triton's own wheel.
    """
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        command = [str(tool), "--dump-resource-usage", file.name]
        report = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", report)
    if found is None:
        raise RuntimeError(f"cuobjdump reported no resources: {report!r}")
    return Resources(int(found[1]), int(found[2]), compiled.metadata.shared)


def _groups(*names: str) -> dict[str, tuple[str, ...]]:
    kinds = {kind.__name__.lower(): kind for kind in POINTERS}
    return {name: kinds[name](*POINTERS[kinds[name]].split()) for name in names}


def _constants(shape: arguments.Shape, tiles: arguments.Tiles) -> dict[str, tuple[str, ...]]:
    return {
        "shape": type(shape)(*["constexpr"] * len(shape)),
        "tiles": type(tiles)(*["constexpr"] * len(tiles)),
    }


def _compile(
    kernel: Any,
    signature: dict[str, Any],
    values: Iterable[Any],
    options: dict[str, Any],
    capability: tuple[int, int],
) -> Any:
    constants: dict[tuple[int, ...], Any] = {}
    attributes: dict[tuple[int, ...], Any] = {}
    remaining = iter(values)
    for i, kind in enumerate(signature.values()):
        if isinstance(kind, tuple) and kind[0] == "constexpr":
            constants |= {(i, j): value.value for j, value in enumerate(next(remaining))}
        elif isinstance(kind, tuple):
            attributes |= {(i, j): ALIGNED for j in range(len(kind))}
        elif kind == "constexpr":
            constants[(i,)] = next(remaining)
        elif kind.startswith("*"):
            attributes[(i,)] = ALIGNED
    source = ASTSource(kernel, signature=signature, constexprs=constants, attrs=attributes)
    major, minor = capability
    return triton.compile(source, target=GPUTarget("cuda", 10 * major + minor, 32), options=options)

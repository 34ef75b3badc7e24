"""The CUDA kernel of ``cuda_ref`` as a backend on a CPU: the real source, compiled by g++.

A thread stands for a block and a fiber for each CUDA thread (emulator.h); only memory.cuh, which
holds the PTX, is replaced. Blocks run at the same time and really wait for each other.
"""

from __future__ import annotations

import ctypes
import functools
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from cuda_ref.arguments import FLOATS, INTEGERS, POINTERS, CValue, in_order
from cuda_ref.build import source_files
from cuda_ref.options import KernelOptions, defines
from triton_mega.backends.cuda_persistent import CudaPersistent, Kernel

HERE = Path(__file__).parent
COMPILER = shutil.which("g++")
SMALL = KernelOptions(blocks=3, threads=64, splits=4, rows_per_split=2, prefetch_rows=32)
"""More than one block, warp, split and item of everything, and still quick."""


@functools.cache
def _compile(constants: tuple[tuple[str, int], ...]) -> Callable[..., None]:
    assert COMPILER is not None
    with tempfile.TemporaryDirectory() as directory:
        for path in [*source_files(), *HERE.glob("*.cuh"), *HERE.glob("*.h"), *HERE.glob("*.cpp")]:
            shutil.copy(path, directory)
        library = Path(directory) / "kernel.so"
        options = "-O1 -std=c++20 -shared -fPIC -pthread -Wno-unknown-pragmas -Werror=uninitialized"
        names = [f"-D{name}={value}" for name, value in constants]
        command = [COMPILER, *options.split(), *names, str(Path(directory) / "entry.cpp")]
        subprocess.run([*command, "-o", str(library)], check=True, capture_output=True, text=True)
        entry = ctypes.CDLL(str(library)).kernel_entry
    entry.restype = ctypes.c_void_p
    kinds = [ctypes.c_uint64] * len(POINTERS) + [ctypes.c_int32] * len(INTEGERS)
    kinds += [ctypes.c_float] * len(FLOATS)
    return ctypes.CFUNCTYPE(None, *kinds)(entry())


class EmulatedKernel:
    """Launches the whole grid and waits for it."""

    def __init__(self, constants: Mapping[str, int]) -> None:
        self._run = _compile(tuple(constants.items()))

    def launch(self, packed: Mapping[str, CValue]) -> None:
        self._run(*in_order(packed))


class EmulatedCuda(CudaPersistent):
    """``cuda_persistent`` with the launch replaced; a small grid unless told otherwise."""

    name = "cuda_emulated"

    @classmethod
    def check_available(cls, device: torch.device) -> None:
        """Always: the tests are skipped where there is no g++."""

    def _default_options(self) -> KernelOptions:
        return SMALL

    def _load(self) -> Kernel:
        return EmulatedKernel(defines(self.spec, self.tuning))

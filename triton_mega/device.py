"""What a GPU offers a kernel: multiprocessors, shared memory, registers, cooperative launch.

Read from the driver when asked, never at import, and without torch, so that a machine with a
CPU build of torch can still be described. Knows nothing about models or kernels. The same class
describes a chip that is not here: build it with plain values, or with ``DeviceInfo.of_chip``.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

MIN_CAPABILITY = (8, 0)
"""Oldest compute capability that the kernels are compiled and checked for."""

WARP_SIZE = 32
_REGISTERS_PER_WARP_STEP = 256
"""Registers are handed to a warp in multiples of this."""


class DeviceUnavailable(RuntimeError):
    """No such GPU can be read on this machine; says what is missing."""


@dataclass(frozen=True)
class ChipLimits:
    """What one compute capability allows, whatever the number of multiprocessors."""

    shared_bytes_per_sm: int
    shared_bytes_per_program: int
    shared_bytes_reserved: int
    registers_per_sm: int
    threads_per_sm: int
    programs_per_sm: int


# CUdevice_attribute numbers by field, from cuda.h of CUDA 13.0 (a number never changes meaning).
_LIMITS = {
    "shared_bytes_per_sm": 81,
    "shared_bytes_per_program": 97,
    "shared_bytes_reserved": 111,
    "registers_per_sm": 82,
    "threads_per_sm": 39,
    "programs_per_sm": 106,
}


def _chip(shared_kib_per_sm: int, threads_per_sm: int, programs_per_sm: int) -> ChipLimits:
    return ChipLimits(
        shared_bytes_per_sm=shared_kib_per_sm * 1024,
        shared_bytes_per_program=(shared_kib_per_sm - 1) * 1024,
        shared_bytes_reserved=1024,
        registers_per_sm=65536,
        threads_per_sm=threads_per_sm,
        programs_per_sm=programs_per_sm,
    )


CHIP_LIMITS: dict[tuple[int, int], ChipLimits] = {
    (8, 0): _chip(164, 2048, 32),
    (8, 6): _chip(100, 1536, 16),
    (8, 9): _chip(100, 1536, 24),
    (9, 0): _chip(228, 2048, 32),
    (10, 0): _chip(228, 2048, 32),
    (12, 0): _chip(100, 1536, 24),
}
"""Limits by compute capability, for checking a kernel that was compiled without its GPU.

Source: CUDA C++ Programming Guide 13.0, "Technical Specifications per Compute Capability".
"""


@dataclass(frozen=True)
class DeviceInfo:
    """One GPU as a launch sees it. A program is a thread block."""

    name: str
    capability: tuple[int, int]
    sm_count: int
    l2_bytes: int
    limits: ChipLimits
    cooperative_launch: bool = True
    driver: str | None = None
    """NVIDIA driver release, None where it is not known."""
    cuda_driver: str | None = None
    """Newest CUDA version that the driver supports."""

    @classmethod
    def of_chip(
        cls, capability: tuple[int, int], sm_count: int, l2_bytes: int = 0, name: str = "made up"
    ) -> DeviceInfo:
        """Describes a GPU that need not exist, with its compute capability's limits.

        Raises:
            ValueError: the limits of this capability are not in ``CHIP_LIMITS``.
        """
        if capability not in CHIP_LIMITS:
            known = ", ".join(f"{major}.{minor}" for major, minor in CHIP_LIMITS)
            raise ValueError(f"capability: expected one of {known}, got {capability}")
        return cls(name, capability, sm_count, l2_bytes, CHIP_LIMITS[capability])

    @classmethod
    def read(cls, device: int | torch.device = 0) -> DeviceInfo:
        """Asks the driver about one visible GPU (numbered as torch numbers them).

        Creates no CUDA context and allocates no GPU memory.

        Raises:
            DeviceUnavailable: no driver, or no GPU of this index.
        """
        index = device if isinstance(device, int) else device.index or 0
        driver = _Driver()
        if not 0 <= index < driver.device_count():
            raise DeviceUnavailable(
                f"no GPU {index}: the driver shows {driver.device_count()} "
                "(is CUDA_VISIBLE_DEVICES set?)"
            )
        limits = {field: driver.attribute(index, number) for field, number in _LIMITS.items()}
        return cls(
            name=driver.name(index),
            capability=(driver.attribute(index, 75), driver.attribute(index, 76)),
            sm_count=driver.attribute(index, 16),
            l2_bytes=driver.attribute(index, 38),
            limits=ChipLimits(**limits),
            cooperative_launch=bool(driver.attribute(index, 95)),
            driver=driver_release(),
            cuda_driver=driver.cuda_version(),
        )

    def resident_programs(
        self, num_warps: int, registers_per_thread: int, shared_bytes: int
    ) -> int:
        """Largest grid whose programs all run at once: the limit of a cooperative launch.

        0 means that not even one program fits. The driver has the last word at launch.

        Args:
            num_warps: warps of one program.
            registers_per_thread: as the compiled kernel reports them.
            shared_bytes: shared memory of one program.
        """
        limits = self.limits
        if shared_bytes > limits.shared_bytes_per_program:
            return 0
        warp_registers = max(registers_per_thread, 1) * WARP_SIZE
        warp_registers += -warp_registers % _REGISTERS_PER_WARP_STEP
        per_sm = min(
            limits.programs_per_sm,
            limits.threads_per_sm // (num_warps * WARP_SIZE),
            limits.registers_per_sm // (num_warps * warp_registers),
            limits.shared_bytes_per_sm // (shared_bytes + limits.shared_bytes_reserved),
        )
        return per_sm * self.sm_count


def driver_release(version_file: Path = Path("/proc/driver/nvidia/version")) -> str | None:
    """Returns the loaded NVIDIA driver's release such as "580.65.06", None where there is none."""
    if not version_file.exists():
        return None
    for word in version_file.read_text(encoding="utf-8").split():
        if word[0].isdigit() and "." in word:
            return word
    return None


class _Driver:
    """The few calls of the CUDA driver library that describe a device; creates no context."""

    def __init__(self) -> None:
        try:
            self._lib = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise DeviceUnavailable("no NVIDIA driver: libcuda.so.1 does not load") from error
        self._call("cuInit", 0)

    def _call(self, function: str, *args: object) -> None:
        status = getattr(self._lib, function)(*args)
        if status:
            raise DeviceUnavailable(f"{function} failed with CUDA driver error {status}")

    def _int(self, function: str, *args: object) -> int:
        value = ctypes.c_int()
        self._call(function, ctypes.byref(value), *args)
        return value.value

    def device_count(self) -> int:
        return self._int("cuDeviceGetCount")

    def name(self, index: int) -> str:
        buffer = ctypes.create_string_buffer(128)
        self._call("cuDeviceGetName", buffer, len(buffer), self._int("cuDeviceGet", index))
        return buffer.value.decode()

    def attribute(self, index: int, number: int) -> int:
        return self._int("cuDeviceGetAttribute", number, self._int("cuDeviceGet", index))

    def cuda_version(self) -> str:
        version = self._int("cuDriverGetVersion")
        return f"{version // 1000}.{version % 1000 // 10}"

"""DeviceInfo: made-up devices, residency, and what the driver says where there is one."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from triton_mega.device import CHIP_LIMITS, DeviceInfo, DeviceUnavailable, driver_release

H200 = DeviceInfo.of_chip((9, 0), sm_count=132, l2_bytes=60 << 20)


def test_limits_are_the_published_ones() -> None:
    per_program = {chip: limits.shared_bytes_per_program for chip, limits in CHIP_LIMITS.items()}
    assert per_program == {
        (8, 0): 166912,
        (8, 6): 101376,
        (8, 9): 101376,
        (9, 0): 232448,
        (10, 0): 232448,
        (12, 0): 101376,
    }


def test_unknown_chip_is_refused_with_the_known_ones_named() -> None:
    with pytest.raises(ValueError, match=r"8\.0, 8\.6.*got \(7, 5\)"):
        DeviceInfo.of_chip((7, 5), sm_count=68)


def test_a_device_is_a_value() -> None:
    assert dataclasses.replace(H200, sm_count=132) == H200
    with pytest.raises(dataclasses.FrozenInstanceError):
        H200.sm_count = 108  # type: ignore[misc]


@pytest.mark.parametrize(
    ("num_warps", "registers", "shared_bytes", "per_sm"),
    [
        (8, 255, 0, 1),  # registers: 8 warps * 32 * 256 fill all 65536
        (8, 128, 0, 2),
        (8, 129, 0, 1),  # one register more takes a whole step of 8 per thread
        (4, 32, 0, 16),  # threads and registers both allow 16
        (1, 16, 0, 32),  # programs per multiprocessor
        (8, 32, 120 * 1024, 1),  # two programs' shared memory and reserve exceed 228 KiB
        (8, 32, 113 * 1024, 2),  # 2 * (113 + 1) KiB is exactly 228 KiB
        (8, 32, 228 * 1024, 0),  # more than one program may have
    ],
)
def test_resident_programs(num_warps: int, registers: int, shared_bytes: int, per_sm: int) -> None:
    assert H200.resident_programs(num_warps, registers, shared_bytes) == 132 * per_sm


def test_driver_release(tmp_path: Path) -> None:
    version = tmp_path / "version"
    assert driver_release(version) is None
    version.write_text("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Rel")
    assert driver_release(version) == "580.65.06"


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_reading_without_a_gpu_says_so() -> None:
    with pytest.raises(DeviceUnavailable, match=r"no NVIDIA driver|no GPU|cuInit"):
        DeviceInfo.read()


@pytest.mark.gpu
def test_reading_agrees_with_torch() -> None:
    device, properties = DeviceInfo.read(torch.device("cuda")), torch.cuda.get_device_properties(0)
    assert device.name == properties.name
    assert device.capability == (properties.major, properties.minor)
    assert device.sm_count == properties.multi_processor_count
    assert device.l2_bytes == properties.L2_cache_size
    assert device.limits.shared_bytes_per_sm == properties.shared_memory_per_multiprocessor
    assert device.limits.shared_bytes_per_program == properties.shared_memory_per_block_optin
    assert device.limits.threads_per_sm == properties.max_threads_per_multi_processor
    assert device.limits == CHIP_LIMITS.get(device.capability, device.limits)
    assert device.cooperative_launch
    with pytest.raises(DeviceUnavailable, match=r"no GPU \d+"):
        DeviceInfo.read(torch.cuda.device_count())

"""The kernels compile for chips that are not here, within what those chips have."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Any

import pytest
import triton
import triton.language as tl
from packaging.version import Version
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from tests.shapes import CHIPS, LARGE, SPECS
from triton_mega.backends.triton_common import shape_constants, tile_constants
from triton_mega.device import DeviceInfo
from triton_mega.kernels import aot, sync
from triton_mega.kernels.staged import STAGE_KERNELS
from triton_mega.spec import TINY, DecoderSpec
from triton_mega.tuning import default_tuning

pytestmark = pytest.mark.compile

DRAINS = re.compile(r"bar(?:rier)?\.(?:cta\.)?sync")
RELEASE = re.compile(r"\b(?:atom|red)\.[\w.:]*release")
STORE = re.compile(r"\bst\.(?:global|shared)")


def constants(spec: DecoderSpec, chip: DeviceInfo) -> tuple[Any, Any]:
    return shape_constants(spec), tile_constants(default_tuning(spec, chip))


@lru_cache(maxsize=2)
def persistent(name: str, chip: str) -> Any:
    device = CHIPS[chip]
    return aot.compile_persistent(*constants(SPECS[name], device), device.capability)


@pytest.mark.slow
@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize("name", SPECS)
def test_default_tuning_fits_the_chip(name: str, chip: str) -> None:
    device, compiled = CHIPS[chip], persistent(name, chip)
    found = aot.read_resources(compiled)
    assert found.spill_bytes == 0
    assert 0 < found.shared_bytes <= device.limits.shared_bytes_per_program
    tuning = default_tuning(SPECS[name], device)
    most = device.resident_programs(
        tuning.num_warps, found.registers_per_thread, found.shared_bytes
    )
    assert tuning.num_programs <= most


@pytest.mark.parametrize("name", ["talker_1p7b", "talker_0p6b", "predictor"])
def test_weights_are_read_16_bytes_at_a_time(name: str) -> None:
    loads = weight_loads(persistent(name, "sm_90").asm["ptx"])
    assert set(loads) == {"v4"}
    assert len(loads) >= 5 * 8  # qkv, o, gate_up, down, head: at least 8 loads a thread each


def test_narrow_loads_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aot, "ALIGNED", [])
    compiled = aot.compile_stage("down_proj", *constants(LARGE.talker, CHIPS["sm_90"]), (9, 0))
    assert set(weight_loads(compiled.asm["ptx"])) != {"v4"}


def weight_loads(ptx: str) -> list[str]:
    """Vector width of every load that is meant to pass through the caches once."""
    loads: list[str] = re.findall(r"ld\.global\.L1::evict_first[\w.:]*", ptx)
    return [load.split(".")[-2] for load in loads]


@pytest.mark.slow
@pytest.mark.parametrize("stage", STAGE_KERNELS)
@pytest.mark.parametrize("name", ["talker_1p7b", "tiny"])
def test_stage_kernels_fit(name: str, stage: str) -> None:
    device = CHIPS["sm_90"]
    compiled = aot.compile_stage(stage, *constants(SPECS[name], device), device.capability)
    found = aot.read_resources(compiled)
    assert found.spill_bytes == 0
    assert found.shared_bytes <= device.limits.shared_bytes_per_program


@pytest.mark.parametrize("chip", CHIPS)
def test_every_release_follows_a_cta_barrier(chip: str) -> None:
    ptx = persistent("tiny", chip).asm["ptx"]
    assert len(RELEASE.findall(ptx)) >= 5
    assert unguarded_releases(ptx) == []


def test_jitter_build_idles_and_keeps_its_barriers() -> None:
    plain, jitter = (
        aot.compile_persistent(*constants(TINY.talker, CHIPS["sm_90"]), (9, 0), jitter=jitter)
        for jitter in (False, True)
    )
    assert unguarded_releases(jitter.asm["ptx"]) == []
    idle = re.compile(r"(?:atom|red)\.[\w.:]*relaxed[\w.:]*add")
    assert len(idle.findall(plain.asm["ptx"])) == 0
    assert len(idle.findall(jitter.asm["ptx"])) >= 2 * 5  # around every barrier


@pytest.mark.skipif(
    not Version("3.5") <= Version(triton.__version__) < Version("3.9"),
    reason="this Triton places the CTA barrier itself",
)
def test_release_without_debug_barrier_is_seen() -> None:
    assert unguarded_releases(publish_ptx(guarded=True)) == []
    assert len(unguarded_releases(publish_ptx(guarded=False))) == 1


def unguarded_releases(ptx: str) -> list[str]:
    """The release atomics that other warps' stores may pass: no CTA barrier since the last store.

    Looks at the instructions in the order in which they stand, as the barrier always stands in the
    same block as the release or in the one before it.
    """
    unguarded, stored = [], True
    for line in ptx.splitlines():
        if DRAINS.search(line):
            stored = False
        elif RELEASE.search(line):
            if stored:
                unguarded.append(line.strip())
        elif STORE.search(line):
            stored = True
    return unguarded


@triton.jit
def publish_kernel(
    out_ptr,  # [BLOCK] int32
    sync_ptr,  # [SYNC_WORDS] int32
    BLOCK: tl.constexpr,
    GUARDED: tl.constexpr,
):
    """Stores with all warps, then releases: by ``sync.arrive``, or by its atomic alone."""
    pid = tl.program_id(0)
    tl.store(out_ptr + tl.arange(0, BLOCK), pid)
    if GUARDED:
        sync.arrive(sync_ptr, pid, 0, False)
    else:
        tl.atomic_add(sync_ptr + sync.COUNTER, 1, sem="release", scope="gpu")


def publish_ptx(*, guarded: bool) -> str:
    source = ASTSource(
        publish_kernel,
        {"out_ptr": "*i32", "sync_ptr": "*i32", "BLOCK": "constexpr", "GUARDED": "constexpr"},
        {(2,): 256, (3,): guarded},
        {(0,): aot.ALIGNED, (1,): aot.ALIGNED},
    )
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32))
    ptx: str = compiled.asm["ptx"]
    return ptx

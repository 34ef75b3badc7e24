"""The CUDA kernel's build, arguments and availability.

What it computes is checked without a GPU in test_cuda_emulated.py, on one in
test_cuda_persistent.py.
"""

from __future__ import annotations

import ast
import importlib.util
import os
import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from cuda_ref import arguments, build
from cuda_ref.options import KernelOptions, barrier_name, default_options, defines
from tests.shapes import CHIPS, LARGE, SPECS
from triton_mega.backends import BackendUnavailable, load_backend
from triton_mega.backends.cuda_persistent import CudaPersistent
from triton_mega.device import DeviceInfo
from triton_mega.schedule import LAYER_STAGES
from triton_mega.spec import TINY

ROOT = Path(__file__).parent.parent
SOURCE = (ROOT / "cuda_ref" / "decode.cu").read_text(encoding="utf-8")
STATIC_SHARED_BYTES = 48 * 1024
"""What a block may have without asking the driver for more."""
STACK_BYTES = {"sm_80": 64}
"""Stack that a thread may take; none where a chip is not named."""

needs_nvrtc = pytest.mark.skipif(
    importlib.util.find_spec("cuda") is None, reason="needs NVRTC (extra cuda)"
)


def tiny_options(**changes: Any) -> KernelOptions:
    return KernelOptions(**{"blocks": 3, "threads": 64, **changes})


# What the compiler is told.


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"blocks": 0}, "blocks: expected at least 1"),
        ({"threads": 48}, "threads: expected a multiple of 32 up to 1024, got 48"),
        ({"threads": 2048}, "threads"),
        ({"batch": 0}, "batch"),
        ({"loads": 0}, "loads"),
        ({"splits": 0}, "splits"),
        ({"rows_per_split": 0}, "rows_per_split"),
        ({"prefetch_rows": -1}, "prefetch_rows"),
        ({"attention": "flash"}, "attention: expected split_kv or one_block_per_head"),
        ({"steps_per_launch": 0}, "steps_per_launch"),
    ],
)
def test_a_wrong_option_is_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tiny_options(**changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": 100}, "hidden_size: expected a multiple of 8, got 100"),
        ({"intermediate_size": 162}, "intermediate_size"),
        ({"head_dim": 20, "mrope_section": None}, "head_dim: expected a multiple of 8"),
        ({"head_dim": 96, "mrope_section": None}, "head_dim: expected up to 64, or 128"),
    ],
)
def test_a_shape_that_the_kernel_cannot_compute_is_named(
    changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        defines(replace(TINY.talker, **changes), tiny_options())


def test_one_block_per_head_is_one_split() -> None:
    constants = defines(TINY.talker, tiny_options(splits=16, attention="one_block_per_head"))
    assert constants["SPLITS"] == 1
    assert defines(TINY.talker, tiny_options(splits=16))["SPLITS"] == 16


def test_default_is_a_block_per_multiprocessor_in_whole_heads() -> None:
    for chip, blocks in zip(CHIPS.values(), (104, 128, 168), strict=True):
        assert default_options(LARGE.talker, chip).blocks == blocks
    assert default_options(TINY.talker, DeviceInfo.of_chip((9, 0), 1)).blocks == 1


def test_every_constant_that_the_source_asks_for_is_given_and_used() -> None:
    text = "\n".join(path.read_text(encoding="utf-8") for path in build.source_files())
    for name in defines(TINY.talker, tiny_options()):
        assert re.search(rf"\b{name}\b", text), name


def test_barriers_are_named_in_the_kernels_order() -> None:
    per_step = 3 * len(LAYER_STAGES) + 1
    names = [barrier_name(TINY.talker, i) for i in (1, 5, 6, per_step, per_step + 2)]
    assert names == [
        "step 0, layer 0, after qkv_proj",
        "step 0, layer 0, after down_proj",
        "step 0, layer 1, after qkv_proj",
        "step 0, after lm_head",
        "step 1, layer 0, after attention",
    ]


# Arguments.


def signature() -> list[tuple[str, str]]:
    """Names and types of the kernel's parameters, as decode.cu writes them."""
    inside = SOURCE.split("decode_kernel(")[1].split(") {")[0]
    parameters = re.sub(r"//.*", "", inside).replace("\n", " ").split(",")
    found = []
    for parameter in parameters:
        kind, _, name = parameter.strip().rpartition(" ")
        found.append((name, kind.strip()))
    return found


def test_arguments_are_the_kernels_in_order() -> None:
    assert [name for name, _ in signature()] == list(arguments.ARGUMENTS)
    for name, kind in signature():
        wanted = "int" if name in arguments.INTEGERS else "float"
        assert kind.endswith("*") if name in arguments.POINTERS else kind == wanted, name


def test_pack_gives_addresses_and_numbers_of_the_right_width() -> None:
    tensor = torch.zeros(64)
    packed = arguments.pack({"x": tensor, "n_steps": 3, "eps": 1e-6, "embedding": None})
    assert {name: type(value).__name__ for name, value in packed.items()} == {
        "x": "c_ulong",
        "n_steps": "c_int",
        "eps": "c_float",
        "embedding": "c_ulong",
    }
    assert packed["x"].value == tensor.data_ptr()
    assert packed["embedding"].value == 0


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"n_step": 1}, "n_step: the kernel has no such argument"),
        ({"x": None}, "x: expected a contiguous tensor, got NoneType"),
        ({"x": torch.zeros(4, 4).T}, "x: expected a contiguous tensor"),
        ({"x": torch.zeros(8)[1:]}, "x: expected an address divisible by 16"),
        ({"n_steps": 1.0}, "n_steps: expected a 32-bit integer"),
        ({"n_steps": 2**31}, "n_steps"),
        ({"eps": 1}, "eps: expected a float"),
    ],
)
def test_a_wrong_argument_is_named(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        arguments.pack(values)


def test_a_missing_argument_is_named() -> None:
    packed = {name: arguments.pack({"n_steps": 1})["n_steps"] for name in arguments.ARGUMENTS}
    assert len(arguments.in_order(packed)) == len(arguments.ARGUMENTS)
    del packed["lse"]
    with pytest.raises(ValueError, match="arguments: lse missing"):
        arguments.in_order(packed)


# The build.


@needs_nvrtc
@pytest.mark.compile
@pytest.mark.parametrize("attention", ["split_kv", "one_block_per_head"])
@pytest.mark.parametrize("shape", SPECS)
@pytest.mark.parametrize("chip_name", CHIPS)
def test_the_kernel_compiles_within_its_limits(chip_name: str, shape: str, attention: Any) -> None:
    chip = CHIPS[chip_name]
    options = replace(default_options(SPECS[shape], chip), attention=attention)
    cubin = build.compile_cubin(defines(SPECS[shape], options), chip.capability)
    found = build.read_resources(cubin)
    print(f"{chip_name} {shape} {attention}: {found}")
    assert found.registers_per_thread * options.threads <= chip.limits.registers_per_sm
    assert found.stack_bytes <= STACK_BYTES.get(chip_name, 16)
    assert found.shared_bytes <= STATIC_SHARED_BYTES
    resident = chip.resident_programs(
        options.threads // 32, found.registers_per_thread, found.shared_bytes
    )
    assert resident >= options.blocks
    assert b".version" not in cubin, "holds PTX"


@needs_nvrtc
@pytest.mark.compile
def test_resources_are_read_from_the_cubin_and_can_exceed_a_limit() -> None:
    options = KernelOptions(blocks=128, threads=512, batch=8, loads=64)
    greedy = build.compile_cubin(defines(LARGE.talker, options), (9, 0))
    assert build.read_resources(greedy).stack_bytes > 64
    with pytest.raises(RuntimeError, match="no resources of decode_kernel"):
        build.read_resources(b"nothing")


@needs_nvrtc
@pytest.mark.compile
def test_a_source_that_does_not_compile_shows_the_compilers_log() -> None:
    constants = defines(TINY.talker, tiny_options()) | {"HIDDEN": 97}
    with pytest.raises(Exception, match="rows of weights are read 8 columns at a time"):
        build.compile_cubin(constants, (9, 0))


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Replaces the compiler; returns the capabilities it was asked for."""
    asked: list[tuple[int, int]] = []

    def compile_cubin(constants: dict[str, int], capability: tuple[int, int]) -> bytes:
        asked.append(capability)
        return bytes(f"{capability} {sorted(constants.items())}", "utf-8") * 1000

    monkeypatch.setattr(build, "compile_cubin", compile_cubin)
    monkeypatch.setattr(build, "nvrtc_version", lambda: "13.0")
    return asked


def test_the_same_is_compiled_once(compiled: list[tuple[int, int]], tmp_path: Path) -> None:
    constants = defines(TINY.talker, tiny_options())
    first = build.build(constants, (9, 0), tmp_path)
    assert build.build(dict(reversed(constants.items())), (9, 0), tmp_path) == first
    assert compiled == [(9, 0)]


def test_the_cache_tells_apart_whatever_changes_the_cubin(
    compiled: list[tuple[int, int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    constants = defines(TINY.talker, tiny_options())
    keys = {build.cache_key(constants, (9, 0)), build.cache_key(constants, (8, 0))}
    keys.add(build.cache_key(constants | {"LOADS": 3}, (9, 0)))
    monkeypatch.setattr(build, "nvrtc_version", lambda: "13.1")
    keys.add(build.cache_key(constants, (9, 0)))
    for path in build.source_files():
        (tmp_path / path.name).write_text(path.read_text(encoding="utf-8"))
    monkeypatch.setattr(build, "SOURCES", tmp_path)
    assert build.cache_key(constants, (9, 0)) in keys
    (tmp_path / "barrier.cuh").write_text("// another barrier")
    keys.add(build.cache_key(constants, (9, 0)))
    assert len(keys) == 5


def test_the_cache_holds_whole_files_only(
    compiled: list[tuple[int, int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    constants = defines(TINY.talker, tiny_options())

    def dies(source: str, target: Path) -> None:
        raise OSError("the machine goes down")

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", dies)
        with pytest.raises(OSError, match="goes down"):
            build.build(constants, (9, 0), tmp_path)
    assert list(tmp_path.iterdir()) == []
    with ThreadPoolExecutor(8) as pool:
        cubins = set(pool.map(lambda _: build.build(constants, (9, 0), tmp_path), range(32)))
    assert len(cubins) == 1
    (only,) = tmp_path.iterdir()
    assert only.read_bytes() == cubins.pop()


def test_the_cache_is_where_caches_belong(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert build.default_cache() == tmp_path / "triton_mega" / "cuda_ref"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert build.default_cache() == tmp_path / ".cache" / "triton_mega" / "cuda_ref"


# Independence and availability.


def test_the_yardstick_and_the_kernels_share_nothing() -> None:
    for here, forbidden in (
        ("cuda_ref", "triton_mega.kernels"),
        ("triton_mega/kernels", "cuda_ref"),
    ):
        for path in (ROOT / here).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                names = [alias.name for alias in getattr(node, "names", [])]
                names.append(getattr(node, "module", None) or "")
                assert not any(str(name).startswith(forbidden) for name in names), path


def test_only_memory_cuh_holds_ptx() -> None:
    for path in build.source_files():
        if path.name != "memory.cuh":
            assert "asm" not in path.read_text(encoding="utf-8"), path.name


@pytest.mark.parametrize(
    ("missing", "reason"),
    [
        ("cuda_ref", r"cuda_ref is not part of the installed wheel \(run from the repository's"),
        ("cuda", r"package cuda-core is not installed \(.*\[cuda\]"),
    ],
)
def test_a_missing_part_is_named(
    missing: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == missing else find_spec(name)
    )
    backend = load_backend("cuda_persistent")
    for device in ("cpu", "cuda"):
        with pytest.raises(BackendUnavailable, match=reason):
            backend.check_available(torch.device(device))


@needs_nvrtc
def test_a_cpu_is_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BackendUnavailable, match="device cpu is not a CUDA GPU"):
        CudaPersistent.check_available(torch.device("cpu"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    with pytest.raises(BackendUnavailable, match=r"compute capability 7\.5 is below 8\.0"):
        CudaPersistent.check_available(torch.device("cuda"))


@needs_nvrtc
def test_nvrtc_that_does_not_load_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent() -> str:
        raise RuntimeError("libnvrtc.so.13 not found")

    monkeypatch.setattr(build, "nvrtc_version", absent)
    with pytest.raises(BackendUnavailable, match=r"no NVRTC: libnvrtc.so.13 not found \(install"):
        CudaPersistent.check_available(torch.device("cpu"))

"""The read kernels read every word, and compile for the chips they are meant for."""

from __future__ import annotations

import re

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource

from triton_mega.kernels import ceilings

ALIGNED = [["tt.divisibility", 16]]
SHARED_LIMIT_BYTES = 227 * 1024


def wrapped_sum(words: torch.Tensor) -> int:
    """The sum modulo 2^32, as a signed number."""
    return int(words.sum(dtype=torch.int64).to(torch.int32))


@pytest.mark.interpret
@pytest.mark.parametrize("programs", [1, 3])
def test_plain_loads_read_every_word_once(programs: int) -> None:
    generator = torch.Generator().manual_seed(0)
    num_words = 3 * ceilings.LOAD_BLOCK + 17
    words = torch.randint(0, 2**16, (num_words,), generator=generator, dtype=torch.int32)
    sums = torch.full((programs,), -1, dtype=torch.int32)
    ceilings.read_loads(words, sums)
    assert wrapped_sum(sums) == wrapped_sum(words)
    words[-1] += 1
    assert wrapped_sum(sums) != wrapped_sum(words)


@pytest.mark.compile
@pytest.mark.parametrize("capability", [80, 90, 120])
def test_plain_loads_are_16_bytes_wide(capability: int) -> None:
    source = ASTSource(
        ceilings.read_loads_kernel,
        {"words_ptr": "*i32", "sums_ptr": "*i32", "num_words": "i32", "BLOCK": "constexpr"},
        {(3,): ceilings.LOAD_BLOCK},
        {(0,): ALIGNED, (1,): ALIGNED, (2,): ALIGNED},
    )
    options = {"num_warps": ceilings.LOAD_WARPS}
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    ptx = compiled.asm["ptx"]
    loads = re.findall(r"ld\.global\.\S+", ptx)
    per_thread = ceilings.LOAD_BLOCK // (ceilings.LOAD_WARPS * 32 * 4)
    assert len(loads) >= per_thread
    assert all(load.startswith("ld.global.v4") for load in loads), set(loads)


@pytest.mark.compile
@pytest.mark.parametrize("stages", [3, 6])
def test_bulk_copies_compile_for_sm_90(stages: int) -> None:
    block = f"{ceilings.BULK_ROWS}, {ceilings.BULK_COLUMNS}"
    descriptor = f"tensordesc<i32[{block}],{ceilings.BULK_LAYOUT!r}>"
    source = GluonASTSource(
        ceilings.read_bulk_kernel,
        {
            "words": descriptor,
            "sums_ptr": "*i32",
            "num_tiles": "i32",
            "STAGES": "constexpr",
            "num_warps": "constexpr",
        },
        {(3,): stages, (4,): ceilings.BULK_WARPS},
        {(1,): ALIGNED},
    )
    options = {"num_warps": ceilings.BULK_WARPS}
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    assert "cp.async.bulk.tensor" in compiled.asm["ptx"]
    assert compiled.metadata.shared <= ceilings.ring_bytes(stages) <= SHARED_LIMIT_BYTES
    assert compiled.metadata.shared >= stages * ceilings.BULK_ROWS * ceilings.BULK_COLUMNS * 4


def test_a_broken_tile_is_refused() -> None:
    words = torch.zeros(ceilings.BULK_COLUMNS, dtype=torch.int32)
    with pytest.raises(ValueError, match="words: expected a multiple of"):
        ceilings.read_bulk(words, torch.zeros(1, dtype=torch.int32), 3)


@pytest.mark.gpu
def test_both_kernels_read_every_word_on_a_gpu() -> None:
    num_words = 513 * ceilings.BULK_ROWS * ceilings.BULK_COLUMNS
    words = torch.arange(num_words, dtype=torch.int32, device="cuda")
    want = wrapped_sum(words)
    sums = torch.full((100,), -1, dtype=torch.int32, device="cuda")
    ceilings.read_loads(words, sums)
    assert wrapped_sum(sums) == want
    if torch.cuda.get_device_capability() < ceilings.BULK_CAPABILITY:
        pytest.skip("no bulk copies before compute capability 9.0")
    for stages in (1, 3, 6):
        sums.fill_(-1)
        ceilings.read_bulk(words, sums, stages)
        assert wrapped_sum(sums) == want

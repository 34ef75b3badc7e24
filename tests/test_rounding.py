"""K and V are rounded to bf16 in the kernels as torch rounds them, whatever the bits."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from triton_mega.kernels.attention import round_to_bf16

BLOCK = 4096


@triton.jit
def round_kernel(x_ptr, y_ptr, BLOCK: tl.constexpr):
    offs = tl.arange(0, BLOCK)
    tl.store(y_ptr + offs, round_to_bf16(tl.load(x_ptr + offs)))


def check_rounding(device: str) -> None:
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(-(2**31), 2**31, (BLOCK,), generator=generator).to(torch.int32)
    exact = torch.tensor([0x3F808000, 0x3F818000, 0x7F7FFFFF, 0, 1], dtype=torch.int32)
    nans = torch.tensor([0x7FFFFFFF, 0x7FC00000, -1, -4194304, 0x7F800001], dtype=torch.int32)
    bits[: len(exact)], bits[-len(nans) :] = exact, nans  # ties both ways, overflow, every NaN
    x = bits.view(torch.float32).to(device)
    y = torch.empty_like(x)
    round_kernel[(1,)](x, y, BLOCK)
    want = x.bfloat16().float()
    assert torch.equal(y.isnan(), want.isnan())
    assert torch.equal(y.nan_to_num(7.0), want.nan_to_num(7.0))
    assert y[-len(nans) :].isnan().all()


@pytest.mark.interpret
def test_rounding_in_the_interpreter() -> None:
    check_rounding("cpu")


@pytest.mark.gpu
def test_rounding_on_a_gpu() -> None:
    check_rounding("cuda")

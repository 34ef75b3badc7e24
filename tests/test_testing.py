"""Every comparator passes what is right, and is shown to fail on what is wrong."""

from __future__ import annotations

import math

import pytest
import torch

from triton_mega.testing import Divergence, assert_close, first_divergence, relative_error

BAD = [float("nan"), float("inf"), float("-inf")]


def test_relative_error_is_the_norm_of_the_difference() -> None:
    want = torch.tensor([3.0, 4.0])
    assert relative_error(want, want) == 0.0
    assert relative_error(want + torch.tensor([0.0, 0.5]), want) == pytest.approx(0.1)
    assert relative_error(want.bfloat16(), want.double()) == 0.0
    assert relative_error(-want, want) == pytest.approx(2.0)


def test_relative_error_sees_what_low_precision_would_hide() -> None:
    want = torch.full((1000,), 1.0, dtype=torch.float64)
    got = want.clone()
    got[0] += 1e-9
    assert 0 < relative_error(got, want) < 1e-10


def test_zero_oracle_is_matched_by_zero_only() -> None:
    zero = torch.zeros(4)
    assert relative_error(zero, zero) == 0.0
    assert relative_error(zero + 1e-6, zero) > 1e100


@pytest.mark.parametrize("bad", BAD)
def test_what_is_not_finite_never_passes(bad: float) -> None:
    good = torch.ones(3)
    wrong = torch.tensor([1.0, bad, 1.0])
    for got, want in ((wrong, good), (good, wrong), (wrong, wrong)):
        assert relative_error(got, want) == math.inf
        with pytest.raises(AssertionError, match="inf is above"):
            assert_close(got, want, 1e9)


def test_shapes_must_be_equal() -> None:
    with pytest.raises(ValueError, match=r"got: expected \[3\], got \[1, 3\]"):
        relative_error(torch.ones(1, 3), torch.ones(3))


def test_assert_close_fails_above_its_bound_and_only_there() -> None:
    want = torch.ones(100)
    assert assert_close(want * 1.001, want, 1.1e-3) == pytest.approx(1e-3, rel=1e-3)
    with pytest.raises(AssertionError, match=r"hidden: relative error 1\.\d+e-03 is above 9"):
        assert_close(want * 1.001, want, 9e-4, "hidden")
    with pytest.raises(AssertionError):
        assert_close(want, want, float("nan"))


def trace() -> dict[str, torch.Tensor]:
    """Returns two layer stages of three layers, and two stages after them."""
    generator = torch.Generator().manual_seed(0)
    shapes = {"qkv_proj": (3, 8), "down_proj": (3, 4), "final_norm": (4,), "lm_head": (6,)}
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def test_equal_traces_do_not_diverge() -> None:
    assert first_divergence(trace(), trace(), 0.0) is None
    noisy = {stage: value * (1 + 1e-6) for stage, value in trace().items()}
    assert first_divergence(noisy, trace(), 1e-5) is None
    assert first_divergence(noisy, trace(), 1e-7) is not None


@pytest.mark.parametrize("fault", [0.1, *BAD])
@pytest.mark.parametrize(
    ("places", "first"),
    [
        ([("lm_head", None)], ("lm_head", None)),
        ([("final_norm", None), ("lm_head", None)], ("final_norm", None)),
        ([("down_proj", 2), ("final_norm", None)], ("down_proj", 2)),
        ([("qkv_proj", 1), ("down_proj", 0)], ("down_proj", 0)),
        ([("down_proj", 1), ("qkv_proj", 1)], ("qkv_proj", 1)),
    ],
)
def test_first_divergence_in_order_of_execution(
    places: list[tuple[str, int | None]], first: tuple[str, int | None], fault: float
) -> None:
    broken = trace()
    for stage, layer in places:
        value = broken[stage] if layer is None else broken[stage][layer]
        value[1] += fault
    found = first_divergence(broken, trace(), 1e-3)
    assert found is not None
    assert (found.stage, found.layer) == first
    assert found.error > found.bound == 1e-3


def test_stages_must_be_the_same() -> None:
    short = trace()
    del short["down_proj"]
    with pytest.raises(ValueError, match=r"trace: expected stages .*down_proj"):
        first_divergence(short, trace(), 1.0)
    with pytest.raises(ValueError, match="trace: expected stages"):
        first_divergence(trace(), short, 1.0)


def test_divergence_reads_as_a_sentence() -> None:
    layer = Divergence("o_proj", 2, 0.5, 1e-4)
    assert str(layer) == "layer 2, stage o_proj: relative error 5.000e-01 is above 1.000e-04"
    assert str(Divergence("lm_head", None, 0.5, 1e-4)).startswith("lm_head: relative")

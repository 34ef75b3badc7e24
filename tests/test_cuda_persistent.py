"""The CUDA backend on a GPU: the contract, every stage, argmax, barriers, engines, residency."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from typing import Any

import pytest
import torch

from cuda_ref.options import KernelOptions
from tests.backend_contract import BackendContract, assert_same, random_rows
from tests.decoding import Decoding
from triton_mega.backends import BarrierTimeout
from triton_mega.backends.cuda_persistent import CudaPersistent
from triton_mega.reference import CONTRACTS
from triton_mega.spec import TINY, DecoderSpec
from triton_mega.testing import first_divergence
from triton_mega.weights import random_weights

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(importlib.util.find_spec("cuda") is None, reason="needs NVRTC (extra cuda)"),
]


def small(**changes: Any) -> KernelOptions:
    return KernelOptions(**{"blocks": 3, "threads": 64, **changes})


def engine(
    spec: DecoderSpec = TINY.talker,
    options: KernelOptions | None = None,
    history: int = 0,
    **more: Any,
) -> CudaPersistent:
    weights = random_weights(spec, seed=3).to("cuda")
    made = CudaPersistent(spec, weights, max_positions=40, options=options, **more)
    made.cache.fill_random(history, seed=4)
    return made


def rows_of(spec: DecoderSpec, n: int) -> torch.Tensor:
    return random_rows(spec, n).to("cuda")


class TestContract(BackendContract):
    backend = "cuda_persistent"
    device = "cuda"


@pytest.mark.parametrize(
    "options",
    [
        None,
        small(),
        small(splits=4, rows_per_split=2),
        small(attention="one_block_per_head"),
        small(blocks=128, threads=256, batch=1, loads=3),
    ],
    ids=["default", "small", "many splits", "one block per head", "large"],
)
@pytest.mark.parametrize("position", [0, 1, 31, 32, 39])
def test_every_stage_is_right(options: KernelOptions | None, position: int) -> None:
    made = engine(options=options, history=position)
    rows = rows_of(made.spec, 1)
    rules = CONTRACTS["fp32_activations"].in_fp64()
    oracle = Decoding(made.spec, made.weights.to("cpu"), rules, 40)
    oracle.cache.copy_from(made.cache)
    _, want = oracle.traced(rows.cpu(), position)
    assert first_divergence(made.trace_step(rows, position), want, 1e-5) is None


@pytest.mark.parametrize("threads", [32, 96, 512, 1024])
@pytest.mark.parametrize("blocks", [1, 5, 128])
def test_argmax_is_right_for_every_id(blocks: int, threads: int) -> None:
    options = small(blocks=blocks, threads=threads)
    made = engine(replace(TINY.talker, num_hidden_layers=1), options)
    rows = rows_of(made.spec, 1)
    hidden = made.run_steps(rows, 0).hidden[0].bfloat16()
    head = made.weights.lm_head
    for token in range(made.spec.vocab_size):
        head[0] = 0
        head[0, token] = hidden
        head[0, token + 1 :: 7] = hidden  # equals: the lowest wins
        assert made.run_steps_with_argmax(rows, 0)[1].tolist() == [token]


def test_many_launches_give_the_same_bits_and_so_does_jitter() -> None:
    made = engine(history=5)
    rows = rows_of(made.spec, 4)
    want = made.run_steps(rows, 5)
    for _ in range(200):
        assert_same(made.run_steps(rows, 5), want)
    default = made.tuning
    for changes in ({"jitter": True}, {"steps_per_launch": 1}):
        assert_same(engine(options=replace(default, **changes), history=5).run_steps(rows, 5), want)


def test_two_engines_on_two_streams() -> None:
    left, right = (engine(options=small(), history=5) for _ in range(2))
    rows = rows_of(left.spec, 4)
    want = engine(options=small(), history=5).run_steps(rows, 5)
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in range(2)]
    outputs = []
    for _ in range(20):
        for made, stream in zip((left, right), streams, strict=True):
            with torch.cuda.stream(stream):
                outputs.append(made.run_steps(rows, 5))
    torch.cuda.synchronize()
    for output in outputs:
        assert_same(output, want)


def test_a_block_that_waits_too_long_is_named_and_the_engine_recovers() -> None:
    made = engine(history=5)
    rows = rows_of(made.spec, 1)
    want = made.run_steps(rows, 5)
    made.synchronize()
    made.spin_limit = 0
    made.run_steps(rows, 5)
    with pytest.raises(BarrierTimeout, match=r"block \d+ of \d+ gave up .* after \w+"):
        made.synchronize()
    made.spin_limit = 2_000_000
    assert_same(made.run_steps(rows, 5), want)
    made.synchronize()


def test_a_grid_that_cannot_be_resident_is_refused() -> None:
    with pytest.raises(ValueError, match=r"options\.blocks: at most \d+ can be resident"):
        engine(options=small(blocks=100_000))

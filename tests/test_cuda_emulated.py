"""The CUDA kernel's arithmetic and barriers, run from its real source on a CPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from cuda_ref.options import KernelOptions
from tests.backend_contract import BackendContract, assert_same, random_rows
from tests.cuda_emulator import COMPILER, SMALL, EmulatedCuda
from tests.decoding import Decoding
from triton_mega.backends import BarrierTimeout, DecodeBackend
from triton_mega.reference import CONTRACTS
from triton_mega.spec import TINY, DecoderSpec
from triton_mega.testing import assert_close, first_divergence
from triton_mega.weights import DecoderWeights, random_weights

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs g++")

SPEC = TINY.talker
WIDE = replace(SPEC, num_hidden_layers=2, num_attention_heads=4, head_dim=128, mrope_section=None)
"""Heads as wide as the released models': a lane holds two pairs of a head, not one."""
BOUND = 5e-6
COUNTER, BASE = 0, 32
CHOICES = {
    "small": SMALL,
    "one block": replace(SMALL, blocks=1, threads=32),
    "one block per head": replace(SMALL, attention="one_block_per_head"),
    "blocks without rows": replace(SMALL, blocks=17, threads=32),
    "a load at a time": replace(SMALL, batch=1, loads=1),
    "three under way": replace(SMALL, blocks=2, batch=1, loads=3, splits=3),
    "no prefetch": replace(SMALL, prefetch_rows=0, evict_first=False),
    "long ranges": replace(SMALL, rows_per_split=7, splits=16),
}


def engine(
    spec: DecoderSpec = SPEC, options: KernelOptions = SMALL, history: int = 0, rows: int = 24
) -> EmulatedCuda:
    made = EmulatedCuda(spec, random_weights(spec, seed=3), max_positions=rows, options=options)
    made.cache.fill_random(history, seed=4)
    return made


class TestContract(BackendContract):
    backend = "cuda_persistent"

    def make(
        self, spec: DecoderSpec, weights: DecoderWeights, max_positions: int = 6
    ) -> DecodeBackend:
        return EmulatedCuda(spec, weights, max_positions=max_positions)


@pytest.mark.parametrize("position", [0, 1, 17])
@pytest.mark.parametrize(
    ("spec", "choice"),
    [*((SPEC, choice) for choice in CHOICES), (WIDE, "small"), (WIDE, "one block per head")],
    ids=[*CHOICES, "wide heads", "wide heads, one block each"],
)
def test_every_stage_is_right(spec: DecoderSpec, choice: str, position: int) -> None:
    made = engine(spec, CHOICES[choice], history=position)
    rows = random_rows(spec, 1)
    oracle = Decoding(spec, made.weights, CONTRACTS["fp32_activations"].in_fp64(), 24)
    oracle.cache.copy_from(made.cache)
    _, want = oracle.traced(rows, position)
    got = made.trace_step(rows, position)
    assert first_divergence(got, want, BOUND) is None


@pytest.mark.parametrize("position", range(6, 11))
def test_the_newest_row_wins_at_every_place_in_a_range(position: int) -> None:
    made = engine(history=position)
    made.cache.v[:] = 0
    rows = random_rows(SPEC, 1)
    trace = made.trace_step(rows, position)
    qkv = trace["qkv_proj"][0]
    assert trace["attention"][0].abs().max() > 0  # the only row whose v is not zero
    assert torch.equal(made.cache.v[0, :, position].flatten(), qkv[-SPEC.kv_size :].bfloat16())


def test_choices_agree() -> None:
    rows = random_rows(SPEC, 3)
    want = engine(history=5).run_steps(rows, 5)
    for choice in CHOICES.values():
        got = engine(options=choice, history=5).run_steps(rows, 5)
        assert_close(got.logits, want.logits, BOUND, "logits")


def test_one_launch_or_many_give_the_same_bits() -> None:
    rows = random_rows(SPEC, 5)
    want = engine().run_steps(rows, 0)
    for at_once in (1, 2, 5):
        made = engine(options=replace(SMALL, steps_per_launch=at_once))
        assert_same(made.run_steps(rows, 0), want)


def test_jitter_does_not_change_a_bit() -> None:
    rows = random_rows(SPEC, 3)
    want = engine(history=5).run_steps(rows, 5)
    for _ in range(2):
        assert_same(engine(options=replace(SMALL, jitter=True), history=5).run_steps(rows, 5), want)


def test_the_counter_may_wrap() -> None:
    rows = random_rows(SPEC, 2)
    want = engine().run_steps(rows, 0)
    made = engine()
    made._sync[[COUNTER, BASE]] = -20
    assert_same(made.run_steps(rows, 0), want)
    assert made._sync[COUNTER] == made._sync[BASE] > 0
    made.synchronize()


def test_a_block_that_waits_too_long_is_named_and_the_engine_recovers() -> None:
    rows = random_rows(SPEC, 1)
    made = engine()
    want = made.run_steps(rows, 0)
    made.synchronize()
    made.spin_limit = 0  # nobody waits for the last to arrive
    made.run_steps(rows, 0)
    with pytest.raises(
        BarrierTimeout, match=r"block \d of 3 gave up .* step 0, layer 0, after \w+"
    ):
        made.synchronize()
    made.spin_limit = 2_000_000
    assert_same(made.run_steps(rows, 0), want)
    made.synchronize()


@pytest.mark.parametrize("choice", ["small", "one block", "blocks without rows"])
def test_argmax_is_right_for_every_id(choice: str) -> None:
    made = engine(replace(SPEC, num_hidden_layers=1), CHOICES[choice])
    rows = random_rows(SPEC, 1)
    hidden = made.run_steps(rows, 0).hidden[0]
    head = made.weights.lm_head
    for token in range(SPEC.vocab_size):
        head[0] = 0
        head[0, token] = hidden.bfloat16()
        assert made.run_steps_with_argmax(rows, 0)[1].tolist() == [token]


def test_argmax_takes_the_lowest_of_equals_and_does_not_hide_nan() -> None:
    made = engine()
    rows = random_rows(SPEC, 1)
    hidden = made.run_steps(rows, 0).hidden[0].bfloat16()
    head = made.weights.lm_head
    for equal in ([0, 69], [7, 8], [23, 24, 50], [46, 47]):
        head[0] = -hidden
        head[0, equal] = hidden
        assert made.run_steps_with_argmax(rows, 0)[1].tolist() == [equal[0]]
    head[0] = 0  # zeros of both signs are equal: the first logit becomes -0 when it is rounded
    at = int((hidden.abs() - 0.3).abs().argmin())
    head[0, 0, at] = -torch.finfo(torch.bfloat16).smallest_normal * 2.0**-7 * hidden[at].sign()
    output, tokens = made.run_steps_with_argmax(rows, 0)
    assert output.logits[0, 0] < 0
    assert output.logits[0, 0].bfloat16() == 0
    assert tokens.tolist() == [0]
    head[0] = hidden
    head[0, 33] = float("nan")
    assert made.run_steps_with_argmax(rows, 0)[1].tolist() == [33]


def test_argmax_compares_logits_as_bf16() -> None:
    made = engine()
    rows = random_rows(SPEC, 1)
    hidden = made.run_steps(rows, 0).hidden[0].bfloat16()
    head = made.weights.lm_head
    head[0] = 0
    head[0, 11] = hidden
    head[0, 12] = hidden
    small = int((hidden.abs() - 0.1).abs().argmin())
    head[0, 12, small] *= 1.02  # a little more, and the same in bf16
    output, tokens = made.run_steps_with_argmax(rows, 0)
    assert output.logits[0].argmax() == 12
    assert output.logits[0].bfloat16().argmax() == 11
    assert tokens.tolist() == [11]


@pytest.mark.parametrize("at_once", [None, 1, 2])
def test_greedy_decoding_feeds_each_choice_back(at_once: int | None) -> None:
    table = random_rows(SPEC, SPEC.vocab_size + 3, seed=9)
    made = engine(options=replace(SMALL, steps_per_launch=at_once), history=2)
    output, tokens = made.run_greedy(table, first_token=72, position=2, n=5)
    fed = [72, *tokens.tolist()[:-1]]
    want, chosen = engine(history=2).run_steps_with_argmax(table[fed], 2)
    assert_same(output, want)
    assert torch.equal(tokens, chosen)
    assert tokens.tolist() == want.logits.bfloat16().argmax(-1).tolist()
    assert len(set(fed)) > 2


def test_wrong_tokens_and_tables_are_named() -> None:
    made = engine()
    table = random_rows(SPEC, SPEC.vocab_size)
    for embedding, token, n, message in (
        (table[:-1], 0, 1, "embedding: expected at least 70 rows, got 69"),
        (table[:, :-1], 0, 1, r"inputs_embeds: expected \[n, 96\]"),
        (table, 70, 1, "first_token: expected 0 to 69, got 70"),
        (table, -1, 1, "first_token"),
        (table, 0, 0, "n: expected at least 1"),
        (table, 0, 25, "position: 24"),
    ):
        with pytest.raises(ValueError, match=message):
            made.run_greedy(embedding, token, 0, n)

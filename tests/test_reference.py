"""The reference decoder: its contracts, its cache and its trace."""

from __future__ import annotations

import re

import pytest
import torch

from tests.decoding import Decoding
from triton_mega.reference import CONTRACTS, Contract, contract, decoder
from triton_mega.spec import TINY, DecoderSpec, Role
from triton_mega.testing import assert_close, first_divergence, relative_error
from triton_mega.weights import DecoderWeights, random_weights

ROLES: tuple[Role, ...] = ("talker", "code_predictor")
FP32 = CONTRACTS["fp32_activations"]

KV_FLIP_BOUND = 5e-4
"""Between two fp32 sums, one element of K or V may round to the other of two neighbours in bf16.

At TINY's shape one such element moves a stage by up to 2.5e-4, the cache's rounding as a whole by
1.5e-3.
"""


def rows_of(spec: DecoderSpec, n: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(n, spec.hidden_size, generator=generator).bfloat16()


def tiny(role: Role, rules: Contract = FP32) -> Decoding:
    spec = TINY.decoders[role]
    return Decoding(spec, random_weights(spec, seed=3), rules)


# Contracts


def test_table_agrees_with_contracts() -> None:
    lines = (contract.__doc__ or "").splitlines()
    cells = [re.split(r"\s{2,}", line) for line in lines if re.match(r"(row|[A-Z]\d)  ", line)]
    header, table = cells[0], {row[0]: row[2:] for row in cells[1:]}
    assert header[2:] == list(CONTRACTS)
    assert len(table) == len(cells) - 1 == 19
    short = {torch.bfloat16: "bf16", torch.float32: "fp32"}
    for column, rules in enumerate(CONTRACTS.values()):
        activation = short[rules.activation_dtype]
        want = dict.fromkeys(table, activation)
        want |= dict.fromkeys(("P1", "A1", "A5"), short.get(rules.operand_dtype, activation))
        want |= {"C1": short[rules.kv_dtype], "A4": short[rules.wide_dtype]}
        want["X1"] = "fp32" if rules.name == "hf_fp32" else "bf16"
        assert {row: values[column] for row, values in table.items()} == want, rules.name


@pytest.mark.parametrize("role", ROLES)
def test_contract_errors_against_fp64(role: Role) -> None:
    rows = rows_of(TINY.decoders[role], 40)
    _, oracle = tiny(role, FP32.in_fp64()).traced(rows, 0)
    _, exact = tiny(role, CONTRACTS["hf_fp32"].in_fp64()).traced(rows, 0)
    traces = {name: tiny(role, rules).traced(rows, 0)[1] for name, rules in CONTRACTS.items()}
    assert oracle["lm_head"].dtype == torch.float64
    assert first_divergence(traces["fp32_activations"], oracle, KV_FLIP_BOUND) is None
    assert first_divergence(traces["hf_fp32"], exact, 1e-5) is None
    assert first_divergence(traces["hf_bf16"], exact, 5e-2) is None
    for stage in exact:  # one rounding less at every stage
        official = relative_error(traces["hf_bf16"][stage], exact[stage])
        narrow = relative_error(traces["bf16_operands"][stage], exact[stage])
        assert 1e-4 < narrow < official, stage
    # The caches' rounding shows against pure fp64, so the bounds above can tell contracts apart.
    assert first_divergence(traces["fp32_activations"], exact, KV_FLIP_BOUND) is not None
    assert first_divergence(traces["bf16_operands"], oracle, KV_FLIP_BOUND) is not None


def test_cache_holds_k_and_v_rounded_once() -> None:
    rows = rows_of(TINY.talker, 5)
    rounded, exact = tiny("talker"), tiny("talker", CONTRACTS["hf_fp32"])
    rounded(rows, 0)
    exact(rows, 0)
    # Layer 0 reads the same rows under both contracts.
    for name in ("k", "v"):
        got, want = getattr(rounded.cache, name)[0, :, :5], getattr(exact.cache, name)[0, :, :5]
        assert torch.equal(got, want.bfloat16())


def test_only_fp32_arithmetic_widens_to_fp64() -> None:
    with pytest.raises(ValueError, match="hf_bf16"):
        CONTRACTS["hf_bf16"].in_fp64()


# Rows, cache, trace


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("name", ["hf_fp32", "fp32_activations"])
def test_rows_in_one_pass_equal_single_steps(role: Role, name: str) -> None:
    spec = TINY.decoders[role]
    rows = rows_of(spec, 19)
    at_once, one_by_one = (tiny(role, CONTRACTS[name]) for _ in range(2))
    want = at_once(rows, 0, head=spec.num_lm_heads - 1)
    steps = [one_by_one(rows[p : p + 1], p, head=spec.num_lm_heads - 1) for p in range(19)]
    bound = 1e-5 if name == "hf_fp32" else KV_FLIP_BOUND
    assert_close(torch.cat([step.hidden for step in steps]), want.hidden, bound)
    assert_close(torch.cat([step.logits for step in steps]), want.logits, bound)
    blocks = tiny(role, CONTRACTS[name])
    split = [blocks(rows[a:b], a, head=spec.num_lm_heads - 1) for a, b in ((0, 7), (7, 19))]
    assert_close(torch.cat([block.hidden for block in split]), want.hidden, bound)


def newest_wins(spec: DecoderSpec) -> DecoderWeights:
    """Weights under which every query points at its own row's key and all but ignores the rest."""
    weights = random_weights(spec, seed=5)
    q, k, _v = weights.qkv.split([spec.q_size, spec.kv_size, spec.kv_size], dim=1)
    per_head = k.unflatten(1, (spec.num_key_value_heads, spec.head_dim))
    q.copy_(per_head.repeat_interleave(spec.group_size, dim=1).flatten(1, 2))
    weights.q_norm.fill_(6.0)
    weights.k_norm.fill_(6.0)
    return weights


@pytest.mark.parametrize("role", ROLES)
def test_newest_position_wins(role: Role, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = TINY.decoders[role]
    rows = rows_of(spec, 38)
    good = Decoding(spec, newest_wins(spec), FP32)
    good(rows[:37], 0)
    _, want = good.traced(rows[37:], 37)
    newest = good.cache.v[:, :, 37].float().repeat_interleave(spec.group_size, dim=1)
    assert_close(want["attention"], newest.flatten(1), 1e-2, "attention")

    bad = Decoding(spec, newest_wins(spec), FP32)
    bad(rows[:37], 0)
    bad.cache.k[:, :, 37:], bad.cache.v[:, :, 37:] = 0.0, 0.0
    monkeypatch.setattr(decoder, "append", lambda *_: None)
    _, got = bad.traced(rows[37:], 37)
    divergence = first_divergence(got, want, 0.1)
    assert divergence is not None
    assert (divergence.layer, divergence.stage) == (0, "attention")


def test_rows_before_position_are_read_and_later_ones_are_not() -> None:
    rows = rows_of(TINY.talker, 4)
    fresh, used, holed = (tiny("talker") for _ in range(3))
    for decoding in (fresh, used, holed):
        decoding.cache.fill_random(rows=9, seed=1)  # rows from 9 on are NaN
    used.cache.k[:, :, 9:], used.cache.v[:, :, 9:] = 100.0, 100.0
    want = fresh(rows, 9)
    assert torch.isfinite(want.logits).all()
    assert torch.equal(used(rows, 9).logits, want.logits)
    holed.cache.v[0, 0, 8] = float("nan")
    assert relative_error(holed(rows, 9).logits, want.logits) == float("inf")


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("rules", [*CONTRACTS.values(), FP32.in_fp64()], ids=lambda c: c.name)
def test_trace_has_every_stage_of_the_last_row(role: Role, rules: Contract) -> None:
    spec = TINY.decoders[role]
    output, trace = tiny(role, rules).traced(rows_of(spec, 3), 0)
    layers = spec.num_hidden_layers
    assert [(stage, tuple(value.shape)) for stage, value in trace.items()] == [
        ("qkv_proj", (layers, spec.qkv_size)),
        ("attention", (layers, spec.q_size)),
        ("o_proj", (layers, spec.hidden_size)),
        ("gate_up_proj", (layers, spec.intermediate_size)),
        ("down_proj", (layers, spec.hidden_size)),
        ("final_norm", (spec.hidden_size,)),
        ("lm_head", (spec.vocab_size,)),
    ]
    assert {value.dtype for value in trace.values()} == {rules.wide_dtype}
    assert output.hidden.dtype == output.logits.dtype == rules.activation_dtype
    assert output.logits.shape == (3, spec.vocab_size)
    assert torch.equal(trace["final_norm"], output.hidden[-1].to(rules.wide_dtype))
    assert torch.equal(trace["lm_head"], output.logits[-1].to(rules.wide_dtype))


def test_head_picks_the_lm_head() -> None:
    rows = rows_of(TINY.predictor, 2)
    outputs = [tiny("code_predictor")(rows, 0, head) for head in (0, 4)]
    assert torch.equal(outputs[0].hidden, outputs[1].hidden)
    weight = random_weights(TINY.predictor, seed=3).lm_head[4].float()
    assert_close(outputs[1].logits, outputs[1].hidden @ weight.T, 1e-6)


@pytest.mark.parametrize(
    ("rows", "position", "head", "rules", "message"),
    [
        (torch.zeros(1, 95), 0, 0, FP32, "inputs_embeds: expected .n, 96., got .1, 95."),
        (torch.zeros(96), 0, 0, FP32, "inputs_embeds"),
        (torch.zeros(2, 96), 47, 0, FP32, "position: 47 . 2 rows does not fit the 48 rows"),
        (torch.zeros(1, 96), -1, 0, FP32, "position"),
        (torch.zeros(1, 96), 0, 1, FP32, "head: expected 0 to 0, got 1"),
        (torch.zeros(1, 96), 0, 0, CONTRACTS["hf_fp32"], "cache: expected torch.float32"),
    ],
)
def test_wrong_input_is_named(
    rows: torch.Tensor, position: int, head: int, rules: Contract, message: str
) -> None:
    decoding = tiny("talker")
    decoding.rules = rules
    with pytest.raises(ValueError, match=message):
        decoding(rows, position, head)

"""The reference decoder: its contracts, its cache, and the committed dumps of the official package."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch

from tests import fixtures
from tests.fixtures import Fixture
from triton_mega.reference import CONTRACTS, Contract, DecoderOutput, contract, decode, decoder
from triton_mega.rope import rope_tables
from triton_mega.spec import TINY, DecoderSpec, Role, TTSSpec
from triton_mega.state import KVCache
from triton_mega.testing import assert_close, first_divergence, relative_error
from triton_mega.weights import DecoderWeights, hash_tensor, hash_weights, random_weights

ROLES: tuple[Role, ...] = ("talker", "code_predictor")
FP32 = CONTRACTS["fp32_activations"]
Trace = dict[str, torch.Tensor]


class Decoding:
    """A cache and tables around ``decode``."""

    def __init__(
        self, spec: DecoderSpec, weights: DecoderWeights, rules: Contract, max_positions: int = 48
    ) -> None:
        self.spec, self.weights, self.rules = spec, weights, rules
        self.cache = KVCache.allocate(spec, max_positions, dtype=rules.kv_dtype)
        self.tables = rope_tables(torch.arange(max_positions), spec)

    def __call__(self, rows: torch.Tensor, position: int, head: int = 0) -> DecoderOutput:
        return self.traced(rows, position, head)[0]

    def traced(
        self, rows: torch.Tensor, position: int, head: int = 0
    ) -> tuple[DecoderOutput, Trace]:
        trace: Trace = {}
        weights, cache, rules = self.weights, self.cache, self.rules
        output = decode(
            self.spec, weights, rows, position, cache, *self.tables, rules, head=head, trace=trace
        )
        return output, trace


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
    assert first_divergence(traces["fp32_activations"], oracle, 1e-4) is None
    assert first_divergence(traces["hf_fp32"], exact, 1e-5) is None
    assert first_divergence(traces["hf_bf16"], exact, 5e-2) is None
    for stage in exact:  # one rounding less at every stage
        official = relative_error(traces["hf_bf16"][stage], exact[stage])
        narrow = relative_error(traces["bf16_operands"][stage], exact[stage])
        assert 1e-4 < narrow < official, stage
    # The caches' rounding shows against pure fp64, so the bounds above can tell contracts apart.
    assert first_divergence(traces["fp32_activations"], exact, 1e-4) is not None
    assert first_divergence(traces["bf16_operands"], oracle, 1e-4) is not None


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
    bound = 1e-5 if name == "hf_fp32" else 1e-4
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


# Dumps of the official package

FP32_BOUND = 1e-5
BF16_BOUND = {"layers": 1.5e-2, "norm": 1.5e-2, "logits": 1.5e-2}


def blocks_of(fixture: Fixture, role: Role) -> list[list[torch.Tensor]]:
    """Input rows of each request's passes: one request of the talker, one a frame of predictor."""
    if role == "talker":
        return [[fixture["rows.prefill"], *fixture["rows.steps"].split(1)]]
    return [[frame[:2], *frame[2:].split(1)] for frame in fixture["rows.predictor"]]


def reproduce(
    fixture: Fixture, spec: DecoderSpec, weights: DecoderWeights, rules: Contract
) -> dict[str, torch.Tensor]:
    """Layers, norm and logits of every pass, stacked as in the fixture."""
    got: dict[str, list[torch.Tensor]] = {"layers": [], "norm": [], "logits": []}
    for blocks in blocks_of(fixture, spec.role):
        decoding, position = Decoding(spec, weights, rules), 0
        for i, block in enumerate(blocks):
            head = i if spec.role == "code_predictor" else 0
            output, trace = decoding.traced(block, position, head)
            got["layers"].append(trace["down_proj"])
            got["norm"].append(output.hidden[-1])
            got["logits"].append(output.logits[-1])
            position += len(block)
    stacked = {what: torch.stack(values) for what, values in got.items()}
    if spec.role == "code_predictor":
        frames = len(fixture["rows.predictor"])
        stacked = {what: value.unflatten(0, (frames, -1)) for what, value in stacked.items()}
    return stacked


def assert_reproduced(
    got: dict[str, torch.Tensor], fixture: Fixture, tag: str, role: Role, bound: float
) -> None:
    """Compares every pass on its own, so that one bad pass cannot hide among good ones."""
    key = "talker" if role == "talker" else "predictor"
    for what, values in got.items():
        want = fixture[f"{tag}.{key}.{what}"][..., : values.shape[-2], :]
        axes = 1 if role == "talker" else 2
        passes = zip(values.flatten(0, axes - 1), want.flatten(0, axes - 1), strict=True)
        for i, (value, expected) in enumerate(passes):
            assert_close(value, expected, bound, f"{tag} {key} {what}, pass {i}")


def greedy_c0(logits: torch.Tensor, history: list[int], spec: TTSSpec) -> int:
    """The official processors at temperature 0: penalty 1.05, two frames at least, suppression."""
    scores = logits.float().clone()
    for token in set(history):
        scores[token] *= 1.05 if scores[token] < 0 else 1 / 1.05
    allowed = torch.arange(spec.talker.vocab_size) < spec.talker.vocab_size - 1024
    allowed[spec.codec_eos_token_id] = len(history) >= 2
    return int(scores.masked_fill(~allowed, float("-inf")).argmax())


@pytest.mark.parametrize(
    ("name", "tag", "rules"),
    [
        ("tiny", "bf16", "hf_bf16"),
        ("tiny", "fp32", "hf_fp32"),
        ("tiny_fp32", "fp32", "hf_fp32"),
    ],
)
def test_official_tiny_dump(name: str, tag: str, rules: str) -> None:
    fixture, spec = fixtures.load(name), TTSSpec.from_config(fixtures.config("tiny"))
    bound = BF16_BOUND["norm"] if tag == "bf16" else FP32_BOUND
    results = {}
    for role in ROLES:
        weights = hash_weights(spec.decoders[role])
        results[role] = reproduce(fixture, spec.decoders[role], weights, CONTRACTS[rules])
        assert_reproduced(results[role], fixture, tag, role, bound)
    if (name, tag) == ("tiny", "fp32"):
        return  # its codes were chosen in bf16
    history = fixture["sampled_c0"].tolist()
    chosen = [
        greedy_c0(logits, history[:i], spec)
        for i, logits in enumerate(results["talker"]["logits"])
    ]
    assert chosen == history
    assert torch.equal(results["code_predictor"]["logits"].argmax(-1), fixture["codes"][:, 1:])
    assert fixture["codes"][:, 0].tolist() == history[:-1]


@pytest.mark.parametrize("name", ["q_norm", "k_norm", "post_attention_norm", "down", "lm_head"])
def test_dump_comparison_fails_on_a_fault(name: str) -> None:
    fixture, spec = fixtures.load("tiny_fp32"), TTSSpec.from_config(fixtures.config("tiny")).talker
    good = hash_weights(spec)
    changed = getattr(good, name).clone()
    changed.view(-1)[5] += 0.25
    got = reproduce(fixture, spec, replace(good, **{name: changed}), CONTRACTS["hf_fp32"])
    with pytest.raises(AssertionError, match="fp32 talker"):
        assert_reproduced(got, fixture, "fp32", "talker", FP32_BOUND)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int64])
def test_fixture_round_trip(dtype: torch.dtype, tmp_path) -> None:
    tensor = torch.arange(6).view(2, 3).to(dtype)
    fixtures.save(Fixture({"a": tensor}, {"made": "here"}), "x", tmp_path)
    back = fixtures.load("x", tmp_path)
    assert back["a"].dtype == dtype and torch.equal(back["a"], tensor)
    assert back.meta == {"made": "here"}

"""The reference against the committed dumps of the official package, which need no qwen-tts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests import fixtures
from tests.decoding import Decoding
from tests.fixtures import Fixture
from triton_mega.reference import CONTRACTS, Contract
from triton_mega.spec import DecoderSpec, Role, TTSSpec
from triton_mega.testing import assert_close, relative_error
from triton_mega.weights import DecoderWeights, hash_tensor, hash_weights

ROLES: tuple[Role, ...] = ("talker", "code_predictor")
KEYS = {"talker": "talker", "code_predictor": "predictor"}
TINY_SPEC = TTSSpec.from_config(fixtures.config("tiny"))
FULL_SPEC = TTSSpec.from_config(fixtures.config("1.7B-CustomVoice"))
RULES = {"bf16": CONTRACTS["hf_bf16"], "fp32": CONTRACTS["hf_fp32"]}

FP32_BOUND = 1e-5
BF16_BOUND = 2.0
"""Times the official bf16's own error against official fp32 in the same pass.

The bits agree on the machine that made the dumps; another CPU may sum bf16 products in another
order, and then two equally good results can stand on opposite sides of the fp32 one.
"""
BF16_TIE_ULP = 4
"""On another CPU, a bf16 id may differ only where the dump has the two logits this close."""

Result = dict[str, torch.Tensor]


def reproduce(
    fixture: Fixture, spec: DecoderSpec, weights: DecoderWeights, rules: Contract
) -> Result:
    """Layers, norm and logits of every pass's last row, stacked as in the fixture."""
    got: dict[str, list[torch.Tensor]] = {"layers": [], "norm": [], "logits": []}
    prefill, *frames = requests(fixture, spec.role)
    for blocks in (prefill, *frames):
        decoding, position = Decoding(spec, weights, rules), 0
        for i, block in enumerate(blocks):
            output, trace = decoding.traced(block, position, i % spec.num_lm_heads)
            got["layers"].append(trace["down_proj"])
            got["norm"].append(output.hidden[-1])
            got["logits"].append(output.logits[-1])
            position += len(block)
    stacked = {what: torch.stack(values) for what, values in got.items()}
    if spec.role == "talker":
        return stacked
    frame_count = 1 + len(frames)
    return {what: value.unflatten(0, (frame_count, -1)) for what, value in stacked.items()}


def requests(fixture: Fixture, role: Role) -> list[list[torch.Tensor]]:
    """Input rows of each pass, by request: the talker has one, the predictor one a frame."""
    if role == "talker":
        return [[fixture["rows.prefill"], *fixture["rows.steps"].split(1)]]
    return [[frame[:2], *frame[2:].split(1)] for frame in fixture["rows.predictor"]]


def passes(values: torch.Tensor, role: Role, what: str) -> Iterator[torch.Tensor]:
    """Every pass on its own, so that one bad pass cannot hide among good ones."""
    kept = 2 if what == "layers" else 1
    assert values.dim() == kept + (1 if role == "talker" else 2)
    yield from values.flatten(0, -kept - 1)


def assert_reproduced(got: Result, fixture: Fixture, tag: str, role: Role) -> None:
    """Compares with what the official package gave in dtype ``tag``, pass by pass."""
    for what, values in got.items():
        key = f"{KEYS[role]}.{what}"
        layers = values.shape[-2] if what == "layers" else None
        dumped = [
            [
                want[:layers] if layers else want
                for want in passes(fixture[f"{t}.{key}"], role, what)
            ]
            for t in (tag, "fp32")
        ]
        for i, (value, want, exact) in enumerate(
            zip(passes(values, role, what), *dumped, strict=True)
        ):
            bound = FP32_BOUND if tag == "fp32" else BF16_BOUND * relative_error(want, exact)
            assert_close(value, want, bound, f"{tag}.{key}, pass {i}")


def assert_same_ids(got: torch.Tensor, dumped: torch.Tensor, ids: list[int]) -> None:
    """Checks the greedy ids of score rows: exact in fp32, exact but for close ties in bf16."""
    assert dumped.argmax(-1).tolist() == ids
    ulp = BF16_TIE_ULP * torch.finfo(dumped.dtype).eps if dumped.dtype == torch.bfloat16 else 0.0
    for row, (score, want) in enumerate(zip(got, dumped.float(), strict=True)):
        best = want.max()
        assert want[int(score.argmax())] >= best - ulp * best.abs(), f"row {row}: wrong id"


def greedy_scores(logits: torch.Tensor, history: list[int]) -> torch.Tensor:
    """The tiny talker's scores as the official processors leave them at temperature 0.

    A penalty of 1.05 on earlier ids, at least two frames, the last 1024 ids suppressed but EOS.
    """
    rows = logits.clone()
    allowed = torch.arange(rows.shape[1]) < rows.shape[1] - 1024
    for step, row in enumerate(rows):
        for token in set(history[:step]):
            row[token] *= 1.05 if row[token] < 0 else 1 / 1.05
        allowed[TINY_SPEC.codec_eos_token_id] = step >= 2
        row.masked_fill_(~allowed, float("-inf"))
    return rows


@pytest.mark.parametrize(
    ("name", "tag"), [("tiny", "bf16"), ("tiny", "fp32"), ("tiny_fp32", "fp32")]
)
def test_tiny_dump_is_reproduced(name: str, tag: str) -> None:
    fixture = fixtures.load(name)
    results: dict[Role, Result] = {}
    for role in ROLES:
        spec = TINY_SPEC.decoders[role]
        results[role] = reproduce(fixture, spec, hash_weights(spec), RULES[tag])
        assert_reproduced(results[role], fixture, tag, role)
    if (name, tag) == ("tiny", "fp32"):
        return  # rows made from bf16 codes; fp32 would have chosen others
    history = fixture["sampled_c0"].tolist()
    rows = [
        greedy_scores(logits, history)
        for logits in (results["talker"]["logits"], fixture[f"{tag}.talker.logits"])
    ]
    assert_same_ids(*rows, history)
    assert fixture["codes"][:, 0].tolist() == history[:-1]
    got = results["code_predictor"]["logits"].flatten(0, 1)
    dumped = fixture[f"{tag}.predictor.logits"].flatten(0, 1)
    assert_same_ids(got, dumped, fixture["codes"][:, 1:].flatten().tolist())


@pytest.mark.parametrize("tag", ["bf16", "fp32"])
@pytest.mark.parametrize("name", ["q_norm", "k_norm", "post_attention_norm", "down", "lm_head"])
def test_a_changed_weight_is_seen(name: str, tag: str) -> None:
    fixture, spec = fixtures.load("tiny"), TINY_SPEC.talker
    good = hash_weights(spec)
    changed = getattr(good, name).clone()
    changed.view(-1)[5] += 2.0
    got = reproduce(fixture, spec, replace(good, **{name: changed}), RULES[tag])
    with pytest.raises(AssertionError, match=f"{tag}.talker"):
        assert_reproduced(got, fixture, tag, "talker")


def test_a_wrong_id_is_seen() -> None:
    dumped = torch.tensor([[0.0, 2.0, 1.0], [3.0, 0.0, 1.0]])
    assert_same_ids(dumped, dumped, [1, 0])
    with pytest.raises(AssertionError):
        assert_same_ids(dumped, dumped, [1, 2])
    with pytest.raises(AssertionError, match="row 1"):
        assert_same_ids(torch.tensor([[0.0, 2.0, 1.0], [0.0, 0.0, 1.0]]), dumped, [1, 0])


@pytest.mark.slow
@pytest.mark.parametrize(("role", "layers"), [("code_predictor", 5), ("talker", 4)])
@pytest.mark.parametrize("tag", ["bf16", "fp32"])
def test_full_shape_dump_is_reproduced(role: Role, layers: int, tag: str) -> None:
    """The first layers of the 1.7B talker (each needs 50 M hash weights), and all the predictor."""
    fixture, spec = fixtures.load("full_1p7b"), FULL_SPEC.decoders[role]
    weights = hash_weights(replace(spec, num_hidden_layers=layers))
    got = reproduce(fixture, replace(spec, num_hidden_layers=layers), weights, RULES[tag])
    if layers < spec.num_hidden_layers:
        assert_reproduced({"layers": got["layers"]}, fixture, tag, role)
        return
    assert_reproduced(got, fixture, tag, role)
    dumped = fixture[f"{tag}.predictor.logits"][0]
    assert_same_ids(got["logits"][0], dumped, dumped.argmax(-1).tolist())


def test_full_shape_dump_is_on_one_set_of_rows() -> None:
    """Both dtypes saw bf16 rows, the bf16 ids are the official ones, the errors are recorded."""
    fixture = fixtures.load("full_1p7b")
    assert fixture["rows.prefill"].dtype == torch.bfloat16
    assert fixture["rows.prefill"].shape == (23, 2048)
    assert fixture["bf16.talker.layers"].shape == fixture["fp32.talker.layers"].shape
    ids = fixture["bf16.predictor.logits"][0].argmax(-1)
    assert torch.equal(ids, fixture["codes"][0, 1:])
    recorded = fixture.meta["official_bf16_error"]["talker.norm"]
    pairs = zip(fixture["bf16.talker.norm"], fixture["fp32.talker.norm"], strict=True)
    assert recorded == pytest.approx([relative_error(a, b) for a, b in pairs], abs=1e-6)
    assert all(1e-3 < error < 3e-2 for error in recorded)


@pytest.mark.parametrize(
    ("name", "shape", "values", "total"),
    [
        (
            "talker.model.layers.3.input_layernorm.weight",
            (2048,),
            {0: 0.8715216517448425, 2047: 1.2737303972244263},
            2042.7895984649658,
        ),
        (
            "talker.code_predictor.lm_head.14.weight",
            (2048, 1024),
            {0: 0.011453092098236084, 2097151: -0.03439841791987419},
            4.684750496721925,
        ),
        (
            "talker.code_predictor.small_to_mtp_projection.bias",
            (1024,),
            {0: 0.07459870725870132, 1023: 0.08412736654281616},
            -4.61465198136284,
        ),
        (
            "talker.model.codec_embedding.weight",
            (3072, 2048),
            {0: -0.2832794189453125, 6291455: 0.31495732069015503},
            -287.22260946035385,
        ),
    ],
)
def test_hash_tensor_has_its_golden_values(
    name: str, shape: tuple[int, ...], values: dict[int, float], total: float
) -> None:
    """Values of an independent numpy version of the same integer function, in uint32 arithmetic."""
    flat = hash_tensor(name, shape, dtype=torch.float32).flatten()
    assert {i: flat[i].item() for i in values} == values
    assert flat.double().sum().item() == pytest.approx(total, rel=1e-9)
    assert torch.equal(hash_tensor(name, shape).flatten(), flat.bfloat16())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int64])
def test_fixture_round_trip(dtype: torch.dtype, tmp_path: Path) -> None:
    tensor = torch.arange(6).view(2, 3).to(dtype)
    fixtures.save(Fixture({"a": tensor}, {"made": "here"}), "x", tmp_path)
    back = fixtures.load("x", tmp_path)
    assert back["a"].dtype == dtype
    assert torch.equal(back["a"], tensor)
    assert back.meta == {"made": "here"}

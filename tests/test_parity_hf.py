"""The reference against the official package, in one process: bit for bit, in bf16 and in fp32."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests import fixtures, hf_official
from tests.hf_official import Generation, Pass
from triton_mega.reference import CONTRACTS, Contract, decode
from triton_mega.rope import rope_tables
from triton_mega.spec import DecoderSpec, Role, TTSSpec
from triton_mega.state import KVCache
from triton_mega.testing import assert_close
from triton_mega.weights import DecoderWeights, hash_weights

pytestmark = pytest.mark.hf

CONFIG = fixtures.config("tiny")
SPEC = TTSSpec.from_config(CONFIG)
ROLES: tuple[Role, ...] = ("talker", "code_predictor")
TEXT_IDS = (300, 290, 291, 5, 17, 29, 8, 101, 44, 301, 291, 300, 290, 291)
SAME_BITS = 0.0


@pytest.fixture(scope="module", params=["hf_bf16", "hf_fp32"])
def official(request: pytest.FixtureRequest) -> Iterator[tuple[Any, Contract]]:
    contract = CONTRACTS[request.param]
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield hf_official.build(CONFIG, contract.activation_dtype), contract
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def spoken(official: tuple[Any, Contract]) -> Generation:
    return hf_official.generate(official[0], TEXT_IDS, frames=4)


def assert_same_bits(
    passes: list[Pass],
    spec: DecoderSpec,
    weights: DecoderWeights,
    contract: Contract,
    positions: torch.Tensor | None = None,
) -> KVCache:
    """Decodes each pass's rows; a pass of several rows starts a new request. Returns the cache."""
    cos, sin = rope_tables(torch.arange(64) if positions is None else positions, spec)
    position = 0
    for i, wanted in enumerate(passes):
        if i == 0 or len(wanted.embeds) > 1:
            cache, position = KVCache.allocate(spec, 64, dtype=contract.kv_dtype), 0
        trace: dict[str, torch.Tensor] = {}
        output = decode(
            spec,
            weights,
            wanted.embeds,
            position,
            cache,
            cos,
            sin,
            contract,
            head=wanted.head,
            trace=trace,
        )
        for layer, want in enumerate(wanted.layers[:, -1]):
            assert_close(trace["down_proj"][layer], want, SAME_BITS, f"pass {i}, layer {layer}")
        assert_close(output.hidden, wanted.norm, SAME_BITS, f"pass {i}, norm")
        assert_close(output.logits, wanted.logits, SAME_BITS, f"pass {i}, logits")
        position += len(wanted.embeds)
    return cache


@pytest.mark.parametrize("role", ROLES)
def test_generate_has_the_same_bits(
    official: tuple[Any, Contract], spoken: Generation, role: Role
) -> None:
    spec, passes = SPEC.decoders[role], spoken.of(role)
    assert len(passes) == (5 if role == "talker" else 4 * 15)
    assert {p.head for p in passes} == set(range(spec.num_lm_heads))
    assert_same_bits(passes, spec, hash_weights(spec), official[1])


@pytest.mark.parametrize("role", ROLES)
def test_one_changed_weight_is_seen(
    official: tuple[Any, Contract], spoken: Generation, role: Role
) -> None:
    spec = SPEC.decoders[role]
    weights = hash_weights(spec)
    changed = weights.k_norm.clone()
    changed[-1, 0] *= 1.5
    with pytest.raises(AssertionError, match="pass 0, layer"):
        assert_same_bits(spoken.of(role), spec, replace(weights, k_norm=changed), official[1])


@pytest.mark.parametrize("role", ROLES)
def test_cache_has_the_same_bits_in_every_row(official: tuple[Any, Contract], role: Role) -> None:
    model, contract = official
    spec = SPEC.decoders[role]
    rows = torch.randn(15, spec.hidden_size, generator=torch.Generator().manual_seed(4))
    blocks = [block.to(contract.activation_dtype) for block in rows.split([11, 1, 1, 1, 1])]
    passes, theirs = hf_official.replay(model, role, blocks)
    ours = assert_same_bits(passes, spec, hash_weights(spec), contract)
    for layer in range(spec.num_hidden_layers):
        assert_close(ours.k[layer, :, :15], theirs.layers[layer].keys[0], SAME_BITS)
        assert_close(ours.v[layer, :, :15], theirs.layers[layer].values[0], SAME_BITS)


def test_unequal_position_axes_have_the_same_bits(official: tuple[Any, Contract]) -> None:
    model, contract = official
    spec = SPEC.talker
    generator = torch.Generator().manual_seed(6)
    positions = torch.randint(0, 500, (3, 9), generator=generator)
    rows = torch.randn(9, spec.hidden_size, generator=generator).to(contract.activation_dtype)
    blocks = list(rows.split([6, 1, 1, 1]))
    passes, _ = hf_official.replay(model, "talker", blocks, positions=positions)
    weights = hash_weights(spec)
    padded = torch.cat((positions, torch.zeros(3, 55, dtype=torch.int64)), dim=1)
    assert_same_bits(passes, spec, weights, contract, padded)
    with pytest.raises(AssertionError, match="pass 0, layer 0"):
        assert_same_bits(passes, spec, weights, contract, padded[[1, 0, 2]])


@pytest.mark.slow
@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("name", ["hf_bf16", "hf_fp32"])
def test_released_widths_have_the_same_bits(name: str, role: Role) -> None:
    """The widths of the 0.6B model, whose query width is not its hidden size, in two layers."""
    config = fixtures.config("0.6B-CustomVoice")
    config["talker_config"] |= {"num_hidden_layers": 2, "text_vocab_size": 152}
    config["talker_config"]["code_predictor_config"]["num_hidden_layers"] = 2
    contract, spec = CONTRACTS[name], TTSSpec.from_config(config).decoders[role]
    model = hf_official.build(config, contract.activation_dtype)
    rows = torch.randn(12, spec.hidden_size, generator=torch.Generator().manual_seed(8))
    blocks = [block.to(contract.activation_dtype) for block in rows.split([10, 1, 1])]
    passes, _ = hf_official.replay(model, role, blocks)
    assert_same_bits(passes, spec, hash_weights(spec), contract)


@pytest.mark.parametrize(("name", "tag"), [("tiny", "bf16"), ("tiny_fp32", "fp32")])
def test_committed_dump_is_what_the_package_computes(name: str, tag: str) -> None:
    fixture = fixtures.load(name)
    dtype = torch.bfloat16 if tag == "bf16" else torch.float32
    model = hf_official.build(CONFIG, dtype)
    blocks = [fixture["rows.prefill"], *fixture["rows.steps"].split(1)]
    passes, _ = hf_official.replay(model, "talker", blocks)
    for i, each in enumerate(passes):
        bound = 1.5e-2 if tag == "bf16" else 1e-5
        assert_close(each.norm[-1], fixture[f"{tag}.talker.norm"][i], bound, f"pass {i}")
        assert_close(each.logits[-1], fixture[f"{tag}.talker.logits"][i], bound, f"pass {i}")

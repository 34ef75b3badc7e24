"""Specs from the published config.json files: every field, and no default for any of them."""

from __future__ import annotations

import copy
import hashlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.fixtures import HERE, config
from triton_mega.spec import TINY, TTSSpec

PUBLISHED = {
    "1.7B-CustomVoice": "17a07f527a1c",
    "1.7B-VoiceDesign": "aecd2cc4c1fe",
    "1.7B-Base": "b4f01752d15a",
    "0.6B-CustomVoice": "81aca2b6fac3",
    "0.6B-Base": "2e714c787c8e",
}
LANGUAGES = {
    "chinese": 2055,
    "english": 2050,
    "german": 2053,
    "italian": 2070,
    "portuguese": 2071,
    "spanish": 2054,
    "japanese": 2058,
    "korean": 2064,
    "french": 2061,
    "russian": 2069,
}
READ = {
    "config": (
        "tts_model_size tts_model_type im_start_token_id im_end_token_id assistant_token_id "
        "tts_pad_token_id tts_bos_token_id tts_eos_token_id talker_config"
    ),
    "talker_config": (
        "hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads "
        "head_dim vocab_size max_position_embeddings rms_norm_eps rope_theta rope_scaling "
        "use_sliding_window num_code_groups text_hidden_size text_vocab_size codec_eos_token_id "
        "codec_pad_id codec_bos_id codec_think_id codec_nothink_id codec_think_bos_id "
        "codec_think_eos_id codec_language_id spk_id spk_is_dialect code_predictor_config"
    ),
    "code_predictor_config": (
        "hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads "
        "head_dim vocab_size max_position_embeddings rms_norm_eps rope_theta rope_scaling "
        "use_sliding_window num_code_groups"
    ),
    "talker_config.rope_scaling": "rope_type interleaved mrope_section",
}


def part(tree: dict[str, Any], where: str) -> dict[str, Any]:
    """Returns the section of a config that an error message calls ``where``."""
    talker = tree["talker_config"]
    return {
        "config": tree,
        "talker_config": talker,
        "code_predictor_config": talker["code_predictor_config"],
        "talker_config.rope_scaling": talker["rope_scaling"],
    }[where]


@pytest.mark.parametrize(("name", "digest"), PUBLISHED.items())
def test_published_config_is_read_whole(name: str, digest: str) -> None:
    path = HERE / "configs" / f"{name}.config.json"
    assert hashlib.sha256(path.read_bytes()).hexdigest().startswith(digest)
    spec = TTSSpec.from_json(path)
    large = name.startswith("1.7B")
    assert (spec.talker.hidden_size, spec.talker.intermediate_size) == (
        (2048, 6144) if large else (1024, 3072)
    )
    assert spec.model_size == ("1b7" if large else "0b6")
    kinds = {"CustomVoice": "custom_voice", "VoiceDesign": "voice_design", "Base": "base"}
    assert spec.model_type == kinds[name.split("-")[1]]
    assert spec.has_projection == large
    for decoder, layers, ffn in ((spec.talker, 28, None), (spec.predictor, 5, 3072)):
        assert decoder.num_hidden_layers == layers
        assert (decoder.num_attention_heads, decoder.num_key_value_heads) == (16, 8)
        assert (decoder.head_dim, decoder.group_size) == (128, 2)
        assert (decoder.q_size, decoder.kv_size, decoder.qkv_size) == (2048, 1024, 4096)
        assert (decoder.rms_norm_eps, decoder.rope_theta) == (1e-6, 1e6)
        assert ffn in (None, decoder.intermediate_size)
    assert spec.predictor.hidden_size == 1024
    assert (spec.talker.vocab_size, spec.predictor.vocab_size) == (3072, 2048)
    assert (spec.talker.num_lm_heads, spec.predictor.num_lm_heads) == (1, 15)
    assert (spec.talker.mrope_section, spec.predictor.mrope_section) == ((24, 20, 20), None)
    assert spec.talker.max_position_embeddings == 32768
    assert spec.predictor.max_position_embeddings == 65536
    assert (spec.num_code_groups, spec.text_hidden_size, spec.text_vocab_size) == (16, 2048, 151936)
    assert (spec.im_start_token_id, spec.im_end_token_id) == (151644, 151645)
    assert spec.assistant_token_id == 77091
    assert (spec.tts_pad_token_id, spec.tts_bos_token_id, spec.tts_eos_token_id) == (
        151671,
        151672,
        151673,
    )
    assert (spec.codec_pad_id, spec.codec_bos_id, spec.codec_eos_token_id) == (2148, 2149, 2150)
    assert (spec.codec_think_id, spec.codec_nothink_id) == (2154, 2155)
    assert (spec.codec_think_bos_id, spec.codec_think_eos_id) == (2156, 2157)
    custom = name.endswith("CustomVoice")
    dialects = {"beijing_dialect": 2074, "sichuan_dialect": 2062} if custom else {}
    assert spec.codec_language_id == LANGUAGES | dialects
    assert len(spec.spk_id) == len(spec.spk_is_dialect) == (9 if custom else 0)
    if custom:
        assert (spec.spk_id["ryan"], spec.spk_id["eric"]) == (3061, 2875)
        assert spec.spk_is_dialect["eric"] == "sichuan_dialect"
        assert spec.spk_is_dialect["ryan"] is False


@pytest.mark.parametrize(
    ("where", "key"), [(where, key) for where, keys in READ.items() for key in keys.split()]
)
def test_missing_key_is_named_never_defaulted(where: str, key: str) -> None:
    tree = config("1.7B-CustomVoice")
    del part(tree, where)[key]
    with pytest.raises(ValueError, match=rf"{where}\.{key}: missing"):
        TTSSpec.from_config(tree)


def test_every_field_follows_the_file() -> None:
    """Changing any number in the file changes the spec: nothing is taken from elsewhere."""
    tree = config("1.7B-CustomVoice")
    base = TTSSpec.from_config(tree)
    fixed = {"use_sliding_window", "rope_type", "interleaved", "rope_scaling", "mrope_section"}
    for where, keys in READ.items():
        for key in set(keys.split()) - fixed:
            changed = copy.deepcopy(tree)
            section = part(changed, where)
            if isinstance(section[key], dict):
                if key.endswith("config"):
                    continue
                section[key] = {"somebody": 7}
            elif isinstance(section[key], str):
                section[key] += "x"
            else:
                section[key] *= 2
            if key == "num_code_groups":
                part(changed, "talker_config")[key] = 32
                part(changed, "code_predictor_config")[key] = 32
            if key == "head_dim" and where == "talker_config":
                section["rope_scaling"]["mrope_section"] = [48, 40, 40]
            assert TTSSpec.from_config(changed) != base, f"{where}.{key}"


@pytest.mark.parametrize(
    ("where", "key", "value", "message"),
    [
        ("talker_config", "use_sliding_window", True, "talker_config.use_sliding_window: expected"),
        ("talker_config", "hidden_act", "gelu", "talker_config: expected hidden_act silu"),
        ("code_predictor_config", "attention_bias", True, "without attention_bias"),
        ("code_predictor_config", "num_code_groups", 8, "expected 16, got 8"),
        (
            "talker_config",
            "num_key_value_heads",
            5,
            r"talker\.num_attention_heads: expected a mult",
        ),
        ("talker_config.rope_scaling", "rope_type", "yarn", "rope_type: expected 'default'"),
        ("talker_config.rope_scaling", "interleaved", False, "interleaved: expected True"),
        ("talker_config.rope_scaling", "mrope_section", [24, 20, 19], r"talker\.mrope_section"),
    ],
)
def test_what_is_not_computed_is_refused(where: str, key: str, value: Any, message: str) -> None:
    tree = config("1.7B-CustomVoice")
    part(tree, where)[key] = value
    with pytest.raises(ValueError, match=message):
        TTSSpec.from_config(tree)


def test_directory_stands_for_its_config(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config("0.6B-Base")))
    assert TTSSpec.from_json(tmp_path) == TTSSpec.from_config(config("0.6B-Base"))
    assert TTSSpec.from_json(str(tmp_path)).decoders["talker"].hidden_size == 1024


def test_tiny_takes_no_shape_for_granted() -> None:
    for decoder in TINY.decoders.values():
        assert decoder.q_size == decoder.num_attention_heads * decoder.head_dim
        assert replace(decoder) == decoder
        assert decoder.hidden_size & (decoder.hidden_size - 1)
        assert decoder.vocab_size & (decoder.vocab_size - 1)
    assert TINY.talker.group_size == 3
    assert TINY.has_projection
    assert TINY.predictor.num_lm_heads == TINY.num_code_groups - 1
    ids = [*TINY.spk_id.values(), *TINY.codec_language_id.values(), TINY.codec_think_eos_id]
    assert max(ids) < TINY.talker.vocab_size
    assert TINY.tts_eos_token_id < TINY.text_vocab_size

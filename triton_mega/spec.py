"""Shapes and constants of a Qwen3-TTS checkpoint, read from its ``config.json``.

Every field comes from the file: the official configuration classes carry defaults that are wrong
for every released model, so a missing key is an error here. Knows nothing about weights, devices
or kernels.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

Role = Literal["talker", "code_predictor"]


@dataclass(frozen=True)
class DecoderSpec:
    """One Qwen3-style decoder stack: the talker, or the code predictor.

    ``num_lm_heads`` is 1 for the talker (the codec head) and ``num_code_groups - 1`` for the code
    predictor. ``mrope_section`` is None where the rotary positions have a single axis.
    """

    role: Role
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    num_lm_heads: int
    rms_norm_eps: float
    rope_theta: float
    mrope_section: tuple[int, int, int] | None
    max_position_embeddings: int

    def __post_init__(self) -> None:
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"{self.role}.num_attention_heads: expected a multiple of num_key_value_heads "
                f"({self.num_key_value_heads}), got {self.num_attention_heads}"
            )
        if self.mrope_section is not None and sum(self.mrope_section) * 2 != self.head_dim:
            raise ValueError(
                f"{self.role}.mrope_section: expected a sum of head_dim / 2 = "
                f"{self.head_dim // 2}, got {list(self.mrope_section)}"
            )

    @property
    def q_size(self) -> int:
        """Width of all query heads together, HQ * HD (not hidden_size in the 0.6B model)."""
        return self.num_attention_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Width of all key (or value) heads together, HKV * HD."""
        return self.num_key_value_heads * self.head_dim

    @property
    def qkv_size(self) -> int:
        """Rows of the stacked q, k and v projection."""
        return self.q_size + 2 * self.kv_size

    @property
    def group_size(self) -> int:
        """Query heads that read one key/value head."""
        return self.num_attention_heads // self.num_key_value_heads


@dataclass(frozen=True)
class TTSSpec:
    """A whole checkpoint: talker, code predictor, and the ids that prompts are built from."""

    model_size: str
    model_type: str
    talker: DecoderSpec
    predictor: DecoderSpec
    num_code_groups: int
    text_hidden_size: int
    text_vocab_size: int
    im_start_token_id: int
    im_end_token_id: int
    assistant_token_id: int
    tts_pad_token_id: int
    tts_bos_token_id: int
    tts_eos_token_id: int
    codec_pad_id: int
    codec_bos_id: int
    codec_eos_token_id: int
    codec_think_id: int
    codec_nothink_id: int
    codec_think_bos_id: int
    codec_think_eos_id: int
    codec_language_id: Mapping[str, int]
    spk_id: Mapping[str, int]
    spk_is_dialect: Mapping[str, str | bool]

    @property
    def has_projection(self) -> bool:
        """True where the predictor's inputs pass through small_to_mtp_projection (1.7B)."""
        return self.talker.hidden_size != self.predictor.hidden_size

    @property
    def decoders(self) -> dict[Role, DecoderSpec]:
        """The two decoder stacks by role."""
        return {"talker": self.talker, "code_predictor": self.predictor}

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> TTSSpec:
        """Reads the mapping that a checkpoint's ``config.json`` holds.

        Raises:
            ValueError: a key is missing, or asks for something the decoder does not compute.
        """
        talker = _get(config, "talker_config", "config")
        predictor = _get(talker, "code_predictor_config", "talker_config")
        groups = _get(talker, "num_code_groups", "talker_config")
        _expect(predictor, "num_code_groups", groups, "code_predictor_config")
        top = ("im_start", "im_end", "assistant", "tts_pad", "tts_bos", "tts_eos")
        codec = ("pad", "bos", "think", "nothink", "think_bos", "think_eos")
        return cls(
            model_size=_get(config, "tts_model_size", "config"),
            model_type=_get(config, "tts_model_type", "config"),
            talker=_decoder("talker", talker, "talker_config", 1),
            predictor=_decoder("code_predictor", predictor, "code_predictor_config", groups - 1),
            num_code_groups=groups,
            text_hidden_size=_get(talker, "text_hidden_size", "talker_config"),
            text_vocab_size=_get(talker, "text_vocab_size", "talker_config"),
            **{f"{key}_token_id": _get(config, f"{key}_token_id", "config") for key in top},
            **{
                f"codec_{key}_id": _get(talker, f"codec_{key}_id", "talker_config") for key in codec
            },
            codec_eos_token_id=_get(talker, "codec_eos_token_id", "talker_config"),
            codec_language_id=dict(_get(talker, "codec_language_id", "talker_config") or {}),
            spk_id=dict(_get(talker, "spk_id", "talker_config") or {}),
            spk_is_dialect=dict(_get(talker, "spk_is_dialect", "talker_config") or {}),
        )

    @classmethod
    def from_json(cls, path: str | Path) -> TTSSpec:
        """Reads a ``config.json`` file, or the one in a checkpoint directory."""
        path = Path(path)
        path = path / "config.json" if path.is_dir() else path
        with path.open(encoding="utf-8") as file:
            return cls.from_config(json.load(file))


def _get(config: Mapping[str, Any], key: str, where: str) -> Any:
    if key not in config:
        raise ValueError(f"{where}.{key}: missing; not a Qwen3-TTS 12Hz config.json?")
    return config[key]


def _expect(config: Mapping[str, Any], key: str, value: Any, where: str) -> None:
    got = _get(config, key, where)
    if got != value:
        raise ValueError(f"{where}.{key}: expected {value!r}, got {got!r}; not supported")


def _decoder(role: Role, config: Mapping[str, Any], where: str, num_lm_heads: int) -> DecoderSpec:
    _expect(config, "use_sliding_window", False, where)
    if config.get("hidden_act", "silu") != "silu" or config.get("attention_bias", False):
        raise ValueError(f"{where}: expected hidden_act silu without attention_bias")
    scaling = _get(config, "rope_scaling", where)
    section = None
    if scaling is not None:
        _expect(scaling, "rope_type", "default", f"{where}.rope_scaling")
        _expect(scaling, "interleaved", True, f"{where}.rope_scaling")
        section = tuple(_get(scaling, "mrope_section", f"{where}.rope_scaling"))
    sizes = (
        "hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads "
        "head_dim vocab_size max_position_embeddings"
    ).split()
    return DecoderSpec(
        role=role,
        num_lm_heads=num_lm_heads,
        rms_norm_eps=float(_get(config, "rms_norm_eps", where)),
        rope_theta=float(_get(config, "rope_theta", where)),
        mrope_section=section,
        **{key: int(_get(config, key, where)) for key in sizes},
    )


TINY = TTSSpec(
    model_size="tiny",
    model_type="custom_voice",
    talker=DecoderSpec(
        role="talker",
        hidden_size=96,
        intermediate_size=160,
        num_hidden_layers=3,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=16,
        vocab_size=70,
        num_lm_heads=1,
        rms_norm_eps=1e-6,
        rope_theta=1e6,
        mrope_section=(4, 2, 2),
        max_position_embeddings=512,
    ),
    predictor=DecoderSpec(
        role="code_predictor",
        hidden_size=48,
        intermediate_size=80,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        vocab_size=50,
        num_lm_heads=5,
        rms_norm_eps=1e-6,
        rope_theta=1e6,
        mrope_section=None,
        max_position_embeddings=64,
    ),
    num_code_groups=6,
    text_hidden_size=40,
    text_vocab_size=270,
    im_start_token_id=256,
    im_end_token_id=257,
    assistant_token_id=258,
    tts_pad_token_id=259,
    tts_bos_token_id=260,
    tts_eos_token_id=261,
    codec_pad_id=50,
    codec_bos_id=51,
    codec_eos_token_id=52,
    codec_think_id=53,
    codec_nothink_id=54,
    codec_think_bos_id=55,
    codec_think_eos_id=56,
    codec_language_id={"english": 57, "chinese": 58, "sichuan_dialect": 59},
    spk_id={"ryan": 69, "eric": 68},
    spk_is_dialect={"ryan": False, "eric": "sichuan_dialect"},
)
"""Odd on purpose (no power of two but head_dim): finds a shape that a kernel took for granted."""

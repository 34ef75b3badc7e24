"""The official ``qwen-tts`` decoder modules, run step by step on our packed weights.

Written against qwen-tts 0.1.1 on transformers 4.57.3. Both are imported when a backend is asked
for, never at import.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.machinery
import importlib.util
import io
import sys
import types
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from triton_mega.backends import BackendUnavailable, DecodeBackend, StepOutput
from triton_mega.backends.torch_common import cache_version
from triton_mega.spec import DecoderSpec
from triton_mega.weights import DecoderWeights, layer_parts

CONFIG_FIELDS = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "rms_norm_eps",
    "rope_theta",
    "max_position_embeddings",
)
MODELS = "qwen_tts.core.models"
STAND_INS = {
    "torchaudio": ("torchaudio.compliance", "torchaudio.compliance.kaldi"),
    "sox": (),
    "onnxruntime": (),
}
"""Imported by the package for a tokenizer that no released checkpoint has; never called here."""


class HFOfficial(DecodeBackend):
    """The official talker or code-predictor stack with its own ``DynamicCache``.

    The history comes from ``cache``: it is copied into the official cache when somebody else wrote
    ``cache``, otherwise the official cache is cut back to ``position`` and goes on. Every step's
    K/V is copied back.

    Numerics: contract ``hf_bf16`` with ``sdpa`` attention, the official loading default (the
    reference has the bits of ``eager``).
    """

    name = "hf"
    contract = "hf_bf16"

    def __init__(
        self,
        spec: DecoderSpec,
        weights: DecoderWeights,
        *,
        max_positions: int,
        positions: torch.Tensor | None = None,
    ) -> None:
        super().__init__(spec, weights, max_positions=max_positions, positions=positions)
        if positions is None:
            positions = torch.arange(max_positions)
        self._positions = positions.to(self.device).expand(3, -1)  # [3, T]
        self._model = build_model(spec, weights)
        self._past: Any = None
        self._seen: tuple[int, int] | None = None

    @classmethod
    def check_available(cls, device: torch.device) -> None:
        import_official()

    @torch.no_grad()
    def _run(self, inputs_embeds: torch.Tensor, position: int, head: int) -> StepOutput:
        self._rewind(position)
        # The talker takes three position axes, the code predictor one.
        axes = self._positions[:, None] if self.spec.role == "talker" else self._positions[:1]
        rows = []
        for i in range(inputs_embeds.shape[0]):
            row = position + i
            output = self._model(
                inputs_embeds=inputs_embeds[None, i : i + 1],
                position_ids=axes[..., row : row + 1],
                past_key_values=self._past,
                use_cache=True,
            )
            rows.append(output.last_hidden_state[0])
        hidden = torch.cat(rows)
        new = slice(position, position + len(rows))
        for i, layer in enumerate(self._past.layers):
            self.cache.k[i, :, new] = layer.keys[0, :, new]
            self.cache.v[i, :, new] = layer.values[0, :, new]
        self._seen = cache_version(self.cache)
        return StepOutput(hidden, F.linear(hidden, self.weights.lm_head[head]))

    def _rewind(self, position: int) -> None:
        """Makes the official cache hold the rows before ``position``."""
        known = self._past is not None and cache_version(self.cache) == self._seen
        if known and self._past.get_seq_length() >= position:
            self._past.crop(position)
            return
        self._past = importlib.import_module("transformers").DynamicCache()
        for i in range(self.spec.num_hidden_layers):
            rows = (tensor[i, None, :, :position] for tensor in (self.cache.k, self.cache.v))
            self._past.update(*rows, i)


def build_model(spec: DecoderSpec, weights: DecoderWeights) -> Any:
    """Returns the official stack of layers and final norm, its parameters views of ``weights``.

    Raises:
        BackendUnavailable: the package cannot be imported.
    """
    modeling, configuration = import_official()
    settings = {name: getattr(spec, name) for name in CONFIG_FIELDS}
    settings |= {"use_sliding_window": False, "sliding_window": None, "attention_bias": False}
    # The embedding tables are not part of a step: the smallest possible, then dropped.
    if spec.role == "talker":
        if spec.mrope_section is not None:
            section = {"interleaved": True, "mrope_section": list(spec.mrope_section)}
            settings["rope_scaling"] = {"rope_type": "default", **section}
        config = configuration.Qwen3TTSTalkerConfig(
            **settings, text_vocab_size=1, text_hidden_size=1
        )
        rotary_class = modeling.Qwen3TTSTalkerRotaryEmbedding
        model_class = modeling.Qwen3TTSTalkerModel
    else:
        config = configuration.Qwen3TTSTalkerCodePredictorConfig(**settings, num_code_groups=1)
        rotary_class = modeling.Qwen3TTSRotaryEmbedding
        model_class = partial(modeling.Qwen3TTSTalkerCodePredictorModel, embedding_dim=1)
    config._attn_implementation = "sdpa"
    with torch.device("meta"):
        model = model_class(config)
    model.codec_embedding = model.text_embedding = None
    model.rotary_emb = rotary_class(config, device=weights.qkv.device)  # fp32 frequencies
    model.load_state_dict(dict(official_names(spec, weights)), strict=True, assign=True)
    return model.eval().requires_grad_(False)


def official_names(
    spec: DecoderSpec, weights: DecoderWeights
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields the official parameter names with their views of the packed weights."""
    for field, parts in layer_parts(spec).items():
        for layer in range(spec.num_hidden_layers):
            rows = getattr(weights, field)[layer].split([shape[0] for _, shape in parts])
            for (suffix, _), tensor in zip(parts, rows, strict=True):
                yield f"layers.{layer}.{suffix}", tensor
    yield "norm.weight", weights.norm


def import_official() -> tuple[Any, Any]:
    """Returns the official modeling and configuration modules.

    While they load, inert modules stand in for packages that are not installed; they are gone from
    ``sys.modules`` afterwards.

    Raises:
        BackendUnavailable: the package is not installed, or does not load here.
    """
    names = (f"{MODELS}.modeling_qwen3_tts", f"{MODELS}.configuration_qwen3_tts")
    try:
        with _stand_ins(), contextlib.redirect_stdout(io.StringIO()):  # it prints a banner
            modeling, configuration = map(importlib.import_module, names)
    except (ImportError, OSError, TypeError) as error:  # TypeError: another transformers
        raise BackendUnavailable(
            HFOfficial.name, f"qwen-tts 0.1.1 does not load: {error}", "make hf"
        ) from error
    return modeling, configuration


@contextlib.contextmanager
def _stand_ins() -> Iterator[None]:
    missing = [name for name in STAND_INS if name not in sys.modules and not _installed(name)]
    added = [full for name in missing for full in (name, *STAND_INS[name])]
    for full in added:
        module = types.ModuleType(full)
        module.__spec__ = importlib.machinery.ModuleSpec(full, None)
        module.__path__ = []
        sys.modules[full] = module
        parent, _, attribute = full.rpartition(".")
        if parent:
            setattr(sys.modules[parent], attribute, module)
    try:
        yield
    finally:
        for full in added:
            del sys.modules[full]


def _installed(name: str) -> bool:
    return importlib.util.find_spec(name) is not None

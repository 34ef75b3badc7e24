"""The official Qwen3-TTS modules on the CPU with hash weights, and a recorder of their passes.

The package ``qwen-tts`` imports torchaudio, sox and onnxruntime for a tokenizer that no released
checkpoint uses; where one is not installed, an inert stand-in takes its place. Used by the tests
marked ``hf`` and by the scripts that make fixtures; ``triton_mega`` knows nothing about it.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.machinery
import importlib.util
import io
import os
import sys
import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from triton_mega.spec import Role
from triton_mega.weights import hash_tensor

STAND_INS = {
    "torchaudio": ("compliance", "compliance.kaldi"),
    "sox": (),
    "onnxruntime": (),
}


def is_installed() -> bool:
    """True where the official package can be imported (after ``make hf``)."""
    return all(importlib.util.find_spec(name) for name in ("qwen_tts", "transformers"))


def modeling() -> Any:
    """Returns the official module ``modeling_qwen3_tts``."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    for name, submodules in STAND_INS.items():
        if name not in sys.modules and importlib.util.find_spec(name) is None:
            _stand_in(name, submodules)
    with contextlib.redirect_stdout(io.StringIO()):  # it advertises flash-attn on import
        return importlib.import_module("qwen_tts.core.models.modeling_qwen3_tts")


def _stand_in(name: str, submodules: Sequence[str]) -> None:
    for full in (name, *(f"{name}.{sub}" for sub in submodules)):
        module = types.ModuleType(full)
        module.__spec__ = importlib.machinery.ModuleSpec(full, None)
        module.__path__ = []
        sys.modules[full] = module
        parent, _, attribute = full.rpartition(".")
        if parent:
            setattr(sys.modules[parent], attribute, module)


def build(config: Mapping[str, Any], dtype: torch.dtype) -> Any:
    """Returns the official model of a ``config.json``, attention ``eager``, with hash weights.

    The weights are rounded to bf16 first, so that a bf16 and an fp32 model hold the same numbers.
    The rotary frequencies stay fp32, as ``from_pretrained`` leaves them.
    """
    official = modeling()
    from qwen_tts.core.models.configuration_qwen3_tts import Qwen3TTSConfig
    from transformers.modeling_utils import no_init_weights

    settings = Qwen3TTSConfig(**config)
    talker = settings.talker_config
    for part in (settings, talker, talker.code_predictor_config):
        part._attn_implementation = "eager"
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with no_init_weights():
            model = official.Qwen3TTSForConditionalGeneration(settings).eval()
    finally:
        torch.set_default_dtype(before)
    assert model.talker.model.rotary_emb.inv_freq.dtype == torch.float32
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(hash_tensor(name, tuple(parameter.shape)))
    return model


@dataclass
class Pass:
    """One forward of the official talker or code predictor over ``n`` rows."""

    role: Role
    embeds: torch.Tensor  # [n, D]
    layers: torch.Tensor  # [L, n, D] every layer's output
    norm: torch.Tensor  # [n, D]
    logits: torch.Tensor  # [n, V]
    head: int


@contextlib.contextmanager
def recorded(model: Any) -> Iterator[list[Pass]]:
    """Collects every pass of the model's talker and code predictor, without changing it."""
    passes: list[Pass] = []
    layers: list[torch.Tensor] = []
    seen: dict[str, torch.Tensor] = {}
    talker, predictor = model.talker, model.talker.code_predictor

    def begin(_module: Any, _args: Any, kwargs: Any) -> None:
        layers.clear()
        seen["embeds"] = kwargs["inputs_embeds"][0].clone()

    def layer(_module: Any, _args: Any, output: Any) -> None:
        layers.append((output[0] if isinstance(output, tuple) else output)[0].clone())

    def end(_module: Any, _args: Any, output: Any) -> None:
        seen["norm"] = output.last_hidden_state[0].clone()

    def head(role: Role, index: int) -> Any:
        def hook(_module: Any, _args: Any, output: torch.Tensor) -> None:
            stacked = torch.stack(layers)
            logits = output[0].clone()
            passes.append(Pass(role, seen["embeds"], stacked, seen["norm"], logits, index))

        return hook

    handles = []
    for stack in (talker.model, predictor.model):
        handles.append(stack.register_forward_pre_hook(begin, with_kwargs=True))
        handles.append(stack.register_forward_hook(end))
        handles += [module.register_forward_hook(layer) for module in stack.layers]
    handles.append(talker.codec_head.register_forward_hook(head("talker", 0)))
    for j, module in enumerate(predictor.lm_head):
        handles.append(module.register_forward_hook(head("code_predictor", j)))
    try:
        yield passes
    finally:
        for handle in handles:
            handle.remove()


@dataclass
class Generation:
    """One greedy request through the official ``generate``."""

    passes: list[Pass]
    codes: torch.Tensor  # [frames, C] int64
    sampled_c0: torch.Tensor  # [frames + 1] int64, the last one has no residuals

    def of(self, role: Role) -> list[Pass]:
        """The passes of one decoder, in order."""
        return [p for p in self.passes if p.role == role]


@torch.no_grad()
def generate(model: Any, text_ids: Sequence[int], frames: int) -> Generation:
    """Speaks ``text_ids`` (tags included) greedily as ryan, for at most ``frames`` frames."""
    ids: list[torch.Tensor] = []
    inner = model.talker.generate

    def keep_ids(**kwargs: Any) -> Any:
        output = inner(**kwargs)
        ids.append(output.sequences[0].clone())
        return output

    model.talker.generate = keep_ids
    try:
        with recorded(model) as passes:
            codes, _hidden = model.generate(
                input_ids=[torch.tensor([list(text_ids)])],
                languages=["english"],
                speakers=["ryan"],
                non_streaming_mode=True,
                do_sample=False,
                subtalker_dosample=False,
                max_new_tokens=frames + 1,
            )
    finally:
        del model.talker.generate
    return Generation(passes, codes[0].clone(), ids[0])


@torch.no_grad()
def replay(
    model: Any,
    role: Role,
    rows: Sequence[torch.Tensor],  # each [n, D]
    heads: Sequence[int] | None = None,
    positions: torch.Tensor | None = None,  # [3, T]
) -> tuple[list[Pass], Any]:
    """Feeds blocks of input rows to the official talker or code predictor, one pass per block.

    Returns:
        The passes, and the official cache after the last one.
    """
    from transformers import DynamicCache

    talker = model.talker
    stack = talker.model if role == "talker" else talker.code_predictor.model
    cache, start = DynamicCache(), 0
    with recorded(model) as passes:
        for i, block in enumerate(rows):
            stop = start + len(block)
            ids = None if positions is None else positions[:, None, start:stop]
            embeds = block.to(next(stack.parameters()).dtype)[None]
            output = stack(
                inputs_embeds=embeds, past_key_values=cache, use_cache=True, position_ids=ids
            )
            j = heads[i] if heads else 0
            head = talker.codec_head if role == "talker" else talker.code_predictor.lm_head[j]
            head(output.last_hidden_state)
            start = stop
    return passes, cache

"""What the Triton backends share: kernel arguments, workspace, and reading a trace back."""

from __future__ import annotations

import os
from abc import abstractmethod

import torch
import triton.language as tl

from triton_mega.backends import BackendUnavailable, DecodeBackend
from triton_mega.device import MIN_CAPABILITY, DeviceInfo
from triton_mega.kernels import arguments
from triton_mega.schedule import LAYER_STAGES, Schedule
from triton_mega.spec import DecoderSpec
from triton_mega.toolchain import installed_interpreter_fault, launcher_fault
from triton_mega.tuning import TuningConfig, check_tuning, default_tuning
from triton_mega.weights import DecoderWeights, pair_columns

NORMS = ("input_norm", "q_norm", "k_norm", "post_attention_norm", "norm")
MATRICES = ("qkv", "o", "gate_up", "down")


def interpreted() -> bool:
    """True where Triton kernels of this process run in the interpreter."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


def shape_constants(spec: DecoderSpec) -> arguments.Shape:
    """The spec as compile-time kernel arguments.

    Raises:
        ValueError: the kernels cannot compute this shape.
    """
    if spec.head_dim & (spec.head_dim - 1):
        raise ValueError(f"head_dim: expected a power of two, got {spec.head_dim}")
    even = {"hidden_size": spec.hidden_size, "intermediate_size": spec.intermediate_size}
    even["num_attention_heads"] = spec.num_attention_heads
    for name, value in even.items():
        if value % 2:
            raise ValueError(f"{name}: expected an even number, got {value}")
    values = (
        spec.num_hidden_layers,
        spec.hidden_size,
        spec.intermediate_size,
        spec.num_attention_heads,
        spec.num_key_value_heads,
        spec.head_dim,
        spec.vocab_size,
    )
    return arguments.Shape(*(tl.constexpr(value) for value in values))


def tile_constants(tuning: TuningConfig) -> arguments.Tiles:
    """The tuning as compile-time kernel arguments."""
    names = {"PROGRAMS": "num_programs"}
    fields = arguments.Tiles._fields
    values = (getattr(tuning, names.get(field, field.lower())) for field in fields)
    return arguments.Tiles(*(tl.constexpr(value) for value in values))


def pair_weights(weights: DecoderWeights) -> list[arguments.Weights]:
    """The weights as the kernels read them, once for each lm head. Copies the matrices."""
    norms = {name: getattr(weights, name) for name in NORMS}
    matrices = {name: pair_columns(getattr(weights, name)) for name in MATRICES}
    heads = pair_columns(weights.lm_head)
    return [arguments.Weights(**norms, **matrices, lm_head=head) for head in heads]


def allocate_buffers(
    spec: DecoderSpec, tuning: TuningConfig, slots: int, device: torch.device
) -> arguments.Buffers:
    """Scratch tensors with ``slots`` layer slots, poisoned with NaN."""

    def nan(*shape: int) -> torch.Tensor:
        return torch.full(shape, float("nan"), dtype=torch.float32, device=device)

    return arguments.Buffers(
        x=nan(slots, spec.hidden_size),
        mid=nan(slots, spec.hidden_size),
        qkv=nan(slots, spec.qkv_size),
        partial=nan(tuning.splits, spec.num_attention_heads, spec.head_dim),
        lse=nan(tuning.splits, spec.num_attention_heads),
        attention=nan(slots, spec.q_size),
        act=nan(slots, spec.intermediate_size),
    )


class TritonBackend(DecodeBackend):
    """Buffers and arguments common to ``triton_staged`` and ``triton_persistent``.

    Args:
        tuning: tile shapes and grid; None means ``default_tuning`` of the device.

    Numerics: contract ``fp32_activations``.
    """

    contract = "fp32_activations"

    def __init__(
        self,
        spec: DecoderSpec,
        weights: DecoderWeights,
        *,
        max_positions: int,
        positions: torch.Tensor | None = None,
        tuning: TuningConfig | None = None,
    ) -> None:
        super().__init__(spec, weights, max_positions=max_positions, positions=positions)
        self.check_available(self.device)
        device = None if interpreted() else DeviceInfo.read(self.device)
        self.tuning = tuning or default_tuning(spec, device)
        check_tuning(self.tuning, spec)
        self.schedule = Schedule(spec, self.tuning)
        self._shape, self._tiles = shape_constants(spec), tile_constants(self.tuning)
        self._weights = pair_weights(weights)
        self._cache = arguments.Cache(self.cache.k, self.cache.v, self.cos, self.sin)
        self._buffers = allocate_buffers(spec, self.tuning, 1, self.device)

    @classmethod
    def check_available(cls, device: torch.device) -> None:
        if device.type == "cuda" and interpreted():
            raise BackendUnavailable(cls.name, "TRITON_INTERPRET=1 is set", "unset it")
        if device.type == "cuda":
            capability = torch.cuda.get_device_capability(device)
            if capability < MIN_CAPABILITY:
                have, need = (".".join(map(str, c)) for c in (capability, MIN_CAPABILITY))
                raise BackendUnavailable(cls.name, f"compute capability {have} is below {need}")
            if fault := launcher_fault():
                raise BackendUnavailable(cls.name, *fault)
        elif not interpreted():
            hint = "TRITON_INTERPRET=1 runs it on a CPU"
            raise BackendUnavailable(cls.name, f"device {device} is not a CUDA GPU", hint)
        elif reason := installed_interpreter_fault():
            raise BackendUnavailable(cls.name, reason, "install numpy < 2.4")

    def trace_step(
        self, inputs_embeds: torch.Tensor, position: int, head: int = 0
    ) -> dict[str, torch.Tensor]:
        self._check_inputs(inputs_embeds, position, head)
        if inputs_embeds.shape[0] != 1:
            raise ValueError(f"inputs_embeds: expected one row, got {inputs_embeds.shape[0]}")
        slots = self.spec.num_hidden_layers
        buffers = allocate_buffers(self.spec, self.tuning, slots, self.device)
        steps = self._allocate_steps(inputs_embeds)
        self._launch(steps, buffers, position, head, trace=1)
        self.synchronize()
        by_stage = (buffers.qkv, buffers.attention, buffers.mid, buffers.act, buffers.x)
        trace = dict(zip(LAYER_STAGES, by_stage, strict=True))
        return trace | {"final_norm": steps.hidden[0], "lm_head": steps.logits[0]}

    def _allocate_steps(self, inputs_embeds: torch.Tensor) -> arguments.Steps:
        n, device = inputs_embeds.shape[0], self.device
        return arguments.Steps(
            inputs_embeds=inputs_embeds.contiguous(),
            hidden=torch.empty(n, self.spec.hidden_size, dtype=torch.float32, device=device),
            logits=torch.empty(n, self.spec.vocab_size, dtype=torch.float32, device=device),
        )

    @abstractmethod
    def _launch(
        self,
        steps: arguments.Steps,
        buffers: arguments.Buffers,
        position: int,
        head: int,
        trace: int,
    ) -> None: ...

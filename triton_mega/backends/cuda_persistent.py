"""The CUDA C++ yardstick of ``cuda_ref/``: the whole decode loop in one cooperative launch.

``cuda_ref`` stands beside the package in a checkout and is not part of an installed wheel; it and
``cuda.core`` are imported when a backend is made, so that this module loads everywhere.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol

import torch

from triton_mega.backends import (
    SPIN_LIMIT,
    BackendUnavailable,
    BarrierTimeout,
    DecodeBackend,
    StepOutput,
)
from triton_mega.device import MIN_CAPABILITY, DeviceInfo
from triton_mega.schedule import LAYER_STAGES
from triton_mega.spec import DecoderSpec
from triton_mega.weights import DecoderWeights

if TYPE_CHECKING:
    from cuda_ref.arguments import CValue, Value
    from cuda_ref.options import KernelOptions

SYNC_WORDS = 128
ERROR, ERROR_INDEX = 64, 65  # words of cuda_ref/barrier.cuh
INSTALL = "install the extra: pip install 'triton-mega[cuda]'"


class Kernel(Protocol):
    """What launches the kernel: ``cuda_ref.launch.LoadedKernel``."""

    def launch(self, packed: Mapping[str, CValue]) -> None: ...


class CudaPersistent(DecodeBackend):
    """``n`` decode steps per launch, one block per multiprocessor, resident throughout.

    Args:
        options: how the kernel is built and launched; None means ``default_options`` of the device.
        spin_limit: polls before a block gives up at a barrier.

    Raises:
        ValueError: the kernel cannot compute this shape, or the grid cannot be resident at once;
            names the field, and the largest grid.

    Numerics: contract ``fp32_activations``; ``cuda_ref/README.md`` says what rounds where.
    """

    name = "cuda_persistent"
    contract = "fp32_activations"

    def __init__(
        self,
        spec: DecoderSpec,
        weights: DecoderWeights,
        *,
        max_positions: int,
        positions: torch.Tensor | None = None,
        options: KernelOptions | None = None,
        spin_limit: int = SPIN_LIMIT,
    ) -> None:
        super().__init__(spec, weights, max_positions=max_positions, positions=positions)
        self.check_available(self.device)
        self.tuning = options or self._default_options()
        self.spin_limit = spin_limit
        self._kernel = self._load()
        self._sync = torch.zeros(SYNC_WORDS, dtype=torch.int32, device=self.device)
        self._buffers = self._allocate_buffers(slots=1)
        self._fixed = [self._pack_fixed(head) for head in range(spec.num_lm_heads)]

    @classmethod
    def check_available(cls, device: torch.device) -> None:
        if importlib.util.find_spec("cuda_ref") is None:
            hint = "run from the repository's root"
            raise BackendUnavailable(cls.name, "cuda_ref is not part of the installed wheel", hint)
        if importlib.util.find_spec("cuda") is None:
            raise BackendUnavailable(cls.name, "package cuda-core is not installed", INSTALL)
        try:
            from cuda_ref.build import nvrtc_version

            nvrtc_version()
        except (ImportError, RuntimeError) as error:
            raise BackendUnavailable(cls.name, f"no NVRTC: {error}", INSTALL) from error
        if device.type != "cuda":
            raise BackendUnavailable(cls.name, f"device {device} is not a CUDA GPU")
        capability = torch.cuda.get_device_capability(device)
        if capability < MIN_CAPABILITY:
            have, need = (".".join(map(str, c)) for c in (capability, MIN_CAPABILITY))
            raise BackendUnavailable(cls.name, f"compute capability {have} is below {need}")

    def synchronize(self) -> None:
        """Waits for the launches so far.

        Raises:
            BarrierTimeout: one of them was abandoned; names block and barrier.
        """
        from cuda_ref.options import barrier_name

        block, index = self._sync[ERROR : ERROR_INDEX + 1].tolist()
        if block:
            self._sync.zero_()
            raise BarrierTimeout(
                f"block {block - 1} of {self.tuning.blocks} gave up after {self.spin_limit} polls "
                f"at {barrier_name(self.spec, index)}; "
                "outputs since the last synchronize are not valid"
            )

    def run_steps_with_argmax(
        self,
        inputs_embeds: torch.Tensor,  # [n, D] bf16
        position: int,
        head: int = 0,
    ) -> tuple[StepOutput, torch.Tensor]:  # and [n] int32
        """``run_steps``, and the id of the largest logit of each step.

        Numerics: logits are compared rounded to bf16; of equal ones the lowest id wins, and NaN is
        larger than any number.
        """
        self._check_inputs(inputs_embeds, position, head)
        return self._decode(position, head, rows=inputs_embeds)

    def run_greedy(
        self,
        embedding: torch.Tensor,  # [ids, D] bf16, at least V rows
        first_token: int,
        position: int,
        n: int,
        head: int = 0,
    ) -> tuple[StepOutput, torch.Tensor]:  # and [n] int32
        """Decodes ``n`` steps, each fed with the row of ``embedding`` that the last one chose.

        Returns the steps' outputs and the id that each chose (as ``run_steps_with_argmax``); the
        first is fed with ``first_token``'s row.

        Raises:
            ValueError: a shape, dtype, device, id or position is wrong; says which.
        """
        if embedding.shape[0] < self.spec.vocab_size:
            raise ValueError(
                f"embedding: expected at least {self.spec.vocab_size} rows, "
                f"got {embedding.shape[0]}"
            )
        if not 0 <= first_token < embedding.shape[0]:
            raise ValueError(
                f"first_token: expected 0 to {embedding.shape[0] - 1}, got {first_token}"
            )
        if n < 1:
            raise ValueError(f"n: expected at least 1, got {n}")
        self._check_inputs(embedding[:1], position, head)
        self._check_inputs(embedding[:1], position + n - 1, head)
        first = torch.tensor([first_token], dtype=torch.int32, device=self.device)
        return self._decode(position, head, table=embedding.contiguous(), first=first, n=n)

    def trace_step(
        self, inputs_embeds: torch.Tensor, position: int, head: int = 0
    ) -> dict[str, torch.Tensor]:
        self._check_inputs(inputs_embeds, position, head)
        if inputs_embeds.shape[0] != 1:
            raise ValueError(f"inputs_embeds: expected one row, got {inputs_embeds.shape[0]}")
        buffers = self._allocate_buffers(slots=self.spec.num_hidden_layers)
        output, _ = self._decode(position, head, rows=inputs_embeds, trace=buffers)
        self.synchronize()
        names = ("qkv", "attention", "mid", "activation", "x")
        trace = {stage: buffers[name] for stage, name in zip(LAYER_STAGES, names, strict=True)}
        return trace | {"final_norm": output.hidden[0], "lm_head": output.logits[0]}

    def _run(self, inputs_embeds: torch.Tensor, position: int, head: int) -> StepOutput:
        return self._decode(position, head, rows=inputs_embeds)[0]

    def _decode(
        self,
        position: int,
        head: int,
        *,
        rows: torch.Tensor | None = None,
        table: torch.Tensor | None = None,
        first: torch.Tensor | None = None,
        n: int | None = None,
        trace: dict[str, torch.Tensor] | None = None,
    ) -> tuple[StepOutput, torch.Tensor]:
        """Launches ``n`` steps from embedding rows, or from a table and its first row's number."""
        from cuda_ref.arguments import pack

        if rows is not None:
            rows, n = rows.contiguous(), rows.shape[0]
        assert n is not None
        float32 = {"dtype": torch.float32, "device": self.device}
        hidden = torch.empty(n, self.spec.hidden_size, **float32)  # type: ignore[call-overload]
        logits = torch.empty(n, self.spec.vocab_size, **float32)  # type: ignore[call-overload]
        tokens = torch.empty(n, dtype=torch.int32, device=self.device)
        at_once = self.tuning.steps_per_launch or n
        for start in range(0, n, at_once):
            stop = min(start + at_once, n)
            follows = table is not None and start > 0
            step_arguments: dict[str, Value] = {
                "inputs_embeds": None if rows is None else rows[start:stop],
                "embedding": table,
                "first_token": tokens[start - 1 : start] if follows else first,
                "hidden": hidden[start:stop],
                "logits": logits[start:stop],
                "next_tokens": tokens[start:stop],
                "n_steps": stop - start,
                "position": position + start,
                "trace": int(trace is not None),
                "spin_limit": self.spin_limit,
                **(trace or {}),
            }
            self._kernel.launch(self._fixed[head] | pack(step_arguments))
        return StepOutput(hidden, logits), tokens

    def _pack_fixed(self, head: int) -> dict[str, CValue]:
        """The arguments that no step changes."""
        from cuda_ref.arguments import pack

        weights = self.weights
        fixed: dict[str, Value] = {
            "input_norm": weights.input_norm,
            "q_norm": weights.q_norm,
            "k_norm": weights.k_norm,
            "qkv_weight": weights.qkv,
            "o_weight": weights.o,
            "post_attention_norm": weights.post_attention_norm,
            "gate_up_weight": weights.gate_up,
            "down_weight": weights.down,
            "norm": weights.norm,
            "head_weight": weights.lm_head[head],
            "k_cache": self.cache.k,
            "v_cache": self.cache.v,
            "cos": self.cos,
            "sin": self.sin,
            "sync_words": self._sync,
            "max_positions": self.cache.max_positions,
            "eps": self.spec.rms_norm_eps,
            **self._buffers,
        }
        return pack(fixed)

    def _allocate_buffers(self, slots: int) -> dict[str, torch.Tensor]:
        """Scratch tensors with ``slots`` layer slots, poisoned with NaN."""
        spec, splits = self.spec, self.tuning.num_splits
        shapes = {
            "x": (slots, spec.hidden_size),
            "mid": (slots, spec.hidden_size),
            "qkv": (slots, spec.qkv_size),
            "partial": (splits, spec.num_attention_heads, spec.head_dim),
            "lse": (splits, spec.num_attention_heads),
            "attention": (slots, spec.q_size),
            "activation": (slots, spec.intermediate_size),
        }
        buffers = {
            name: torch.full(shape, float("nan"), dtype=torch.float32, device=self.device)
            for name, shape in shapes.items()
        }
        best = torch.zeros(self.tuning.blocks, dtype=torch.int64, device=self.device)
        return buffers | {"block_best": best}

    def _default_options(self) -> KernelOptions:
        from cuda_ref.options import default_options

        return default_options(self.spec, DeviceInfo.read(self.device))

    def _load(self) -> Kernel:
        from cuda_ref.launch import LoadedKernel

        return LoadedKernel(self.spec, self.tuning, self.device)

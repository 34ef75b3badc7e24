"""The protocol that every way of running a decoder step follows, and the list of those ways.

A backend owns one K/V cache and whatever scratch memory it needs; two backends never share either.
Importing this module imports no backend: each is loaded when asked for by name.
"""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch

from triton_mega.rope import rope_tables
from triton_mega.spec import DecoderSpec
from triton_mega.state import KVCache
from triton_mega.weights import DecoderWeights

BACKENDS: dict[str, str] = {
    "torch_eager": "triton_mega.backends.torch_eager:TorchEager",
    "torch_graph": "triton_mega.backends.torch_graph:TorchGraph",
    "torch_compile": "triton_mega.backends.torch_graph:TorchCompileGraph",
    "hf": "triton_mega.backends.hf:HFOfficial",
    "triton_staged": "triton_mega.backends.triton_staged:TritonStaged",
    "cuda_persistent": "triton_mega.backends.cuda_persistent:CudaPersistent",
    "triton_persistent": "triton_mega.backends.triton_persistent:TritonPersistent",
}
"""Backend name to ``module:class``, weakest first."""


class BackendUnavailable(RuntimeError):
    """This machine cannot run a backend; says which part is missing and what would help."""

    def __init__(self, backend: str, reason: str, hint: str = "") -> None:
        super().__init__(f"{backend}: {reason}" + (f" ({hint})" if hint else ""))
        self.backend, self.reason, self.hint = backend, reason, hint


SPIN_LIMIT = 2_000_000
"""Polls before a program gives up at a grid barrier: more than a second on an H200."""


class BarrierTimeout(RuntimeError):
    """A program waited at a grid barrier for longer than the spin limit; the launch was abandoned.

    The launch's outputs are not valid, and cache rows from its first position on may be half
    written. The backend can be used again.
    """


@dataclass(frozen=True)
class StepOutput:
    """Result of ``n`` decode steps."""

    hidden: torch.Tensor  # [n, D] after the final norm; fp32, or bf16 under contract hf_bf16
    logits: torch.Tensor  # [n, V] fp32, or bf16 under contract hf_bf16


class DecodeBackend(ABC):
    """One decoder (talker or code predictor) with its cache, run step by step at batch 1.

    Args:
        spec: shapes.
        weights: packed weights; their device is the backend's. Not copied where avoidable.
        max_positions: rows of the K/V cache.
        positions: [3, T] rotary positions of the cache rows; None means row ``p`` has three equal
            axes ``p``, as speech decoding always has.
    """

    name: ClassVar[str]
    contract: ClassVar[str]

    def __init__(
        self,
        spec: DecoderSpec,
        weights: DecoderWeights,
        *,
        max_positions: int,
        positions: torch.Tensor | None = None,
    ) -> None:
        weights.check(spec)
        self.spec, self.weights = spec, weights
        self.device = weights.qkv.device
        self.cache = KVCache.allocate(spec, max_positions, device=self.device)
        if positions is None:
            positions = torch.arange(max_positions)
        self.cos, self.sin = (table.to(self.device) for table in rope_tables(positions, spec))

    @classmethod
    def check_available(cls, device: torch.device) -> None:
        """Raises BackendUnavailable, with reason and hint, where ``device`` cannot run it."""

    def run_steps(
        self,
        inputs_embeds: torch.Tensor,  # [n, D] bf16, on the backend's device
        position: int,
        head: int = 0,
    ) -> StepOutput:
        """Decodes ``n`` rows at ``position`` onward and appends their K/V to the cache.

        Cache rows before ``position`` must be filled. ``head`` picks the lm head (always 0 for the
        talker). The output is the caller's; it may be read without synchronizing first.

        Raises:
            ValueError: a shape, dtype, device or position is wrong; says which.
        """
        self._check_inputs(inputs_embeds, position, head)
        return self._run(inputs_embeds, position, head)

    def synchronize(self) -> None:
        """Waits for the steps so far. Raises where one of them failed on the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    @abstractmethod
    def _run(self, inputs_embeds: torch.Tensor, position: int, head: int) -> StepOutput: ...

    def trace_step(
        self,
        inputs_embeds: torch.Tensor,  # [1, D] bf16
        position: int,
        head: int = 0,
    ) -> dict[str, torch.Tensor]:
        """Runs one step and returns every stage's output of every layer.

        Keys are the stage names of ``schedule.STAGES``; layer stages have a leading axis L:
        ``qkv_proj`` [L, (HQ + 2 HKV) * HD] before head norm and rope, ``attention`` [L, HQ * HD],
        ``o_proj`` [L, D] (residual stream after attention), ``gate_up_proj`` [L, F]
        (silu(gate) * up), ``down_proj`` [L, D] (residual stream after the MLP), ``final_norm`` [D],
        ``lm_head`` [V].

        Raises:
            NotImplementedError: the backend cannot show its stages.
        """
        raise NotImplementedError(f"{self.name} does not expose its stages")

    def _check_inputs(self, inputs_embeds: torch.Tensor, position: int, head: int) -> None:
        spec, x = self.spec, inputs_embeds
        if x.dim() != 2 or x.shape[1] != spec.hidden_size or x.shape[0] < 1:
            raise ValueError(
                f"inputs_embeds: expected [n, {spec.hidden_size}], got {list(x.shape)}"
            )
        if x.dtype != torch.bfloat16 or x.device != self.device:
            raise ValueError(
                f"inputs_embeds: expected bfloat16 on {self.device}, got {x.dtype} on {x.device}"
            )
        if position < 0 or position + x.shape[0] > self.cache.max_positions:
            raise ValueError(
                f"position: {position} + {x.shape[0]} steps does not fit the cache of "
                f"{self.cache.max_positions} rows"
            )
        if not 0 <= head < spec.num_lm_heads:
            raise ValueError(f"head: expected 0 to {spec.num_lm_heads - 1}, got {head}")


def load_backend(name: str) -> type[DecodeBackend]:
    """Imports and returns a backend's class.

    Raises:
        ValueError: no backend has this name.
        BackendUnavailable: a package it needs is not installed.
    """
    if name not in BACKENDS:
        raise ValueError(f"backend: expected one of {', '.join(BACKENDS)}, got {name!r}")
    module, attribute = BACKENDS[name].split(":")
    try:
        backend: type[DecodeBackend] = getattr(importlib.import_module(module), attribute)
    except ModuleNotFoundError as error:
        raise BackendUnavailable(name, f"package {error.name} is not installed") from error
    return backend

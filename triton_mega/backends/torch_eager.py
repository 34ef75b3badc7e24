"""Plain torch, one operation after another: the reference's own stages, run step by step."""

from __future__ import annotations

import torch

from triton_mega.backends import DecodeBackend, StepOutput
from triton_mega.reference import CONTRACTS, DecoderOutput, decode


class TorchEager(DecodeBackend):
    """A decoder step as separate torch operations; runs on any device.

    Numerics: contract ``hf_bf16``, the official rounding points.
    """

    name = "torch_eager"
    contract = "hf_bf16"

    def _run(self, inputs_embeds: torch.Tensor, position: int, head: int) -> StepOutput:
        steps = [  # row by row: a block at once would be a prefill, not decode steps
            self._step(inputs_embeds[i : i + 1], position + i, head)
            for i in range(inputs_embeds.shape[0])
        ]
        return StepOutput(
            hidden=torch.cat([step.hidden for step in steps]),
            logits=torch.cat([step.logits for step in steps]),
        )

    def trace_step(
        self, inputs_embeds: torch.Tensor, position: int, head: int = 0
    ) -> dict[str, torch.Tensor]:
        self._check_inputs(inputs_embeds, position, head)
        trace: dict[str, torch.Tensor] = {}
        self._step(inputs_embeds, position, head, trace)
        return trace

    def _step(
        self,
        row: torch.Tensor,  # [1, D] bf16
        position: int,
        head: int,
        trace: dict[str, torch.Tensor] | None = None,
    ) -> DecoderOutput:
        return decode(
            self.spec,
            self.weights,
            row,
            position,
            self.cache,
            self.cos,
            self.sin,
            CONTRACTS[self.contract],
            head=head,
            trace=trace,
        )

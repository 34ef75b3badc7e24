"""The Triton stages, one launch each: the persistent kernel's device functions, no barrier."""

from __future__ import annotations

import torch

from triton_mega.backends import StepOutput
from triton_mega.backends.triton_common import TritonBackend
from triton_mega.kernels import arguments
from triton_mega.kernels.staged import STAGE_KERNELS
from triton_mega.schedule import LAYER_STAGES


class TritonStaged(TritonBackend):
    """One launch per stage and layer; any grid, in the interpreter too."""

    name = "triton_staged"

    def _run(self, inputs_embeds: torch.Tensor, position: int, head: int) -> StepOutput:
        steps = self._allocate_steps(inputs_embeds)
        for i in range(inputs_embeds.shape[0]):
            rows = arguments.Steps(*(tensor[i : i + 1] for tensor in steps))
            self._launch(rows, self._buffers, position + i, head, trace=0)
        return StepOutput(steps.hidden, steps.logits)

    def _launch(
        self,
        steps: arguments.Steps,
        buffers: arguments.Buffers,
        position: int,
        head: int,
        trace: int,
    ) -> None:
        for layer in range(self.spec.num_hidden_layers):
            for stage in LAYER_STAGES:
                self._launch_stage(stage, steps, buffers, layer, position, head, trace)
        self._launch_stage("lm_head", steps, buffers, 0, position, head, trace)

    def _launch_stage(
        self,
        stage: str,
        steps: arguments.Steps,
        buffers: arguments.Buffers,
        layer: int,
        position: int,
        head: int,
        trace: int,
    ) -> None:
        STAGE_KERNELS[stage][(self.tuning.num_programs,)](
            self._weights[head],
            self._cache,
            buffers,
            steps,
            layer,
            position,
            self.cache.max_positions,
            trace,
            self.spec.rms_norm_eps,
            self._shape,
            self._tiles,
            num_warps=self.tuning.num_warps,
            enable_fp_fusion=True,
        )

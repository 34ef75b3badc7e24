"""The whole decode loop in one cooperative launch (``kernels/persistent.py``)."""

from __future__ import annotations

import torch

from triton_mega.backends import SPIN_LIMIT, BarrierTimeout, StepOutput
from triton_mega.backends.triton_common import TritonBackend, interpreted
from triton_mega.device import DeviceInfo
from triton_mega.kernels import arguments
from triton_mega.kernels.persistent import decode_persistent_kernel, launch_options
from triton_mega.kernels.sync import ERROR, ERROR_INDEX, SYNC_WORDS
from triton_mega.spec import DecoderSpec
from triton_mega.tuning import TuningConfig
from triton_mega.weights import DecoderWeights


class TritonPersistent(TritonBackend):
    """``n`` decode steps per launch, every program resident throughout.

    Args:
        jitter: builds a kernel whose programs idle for different times around every barrier: slow,
            with the same output bits unless a barrier is missing. For tests.
        spin_limit: polls before a program gives up at a barrier.

    Raises:
        ValueError: the grid cannot be resident at once on this GPU, or is larger than one program
            in the interpreter, which runs programs one after another; names the largest that can.
    """

    name = "triton_persistent"

    def __init__(
        self,
        spec: DecoderSpec,
        weights: DecoderWeights,
        *,
        max_positions: int,
        positions: torch.Tensor | None = None,
        tuning: TuningConfig | None = None,
        jitter: bool = False,
        spin_limit: int = SPIN_LIMIT,
    ) -> None:
        super().__init__(
            spec, weights, max_positions=max_positions, positions=positions, tuning=tuning
        )
        self._jitter, self.spin_limit = jitter, spin_limit
        self._sync = torch.zeros(SYNC_WORDS, dtype=torch.int32, device=self.device)
        self._check_resident()

    def synchronize(self) -> None:
        """Waits for the launches so far.

        Raises:
            BarrierTimeout: one of them was abandoned; names program and barrier.
        """
        super().synchronize()  # launches on other streams too
        program, index = self._sync[ERROR : ERROR_INDEX + 1].tolist()
        if program:
            self._sync.zero_()
            raise BarrierTimeout(
                f"program {program - 1} of {self.tuning.num_programs} gave up after "
                f"{self.spin_limit} polls at {self.schedule.barrier_name(index)}; "
                "outputs since the last synchronize are not valid"
            )

    def _run(self, inputs_embeds: torch.Tensor, position: int, head: int) -> StepOutput:
        steps = self._allocate_steps(inputs_embeds)
        self._launch(steps, self._buffers, position, head, trace=0)
        return StepOutput(steps.hidden, steps.logits)

    def _launch(
        self,
        steps: arguments.Steps,
        buffers: arguments.Buffers,
        position: int,
        head: int,
        trace: int,
    ) -> None:
        decode_persistent_kernel[(self.tuning.num_programs,)](
            *self._arguments(steps, buffers, position, head, trace),
            **launch_options(self.tuning.num_warps),
        )

    def _arguments(
        self,
        steps: arguments.Steps,
        buffers: arguments.Buffers,
        position: int,
        head: int,
        trace: int,
    ) -> tuple[object, ...]:
        return (
            self._weights[head],
            self._cache,
            buffers,
            steps,
            self._sync,
            steps.inputs_embeds.shape[0],
            position,
            self.cache.max_positions,
            trace,
            self.spin_limit,
            self.spec.rms_norm_eps,
            self._shape,
            self._tiles,
            self._jitter,
        )

    def _check_resident(self) -> None:
        """Compiles the kernel and refuses a grid that would wait for programs not yet started."""
        programs = self.tuning.num_programs
        if interpreted():
            most, where = 1, "the Triton interpreter"
        else:
            row = torch.zeros(1, self.spec.hidden_size, dtype=torch.bfloat16, device=self.device)
            compiled = decode_persistent_kernel.warmup(
                *self._arguments(self._allocate_steps(row), self._buffers, 0, 0, 0),
                grid=(programs,),
                **launch_options(self.tuning.num_warps),
            )
            compiled._init_handles()
            device = DeviceInfo.read(self.device)
            most = device.resident_programs(
                self.tuning.num_warps, compiled.n_regs, compiled.metadata.shared
            )
            where = f"{device.name} with {device.sm_count} multiprocessors"
        if programs > most:
            raise ValueError(
                f"tuning.num_programs: at most {most} can be resident at once on {where}, "
                f"got {programs}"
            )

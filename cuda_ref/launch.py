"""Loads the compiled kernel on one GPU and launches it cooperatively, through ``cuda.core``."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from cuda.core import Device, LaunchConfig, ObjectCode, Stream, launch

from cuda_ref.arguments import CValue, in_order
from cuda_ref.build import KERNEL, build
from cuda_ref.options import KernelOptions, defines
from triton_mega.device import DeviceInfo
from triton_mega.spec import DecoderSpec

LEGACY_STREAM = 1
"""CUDA's own name for the stream that torch calls 0."""
COOPERATIVE = "is_cooperative" if hasattr(LaunchConfig, "is_cooperative") else "cooperative_launch"
"""Newer releases of cuda.core have renamed the field."""


class LoadedKernel:
    """The kernel for one shape and one choice of options, on one GPU.

    Raises:
        ValueError: the grid cannot be resident as a whole; names the largest that can.
    """

    def __init__(self, spec: DecoderSpec, options: KernelOptions, device: torch.device) -> None:
        self.device = device
        chip = DeviceInfo.read(device)
        with torch.cuda.device(device):
            Device(torch.cuda.current_device()).set_current()
            self._object = ObjectCode.from_cubin(build(defines(spec, options), chip.capability))
            self._kernel = self._object.get_kernel(KERNEL)
            per_sm = self._kernel.occupancy.max_active_blocks_per_multiprocessor(options.threads, 0)
        most = per_sm * chip.sm_count
        if options.blocks > most:
            raise ValueError(
                f"options.blocks: at most {most} can be resident at once on {chip.name} with "
                f"{chip.sm_count} multiprocessors, got {options.blocks}"
            )
        cooperative = {COOPERATIVE: True}
        self._config = LaunchConfig(grid=options.blocks, block=options.threads, **cooperative)

    def launch(self, packed: Mapping[str, CValue]) -> None:
        """Launches on torch's current stream of the device; returns at once."""
        with torch.cuda.device(self.device):
            handle = torch.cuda.current_stream(self.device).cuda_stream or LEGACY_STREAM
            launch(Stream.from_handle(handle), self._config, self._kernel, *in_order(packed))

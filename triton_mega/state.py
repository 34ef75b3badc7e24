"""What a decode loop keeps between launches: the K/V cache.

Knows nothing about kernels; a kernel's scratch buffers are ``backends.triton_common.Workspace``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from triton_mega.spec import DecoderSpec


@dataclass
class KVCache:
    """Keys (after norm and rope) and values of every layer; row ``p`` belongs to position ``p``."""

    k: torch.Tensor  # [L, HKV, T, HD]
    v: torch.Tensor  # [L, HKV, T, HD]

    @classmethod
    def allocate(
        cls,
        spec: DecoderSpec,
        max_positions: int,
        *,
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str = "cpu",
    ) -> KVCache:
        """Returns a cache of ``max_positions`` rows, every unused row poisoned with NaN."""
        if not 0 < max_positions <= spec.max_position_embeddings:
            raise ValueError(
                f"max_positions: expected 1 to {spec.max_position_embeddings} "
                f"(max_position_embeddings), got {max_positions}"
            )
        shape = (spec.num_hidden_layers, spec.num_key_value_heads, max_positions, spec.head_dim)
        k = torch.full(shape, float("nan"), dtype=dtype, device=device)
        return cls(k=k, v=k.clone())

    @property
    def max_positions(self) -> int:
        """Rows of the cache, T."""
        return self.k.shape[2]

    def fill_random(self, rows: int, seed: int) -> None:
        """Fills rows 0 to ``rows`` - 1 with unit normal numbers, the same on every device.

        Rows from ``rows`` on are poisoned with NaN again.
        """
        generator = torch.Generator().manual_seed(seed)
        for tensor in (self.k, self.v):
            shape = (*tensor.shape[:2], rows, tensor.shape[3])
            values = torch.randn(shape, generator=generator, dtype=torch.float32)
            tensor[:, :, :rows] = values.to(tensor.device, tensor.dtype)
            tensor[:, :, rows:] = float("nan")

    def copy_from(self, other: KVCache) -> None:
        """Takes over another cache's rows (dtype and device may differ)."""
        self.k.copy_(other.k)
        self.v.copy_(other.v)

"""Rotary tables from three-axis positions (interleaved multi-section RoPE of Qwen3-TTS).

Frequency ``i`` of the ``head_dim / 2`` is driven by one of three position axes (temporal, height,
width). "Interleaved" says which axis feeds a frequency; the rotated pairs are ``(i, i + HD / 2)``.
Decoding speech always has three equal axes, and then the tables are those of plain RoPE.
"""

from __future__ import annotations

import torch

from triton_mega.spec import DecoderSpec


def frequency_axes(spec: DecoderSpec) -> torch.Tensor:  # [HD / 2] int64
    """Returns which position axis (0 temporal, 1 height, 2 width) drives each frequency.

    Source: ``apply_multimodal_rotary_pos_emb`` of qwen-tts 0.1.1 (``interleaved`` branch).
    """
    axes = torch.zeros(spec.head_dim // 2, dtype=torch.int64)
    if spec.mrope_section is not None:
        for axis in (1, 2):
            axes[axis : spec.mrope_section[axis] * 3 : 3] = axis
    return axes


def rope_tables(
    positions: torch.Tensor,  # [3, T] or [T] integers
    spec: DecoderSpec,
) -> tuple[torch.Tensor, torch.Tensor]:  # [T, HD / 2] fp32 each
    """Returns ``cos`` and ``sin`` of every row's angles, one value per rotated pair.

    A one-axis ``positions`` stands for three equal axes.

    Numerics: angles and their cosines are fp32, computed on the CPU so that every device reads the
    same table.
    """
    if positions.dim() == 1:
        positions = positions.expand(3, -1)
    if positions.dim() != 2 or positions.shape[0] != 3:
        raise ValueError(f"positions: expected [3, T] or [T], got {list(positions.shape)}")
    half = torch.arange(0, spec.head_dim, 2, dtype=torch.int64).float() / spec.head_dim
    inv_freq = 1.0 / (spec.rope_theta**half)
    per_frequency = positions.cpu().float()[frequency_axes(spec)].T.contiguous()  # [T, HD / 2]
    angles = per_frequency * inv_freq
    device = positions.device
    return angles.cos().to(device), angles.sin().to(device)

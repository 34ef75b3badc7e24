"""Tile shapes and grid of the Triton kernels: what may be chosen, results meaning the same.

Knows nothing about compiled code; whether a grid can be resident is asked of the driver at launch
(``backends/triton_common.py``).
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from triton_mega.device import DeviceInfo
from triton_mega.spec import DecoderSpec

PAIRS_PER_WARP = 128
"""Pairs of columns that one warp loads at once: 32 lanes, 16 bytes each."""


@dataclass(frozen=True)
class TuningConfig:
    """Launch shape of the staged and persistent kernels.

    ``<stage>_n`` and ``<stage>_k`` are the rows and columns of the weight tile that a program holds
    in registers; o_proj always takes whole rows. ``splits`` bounds how many programs share one K/V
    head, ``attention_t`` is the cache rows they take at a time, ``splits_at_once`` how many partial
    results are combined at a time. ``source`` says where the choice came from.
    """

    num_programs: int
    num_warps: int
    qkv_n: int
    qkv_k: int
    o_n: int
    gate_up_n: int
    gate_up_k: int
    down_n: int
    down_k: int
    head_n: int
    head_k: int
    attention_t: int
    splits: int
    splits_at_once: int
    source: str = "default"

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name in ("num_programs", "splits"):
                if value < 1:
                    raise ValueError(f"tuning.{field.name}: expected at least 1, got {value}")
            elif field.name != "source" and (value < 1 or value & (value - 1)):
                raise ValueError(f"tuning.{field.name}: expected a power of two, got {value}")
            elif field.name.endswith("_k") and value < 2:
                raise ValueError(f"tuning.{field.name}: expected at least 2 columns, got {value}")


def default_tuning(spec: DecoderSpec, device: DeviceInfo | None) -> TuningConfig:
    """Returns a sound choice for ``spec`` on ``device`` (None: the interpreter, one program).

    One program per multiprocessor, rounded down to a multiple of the K/V head count so that every
    head gets equally many splits: 128 of an H200's 132.
    """
    hidden, ffn = _power_of_two(spec.hidden_size), _power_of_two(spec.intermediate_size)
    if device is None:
        return TuningConfig(
            num_programs=1,
            num_warps=4,
            qkv_n=16,
            qkv_k=min(hidden, 64),
            o_n=16,
            gate_up_n=8,
            gate_up_k=min(hidden, 64),
            down_n=8,
            down_k=min(ffn, 64),
            head_n=8,
            head_k=min(hidden, 64),
            attention_t=8,
            splits=3,
            splits_at_once=2,
        )
    heads = spec.num_key_value_heads
    programs = max(device.sm_count // heads * heads, 1)
    return TuningConfig(
        num_programs=programs,
        num_warps=8,
        qkv_n=16,
        qkv_k=min(hidden, 1024),
        o_n=16,
        gate_up_n=8,
        gate_up_k=min(hidden, 512),
        down_n=8,
        down_k=min(ffn, 512),
        head_n=8,
        head_k=min(hidden, 256),
        attention_t=32,
        splits=max(programs // heads, 1),
        splits_at_once=4,
    )


def check_tuning(tuning: TuningConfig, spec: DecoderSpec) -> None:
    """Raises ValueError where the kernels cannot be built for ``spec`` with this choice.

    Every tile needs at least one row for each of its row groups (``kernels/matvec.py``).
    """
    tiles = {
        "qkv": tuning.qkv_k,
        "o": _power_of_two(spec.q_size),
        "gate_up": tuning.gate_up_k,
        "down": tuning.down_k,
        "head": tuning.head_k,
    }
    for name, columns in tiles.items():
        rows: int = getattr(tuning, f"{name}_n")
        groups = row_groups(columns, tuning.num_warps)
        if rows < groups:
            raise ValueError(
                f"tuning.{name}_n: expected at least {groups} rows for tiles of {columns} columns "
                f"and {tuning.num_warps} warps, got {rows}"
            )


def row_groups(columns: int, num_warps: int) -> int:
    """Groups of rows that the warps of a program form beside a tile of ``columns`` columns."""
    return min(max(num_warps * PAIRS_PER_WARP // (columns // 2), 1), num_warps)


def _power_of_two(size: int) -> int:
    """``size`` rounded up to a power of two."""
    return 1 << (size - 1).bit_length()

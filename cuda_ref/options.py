"""Shapes and launch parameters of the CUDA kernel: what its compiler is told by ``-D``.

Knows nothing about how the kernel is compiled (``build.py``) or launched (``launch.py``).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from triton_mega.device import WARP_SIZE, DeviceInfo
from triton_mega.spec import DecoderSpec

Attention = Literal["split_kv", "one_block_per_head"]
MAX_THREADS = 1024


@dataclass(frozen=True)
class KernelOptions:
    """How the kernel is built and launched; the results mean the same whatever is chosen."""

    blocks: int
    """Blocks of the grid; all must be resident at once."""
    threads: int
    """Threads of a block."""
    batch: int = 4
    """16-byte weight loads that a thread issues, and multiplies, at a time."""
    loads: int = 8
    """16-byte weight loads that a thread keeps under way, across barriers too."""
    attention: Attention = "split_kv"
    """``split_kv``: up to ``splits`` blocks share the rows of a K/V head. ``one_block_per_head``:
    one block has them all, as in the design that this kernel follows."""
    splits: int = 8
    rows_per_split: int = 32
    """No block is given fewer cached rows than this while others have more."""
    prefetch_rows: int = 1024
    """Rows of gate, and of up, that blocks idle in the attention stage fetch into L2; 0: none."""
    evict_first: bool = True
    """Weights leave L2 before anything else does."""
    steps_per_launch: int | None = None
    """Steps in one launch; None: as many as are asked for."""
    jitter: bool = False
    """Blocks idle for different times around every barrier. For tests: slow, same output bits."""

    def __post_init__(self) -> None:
        at_least = {"blocks": 1, "batch": 1, "loads": 1, "splits": 1, "rows_per_split": 1}
        for name, least in {**at_least, "prefetch_rows": 0}.items():
            if getattr(self, name) < least:
                raise ValueError(f"{name}: expected at least {least}, got {getattr(self, name)}")
        if self.threads % WARP_SIZE or not WARP_SIZE <= self.threads <= MAX_THREADS:
            raise ValueError(
                f"threads: expected a multiple of {WARP_SIZE} up to {MAX_THREADS}, "
                f"got {self.threads}"
            )
        if self.attention not in ("split_kv", "one_block_per_head"):
            raise ValueError(
                f"attention: expected split_kv or one_block_per_head, got {self.attention!r}"
            )
        if self.steps_per_launch is not None and self.steps_per_launch < 1:
            raise ValueError(
                f"steps_per_launch: expected at least 1 or None, got {self.steps_per_launch}"
            )

    @property
    def num_splits(self) -> int:
        """Most ranges that the rows of a K/V head are cut into."""
        return self.splits if self.attention == "split_kv" else 1


def default_options(spec: DecoderSpec, device: DeviceInfo) -> KernelOptions:
    """Returns a sound choice: a block per multiprocessor, rounded down to whole K/V heads.

    128 of an H200's 132: its weight rows divide by 128. There 8 warps with 16 loads under way each
    are faster than 16 warps with 8; where rows do not divide evenly, they do not fit the registers.
    """
    heads = spec.num_key_value_heads
    blocks = max(device.sm_count // heads * heads, 1)
    if device.capability[0] == 9:
        return KernelOptions(blocks=blocks, threads=256, batch=8, loads=16)
    return KernelOptions(blocks=blocks, threads=512, batch=4, loads=8)


def defines(spec: DecoderSpec, options: KernelOptions) -> dict[str, int]:
    """Returns the kernel's compile-time constants by name.

    Raises:
        ValueError: the kernel cannot compute this shape; names the field.
    """
    for name, value in (
        ("hidden_size", spec.hidden_size),
        ("intermediate_size", spec.intermediate_size),
        ("head_dim", spec.head_dim),
    ):
        if value % 8:
            raise ValueError(f"{name}: expected a multiple of 8, got {value}")
    if spec.head_dim > 64 and spec.head_dim != 128:
        raise ValueError(f"head_dim: expected up to 64, or 128, got {spec.head_dim}")
    return {
        "LAYERS": spec.num_hidden_layers,
        "HIDDEN": spec.hidden_size,
        "FFN": spec.intermediate_size,
        "Q_HEADS": spec.num_attention_heads,
        "KV_HEADS": spec.num_key_value_heads,
        "HEAD_DIM": spec.head_dim,
        "VOCAB": spec.vocab_size,
        "BLOCKS": options.blocks,
        "THREADS": options.threads,
        "BATCH": options.batch,
        "LOADS": options.loads,
        "SPLITS": options.num_splits,
        "ROWS_PER_SPLIT": options.rows_per_split,
        "PREFETCH_ROWS": min(options.prefetch_rows, spec.intermediate_size),
        "EVICT_FIRST": int(options.evict_first),
        "JITTER": int(options.jitter),
    }


STAGES = ("qkv_proj", "attention", "o_proj", "gate_up_proj", "down_proj")
"""What the kernel does between two grid barriers of a layer, in order."""


def barrier_name(spec: DecoderSpec, index: int) -> str:
    """Names the ``index``-th barrier of a launch by what it follows; 0 is the launch's start."""
    if index == 0:
        return "the launch's start"
    per_step = spec.num_hidden_layers * len(STAGES) + 1
    step, place = divmod(index - 1, per_step)
    if place == per_step - 1:
        return f"step {step}, after lm_head"
    layer, stage = divmod(place, len(STAGES))
    return f"step {step}, layer {layer}, after {STAGES[stage]}"

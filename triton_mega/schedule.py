"""The order of a decode step: stages, barriers, and the bytes and operations each needs.

The only source of byte counts: benchmarks, records and tables all ask here. Knows nothing about how
a stage is computed.
"""

from __future__ import annotations

from dataclasses import dataclass

from triton_mega.spec import DecoderSpec
from triton_mega.tuning import TuningConfig

LAYER_STAGES = ("qkv_proj", "attention", "o_proj", "gate_up_proj", "down_proj")
STAGES = (*LAYER_STAGES, "final_norm", "lm_head")
"""Stage names in order, as in traces; kernels compute ``final_norm`` inside ``lm_head``."""

BF16_BYTES = 2


@dataclass(frozen=True)
class Stage:
    """One stage of one layer (or of the head) at a given position."""

    name: str
    rows: int  # weight rows, or items (K/V head x split) of attention
    blocks: int  # units of work dealt out to programs
    blocks_per_program: int  # of the busiest program
    weight_bytes: int
    kv_bytes: int  # cache rows read and written
    flops: int

    @property
    def bytes(self) -> int:
        """Bytes that must cross device memory."""
        return self.weight_bytes + self.kv_bytes


@dataclass(frozen=True)
class Schedule:
    """A decode step of ``spec`` under ``tuning``."""

    spec: DecoderSpec
    tuning: TuningConfig

    def layer_stages(self, position: int) -> tuple[Stage, ...]:
        """The stages of one layer when the newest row is ``position``."""
        spec, tuning = self.spec, self.tuning
        hidden, ffn = spec.hidden_size, spec.intermediate_size
        norms = spec.head_dim * 2
        rows = position + 1
        items = spec.num_key_value_heads * tuning.splits
        attention = Stage(
            name="attention",
            rows=items,
            blocks=items,
            blocks_per_program=-(-items // tuning.num_programs),
            weight_bytes=norms * BF16_BYTES,
            kv_bytes=2 * spec.kv_size * rows * BF16_BYTES,
            flops=4 * spec.q_size * rows,
        )
        return (
            self._matvec("qkv_proj", spec.qkv_size, hidden, tuning.qkv_n, extra=hidden),
            attention,
            self._matvec("o_proj", hidden, spec.q_size, tuning.o_n),
            self._matvec("gate_up_proj", ffn, hidden, tuning.gate_up_n, matrices=2, extra=hidden),
            self._matvec("down_proj", hidden, ffn, tuning.down_n),
        )

    def head_stage(self) -> Stage:
        """Final norm and one output head."""
        spec = self.spec
        hidden = spec.hidden_size
        return self._matvec("lm_head", spec.vocab_size, hidden, self.tuning.head_n, extra=hidden)

    def step_bytes(self, position: int) -> int:
        """Bytes that one step at ``position`` must move: weights, head, and the cached rows."""
        layer = sum(stage.bytes for stage in self.layer_stages(position))
        return self.spec.num_hidden_layers * layer + self.head_stage().bytes

    @property
    def barriers_per_step(self) -> int:
        """Grid barriers of the persistent kernel in one step."""
        return self.spec.num_hidden_layers * len(LAYER_STAGES)

    def barrier_name(self, index: int) -> str:
        """Names the ``index``-th barrier of a launch by what it follows; 0 stands before the first.

        Nothing is waited for there unless the counter was set back by somebody else.
        """
        if index == 0:
            return "the start of the launch"
        step, place = divmod(index - 1, self.barriers_per_step)
        layer, stage = divmod(place, len(LAYER_STAGES))
        return f"step {step}, layer {layer}, after {LAYER_STAGES[stage]}"

    def __str__(self) -> str:
        rows = [*self.layer_stages(position=0), self.head_stage()]
        lines = [f"{'stage':14}{'blocks':>8}{'each':>6}{'MB':>9}"]
        lines += [
            f"{s.name:14}{s.blocks:>8}{s.blocks_per_program:>6}{s.bytes / 1e6:>9.3f}" for s in rows
        ]
        lines.append(
            f"{self.spec.num_hidden_layers} layers, {self.barriers_per_step} barriers, "
            f"{self.step_bytes(0) / 1e6:.1f} MB a step, {self.tuning.num_programs} programs"
        )
        return "\n".join(lines)

    def _matvec(
        self, name: str, rows: int, columns: int, block_n: int, *, matrices: int = 1, extra: int = 0
    ) -> Stage:
        blocks = -(-rows // block_n)
        return Stage(
            name=name,
            rows=rows * matrices,
            blocks=blocks,
            blocks_per_program=-(-blocks // self.tuning.num_programs),
            weight_bytes=(matrices * rows * columns + extra) * BF16_BYTES,
            kv_bytes=0,
            flops=2 * matrices * rows * columns,
        )

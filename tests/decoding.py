"""A reference decoder with its cache and tables, for tests that decode block by block."""

from __future__ import annotations

import torch

from triton_mega.reference import Contract, DecoderOutput, decode
from triton_mega.rope import rope_tables
from triton_mega.spec import DecoderSpec
from triton_mega.state import KVCache
from triton_mega.weights import DecoderWeights

Trace = dict[str, torch.Tensor]


class Decoding:
    """A cache and tables around ``decode``."""

    def __init__(
        self, spec: DecoderSpec, weights: DecoderWeights, rules: Contract, max_positions: int = 48
    ) -> None:
        self.spec, self.weights, self.rules = spec, weights, rules
        self.cache = KVCache.allocate(spec, max_positions, dtype=rules.kv_dtype)
        self.tables = rope_tables(torch.arange(max_positions), spec)

    def __call__(self, rows: torch.Tensor, position: int, head: int = 0) -> DecoderOutput:
        return self.traced(rows, position, head)[0]

    def traced(
        self, rows: torch.Tensor, position: int, head: int = 0
    ) -> tuple[DecoderOutput, Trace]:
        trace: Trace = {}
        weights, cache, rules = self.weights, self.cache, self.rules
        output = decode(
            self.spec, weights, rows, position, cache, *self.tables, rules, head=head, trace=trace
        )
        return output, trace

"""Is a backend right? Its stages, K/V rows, hidden states and logits against the reference.

What is checked is ``n`` teacher-forced steps at a position, behind a random K/V history. Knows
nothing about time, records of runs, or how results are shown.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from triton_mega.backends import DecodeBackend
from triton_mega.record import Accuracy, Correctness
from triton_mega.reference import CONTRACTS, decode
from triton_mega.rope import rope_tables
from triton_mega.spec import DecoderSpec
from triton_mega.state import KVCache
from triton_mega.testing import first_divergence, relative_error
from triton_mega.weights import DecoderWeights

FP32_BOUND = 1e-4
"""Largest relative error of contract fp32_activations against the fp32 reference."""

KV_BOUND = 2.0**-7
"""Largest relative error of the new K/V rows of contract fp32_activations: one bf16 spacing."""

BF16_FACTORS = {"hf_bf16": 2.0, "bf16_operands": 1.0}
"""Largest error of the other contracts, in units of the official bf16 arithmetic's own."""

Trace = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Reply:
    """Hidden states, logits and new K/V rows of all steps, and the stages of the first one."""

    hidden: torch.Tensor  # [n, D]
    logits: torch.Tensor  # [n, V]
    kv: Trace  # "k" and "v", [L, HKV * n * HD] each
    trace: Trace


@dataclass(frozen=True)
class Oracle:
    """``n`` steps from ``position`` on, and what the reference makes of them."""

    position: int
    rows: torch.Tensor  # [n, D] bf16
    history: KVCache
    exact: Reply
    official: Reply

    @classmethod
    def build(
        cls,
        spec: DecoderSpec,
        weights: DecoderWeights,
        *,
        position: int,
        steps: int,
        max_positions: int,
        seed: int,
    ) -> Oracle:
        """Draws rows and K/V history, and runs the reference over them, row by row.

        Numerics: ``exact`` is fp32 behind a bf16 cache (contract fp32_activations), ``official``
        is the official package's bf16 (contract hf_bf16).
        """
        device = weights.qkv.device
        history = KVCache.allocate(spec, max_positions, device=device)
        history.fill_random(position, seed)
        generator = torch.Generator().manual_seed(seed)
        rows = torch.randn(steps, spec.hidden_size, generator=generator).bfloat16().to(device)

        def reply(contract: str) -> Reply:
            cache = KVCache.allocate(spec, max_positions, device=device)
            cache.copy_from(history)
            return reference_reply(spec, weights, rows, position, cache, contract)

        return cls(position, rows, history, reply("fp32_activations"), reply("hf_bf16"))

    def exact_behind(self, backend: DecodeBackend) -> Reply:
        """Returns the exact reply behind the K/V rows that ``backend`` has written for the steps.

        Two sums that are equally right may round to neighbouring bf16 values of K and V. Behind few
        rows each such element moves what follows by more than ``FP32_BOUND``, which is no error.
        """
        return reference_reply(
            backend.spec,
            backend.weights,
            self.rows,
            self.position,
            backend.cache,
            "fp32_activations",
            kv_given=True,
        )


def reference_reply(
    spec: DecoderSpec,
    weights: DecoderWeights,
    rows: torch.Tensor,  # [n, D]
    position: int,
    cache: KVCache,
    contract: str,
    *,
    head: int = 0,
    kv_given: bool = False,
) -> Reply:
    """Runs the reference row by row, each axis of a position equal; see ``reference.decode``."""
    tables = rope_tables(torch.arange(cache.max_positions), spec)
    cos, sin = (table.to(rows.device) for table in tables)
    first: Trace = {}
    outputs = [
        decode(
            spec,
            weights,
            rows[i : i + 1],
            position + i,
            cache,
            cos,
            sin,
            CONTRACTS[contract],
            head=head,
            trace=None if i else first,
            kv_given=kv_given,
        )
        for i in range(rows.shape[0])
    ]
    hidden, logits = (torch.cat(tensors) for tensors in zip(*outputs, strict=True))
    return Reply(hidden, logits, new_rows(cache, position, len(outputs)), first)


def new_rows(cache: KVCache, position: int, steps: int) -> Trace:
    """Returns a copy of the rows from ``position`` on, "k" and "v", [L, HKV * steps * HD] each."""
    rows = slice(position, position + steps)
    return {name: getattr(cache, name)[:, :, rows].flatten(1).clone() for name in ("k", "v")}


@dataclass(frozen=True)
class Check:
    """What a backend's steps at one position are worth: the ticket for being timed there."""

    backend: DecodeBackend
    oracle: Oracle
    correctness: Correctness


def check_backend(backend: DecodeBackend, oracle: Oracle) -> Check:
    """Runs the oracle's steps on a backend and compares stages, K/V rows, hidden states and logits.

    Stages are those of the first step; a backend that does not show them is judged by the rest.
    """
    factor = BF16_FACTORS.get(backend.contract)
    backend.cache.copy_from(oracle.history)
    try:
        trace = backend.trace_step(oracle.rows[:1], oracle.position)
    except NotImplementedError:
        trace = None
    backend.cache.copy_from(oracle.history)
    output = backend.run_steps(oracle.rows, oracle.position)
    backend.synchronize()
    exact, official = oracle.exact, oracle.official
    if factor is None:
        exact = oracle.exact_behind(backend)

    def accuracy(
        got: torch.Tensor, want: torch.Tensor, baseline: torch.Tensor, bound: float = FP32_BOUND
    ) -> Accuracy:
        baseline_error = relative_error(baseline, want)
        bound = bound if factor is None else factor * baseline_error
        return Accuracy(relative_error(got, want), bound, baseline_error)

    kv = new_rows(backend.cache, oracle.position, oracle.rows.shape[0])
    yardsticks = (None, None) if factor is None else (official.trace, official.kv)
    divergence = first_divergence(kv, oracle.exact.kv, factor or KV_BOUND, yardsticks[1])
    stages = {
        name: accuracy(kv[name], oracle.exact.kv[name], official.kv[name], KV_BOUND) for name in kv
    }
    if trace is not None:
        first = first_divergence(trace, exact.trace, factor or FP32_BOUND, yardsticks[0])
        divergence = first or divergence
        stages |= {
            stage: accuracy(trace[stage], exact.trace[stage], official.trace[stage])
            for stage in exact.trace
        }
    agreed = output.logits.argmax(-1) == exact.logits.argmax(-1)
    correctness = Correctness(
        contract=backend.contract,
        hidden=accuracy(output.hidden, exact.hidden, official.hidden),
        logits=accuracy(output.logits, exact.logits, official.logits),
        stages=stages,
        first_divergence=None if divergence is None else str(divergence),
        argmax_agreement=float(agreed.float().mean()),
        steps_checked=oracle.rows.shape[0],
    )
    return Check(backend, oracle, correctness)

"""A decoder step in plain torch with static shapes, replayed as one CUDA graph; and compiled.

These are what a user gets without writing a kernel, so nothing is left on the table: stacked
q/k/v and gate/up products, torch's fused norm and attention, no host work inside a step. A graph is
captured per bucket of cache rows (256, 512, 1024, ...), so that an early position does not pay for
a long cache, and per lm head.

Numerics: contract ``hf_bf16`` in kind, not bit for bit: activations, K/V and every product's output
are bf16, but torch's fused operations round once where the official code rounds after each part
(row N1 of the contract's table for the hidden norms, R2, A2 and A3), and Inductor keeps in fp32
whatever it fuses.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from triton_mega.backends import BackendUnavailable, DecodeBackend, StepOutput
from triton_mega.backends.torch_common import cache_version
from triton_mega.spec import DecoderSpec
from triton_mega.toolchain import launcher_fault
from triton_mega.weights import DecoderWeights, layer_parts

FIRST_BUCKET = 256
WARMUP_RUNS = 3
"""Runs before a capture: compile, choose products' algorithms, allocate their workspaces."""

Replay = Callable[[], tuple[torch.Tensor, torch.Tensor]]


def bucket_rows(position: int, max_positions: int) -> int:
    """Cache rows that a step at ``position`` reads: the smallest bucket that holds it."""
    rows = FIRST_BUCKET
    while rows <= position:
        rows *= 2
    return min(rows, max_positions)


def layer_weights(spec: DecoderSpec, weights: DecoderWeights) -> list[dict[str, torch.Tensor]]:
    """Each layer's tensors by packed name; q_norm and k_norm become ``qk_norm`` [HQ + HKV, HD]."""
    heads = (spec.num_attention_heads, spec.num_key_value_heads)
    layers = []
    for i in range(spec.num_hidden_layers):
        layer = {name: getattr(weights, name)[i] for name in layer_parts(spec)}
        norms = (layer.pop("q_norm"), layer.pop("k_norm"))
        expanded = [norm.expand(n, -1) for norm, n in zip(norms, heads, strict=True)]
        layers.append(layer | {"qk_norm": torch.cat(expanded)})
    return layers


def begin(
    position: torch.Tensor,  # [1] int64
    cos: torch.Tensor,  # [T, HD] bf16
    sin: torch.Tensor,  # [T, HD] bf16, first half negated
    rows: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns what all layers share: the position's cos and sin, and the mask over ``rows``."""
    visible = torch.arange(rows, device=position.device) <= position
    mask = torch.zeros(rows, dtype=cos.dtype, device=position.device)
    mask = mask.masked_fill(~visible, float("-inf"))  # [rows] bf16
    return cos.index_select(0, position), sin.index_select(0, position), mask


def layer(
    x: torch.Tensor,  # [1, D] bf16
    weights: dict[str, torch.Tensor],
    k_cache: torch.Tensor,  # [HKV, T, HD] bf16, row `position` is written
    v_cache: torch.Tensor,  # [HKV, T, HD] bf16, row `position` is written
    position: torch.Tensor,  # [1] int64
    cos: torch.Tensor,  # [1, HD] bf16
    sin: torch.Tensor,  # [1, HD] bf16
    mask: torch.Tensor,  # [rows] bf16
    eps: float,
    attention: Callable[..., torch.Tensor],
) -> torch.Tensor:  # [1, D] bf16
    """Runs one decoder layer over one row and appends its K/V to the cache."""
    (kv_heads, _, head_dim), hidden = k_cache.shape, x.shape[-1:]
    h = F.rms_norm(x, hidden, weights["input_norm"], eps)
    heads = F.linear(h, weights["qkv"]).view(-1, head_dim)
    qk, v = heads[:-kv_heads], heads[-kv_heads:]
    qk = F.rms_norm(qk, (head_dim,), None, eps) * weights["qk_norm"]
    qk = torch.addcmul(qk * cos, qk.roll(head_dim // 2, -1), sin)
    k_cache.index_copy_(1, position, qk[-kv_heads:, None])
    v_cache.index_copy_(1, position, v[:, None])
    rows = mask.shape[0]
    q = qk[:-kv_heads].view(kv_heads, -1, head_dim)
    attended = attention(q, k_cache[:, :rows], v_cache[:, :rows], mask).reshape(1, -1)
    x = x + F.linear(attended, weights["o"])
    h = F.rms_norm(x, hidden, weights["post_attention_norm"], eps)
    gate, up = F.linear(h, weights["gate_up"]).chunk(2, dim=-1)
    return x + F.linear(F.silu(gate) * up, weights["down"])


def finish(
    x: torch.Tensor,  # [1, D] bf16
    norm: torch.Tensor,  # [D] bf16
    lm_head: torch.Tensor,  # [V, D] bf16
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the final hidden row [1, D] and its logits [1, V]."""
    hidden = F.rms_norm(x, x.shape[-1:], norm, eps)
    return hidden, F.linear(hidden, lm_head)


def fused_attention(
    q: torch.Tensor,  # [HKV, HQ / HKV, HD]
    k: torch.Tensor,  # [HKV, rows, HD]
    v: torch.Tensor,  # [HKV, rows, HD]
    mask: torch.Tensor,  # [rows]
) -> torch.Tensor:  # [HKV, HQ / HKV, HD]
    """Attention as torch's one fused operation; the query heads of a K/V head are its rows."""
    attended: torch.Tensor = F.scaled_dot_product_attention(
        q[None], k[None], v[None], attn_mask=mask[None]
    )
    return attended[0]


def summed_attention(
    q: torch.Tensor,  # [HKV, HQ / HKV, HD]
    k: torch.Tensor,  # [HKV, rows, HD]
    v: torch.Tensor,  # [HKV, rows, HD]
    mask: torch.Tensor,  # [rows]
) -> torch.Tensor:  # [HKV, HQ / HKV, HD]
    """The same as products and sums, which a compiler turns into fused reductions over all SMs."""
    scores = (q[:, :, None].float() * k[:, None].float()).sum(-1) * q.shape[-1] ** -0.5 + mask
    weighted = scores.softmax(-1)[..., None] * v[:, None].float()
    attended: torch.Tensor = weighted.sum(-2)
    return attended.to(q.dtype)


class TorchGraph(DecodeBackend):
    """A static-shape torch step in a CUDA graph: one replay per step, inputs copied in.

    The first call in a bucket of cache rows, and with a new head, captures a graph. Cache rows from
    ``position`` on that hold NaN are zeroed when somebody else has written the cache: static shapes
    read them with weight 0, and 0 * NaN is NaN.
    """

    name = "torch_graph"
    contract = "hf_bf16"
    attention: Callable[..., torch.Tensor] = staticmethod(fused_attention)

    def __init__(
        self,
        spec: DecoderSpec,
        weights: DecoderWeights,
        *,
        max_positions: int,
        positions: torch.Tensor | None = None,
    ) -> None:
        self.check_available(weights.qkv.device)
        super().__init__(spec, weights, max_positions=max_positions, positions=positions)
        self._layers = layer_weights(spec, weights)
        self._cos = torch.cat((self.cos, self.cos), dim=-1).bfloat16()
        self._sin = torch.cat((-self.sin, self.sin), dim=-1).bfloat16()
        self._x = torch.zeros(1, spec.hidden_size, dtype=torch.bfloat16, device=self.device)
        self._position = torch.zeros(1, dtype=torch.int64, device=self.device)
        self._replays: dict[tuple[int, int], Replay] = {}
        self._seen: tuple[int, int] | None = None
        self._finite_from = 0
        self._begin = self._prepare(begin)
        self._layer = self._prepare(layer)
        self._finish = self._prepare(finish)

    @classmethod
    def check_available(cls, device: torch.device) -> None:
        if device.type != "cuda":
            raise BackendUnavailable(
                cls.name,
                f"CUDA graphs need an NVIDIA GPU, the weights are on {device}",
                "torch_eager runs the same step on the CPU",
            )

    @torch.no_grad()
    def _run(self, inputs_embeds: torch.Tensor, position: int, head: int) -> StepOutput:
        self._zero_unused_rows(position)
        n, spec = inputs_embeds.shape[0], self.spec
        hidden = inputs_embeds.new_empty(n, spec.hidden_size)
        logits = inputs_embeds.new_empty(n, spec.vocab_size)
        for i in range(n):
            self._x.copy_(inputs_embeds[i : i + 1])
            self._position.fill_(position + i)
            key = bucket_rows(position + i, self.cache.max_positions), head
            if key not in self._replays:
                self._replays[key] = self._capture(partial(self._step, *key))
            row_hidden, row_logits = self._replays[key]()
            hidden[i], logits[i] = row_hidden[0], row_logits[0]
        self._seen = cache_version(self.cache)
        return StepOutput(hidden, logits)

    def _step(self, rows: int, head: int) -> tuple[torch.Tensor, torch.Tensor]:
        """One step on the static inputs; static shapes only, nothing read back by the host."""
        x, eps = self._x, self.spec.rms_norm_eps
        cos, sin, mask = self._begin(self._position, self._cos, self._sin, rows)
        caches = zip(self.cache.k, self.cache.v, strict=True)
        for weights, (k, v) in zip(self._layers, caches, strict=True):
            x = self._layer(x, weights, k, v, self._position, cos, sin, mask, eps, self.attention)
        output: tuple[torch.Tensor, torch.Tensor] = self._finish(
            x, self.weights.norm, self.weights.lm_head[head], eps
        )
        return output

    def _prepare(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """What is captured in place of a part of the step: the part itself."""
        return function

    def _capture(self, step: Replay) -> Replay:
        """Records ``step`` in a CUDA graph and returns its replay, whose output is overwritten.

        A stream of its own gives each engine its own cuBLAS workspace: two engines' graphs may run
        at once.
        """
        if not self._replays:
            self._stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
            self._pool = torch.cuda.graph_pool_handle()
        current = torch.cuda.current_stream(self.device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            for _ in range(WARMUP_RUNS):
                step()
        current.wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
            output = step()

        def replay() -> tuple[torch.Tensor, torch.Tensor]:
            graph.replay()
            return output

        return replay

    def _zero_unused_rows(self, position: int) -> None:
        if cache_version(self.cache) == self._seen and position >= self._finite_from:
            return
        for tensor in (self.cache.k, self.cache.v):
            unused = tensor[:, :, position:]
            unused.masked_fill_(unused.isnan(), 0.0)
        self._finite_from = position


class TorchCompileGraph(TorchGraph):
    """The same step through ``torch.compile``, autotuned by Inductor, in the same CUDA graph.

    Layers share one compiled function, so the first call takes tens of seconds, not minutes.
    Products with one row become Inductor's own reductions (``coordinate_descent_tuning``, part of
    the mode), which fuse with the norm before and the add after them.
    """

    name = "torch_compile"
    attention = staticmethod(summed_attention)

    @classmethod
    def check_available(cls, device: torch.device) -> None:
        super().check_available(device)
        if fault := launcher_fault():
            raise BackendUnavailable(cls.name, *fault)

    def _prepare(self, function: Callable[..., Any]) -> Callable[..., Any]:
        return torch.compile(
            function, mode="max-autotune-no-cudagraphs", fullgraph=True, dynamic=False
        )

    def _capture(self, step: Replay) -> Replay:
        # One entry per spec, cache size and bucket; past the default limit compiling would fail.
        with torch._dynamo.config.patch(recompile_limit=256):
            return super()._capture(step)

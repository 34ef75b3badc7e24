"""One decoder stack in plain torch, one function per stage: what every kernel is checked against.

The stages have the names of ``DecodeBackend.trace_step``. A function takes ``n`` consecutive rows,
so the same code runs a prefill and a single step. Where values are rounded is the contract's
business (``contract.py``, cited by row). Knows nothing about kernels, sampling or how an input row
is made.

Numerics: with the ``hf_*`` contracts, the operations and their shapes are those of the official
package at batch 1, so the bits agree in one process. On CUDA, torch must not be allowed to use
TF32 in fp32 products (its default). Weights are widened one stage at a time.
"""

from __future__ import annotations

from collections import defaultdict
from typing import NamedTuple

import torch
import torch.nn.functional as F

from triton_mega.reference.contract import Contract
from triton_mega.spec import DecoderSpec
from triton_mega.state import KVCache
from triton_mega.weights import DecoderWeights


class DecoderOutput(NamedTuple):
    """What ``decode`` returns for ``n`` rows, in the contract's activation dtype."""

    hidden: torch.Tensor  # [n, D] after the final norm
    logits: torch.Tensor  # [n, V]


@torch.no_grad()
def decode(
    spec: DecoderSpec,
    weights: DecoderWeights,
    inputs_embeds: torch.Tensor,  # [n, D] bf16 or wider
    position: int,
    cache: KVCache,
    cos: torch.Tensor,  # [T, HD / 2] fp32, row = cache row
    sin: torch.Tensor,  # [T, HD / 2] fp32
    contract: Contract,
    *,
    head: int = 0,
    trace: dict[str, torch.Tensor] | None = None,
    kv_given: bool = False,
) -> DecoderOutput:
    """Decodes ``n`` rows at ``position`` onward, causally, and appends their K/V to the cache.

    Args:
        cache: rows before ``position`` are read, rows from it on are written, later ones ignored;
            its dtype is the contract's ``kv_dtype``.
        head: which lm head.
        trace: where given, is filled with every stage's output for the last row, with the keys and
            shapes of ``DecodeBackend.trace_step``, in fp32 (fp64 in an fp64 oracle).
        kv_given: the cache holds the K/V of these rows too, and is not written. For the oracle of a
            decoder that has written them: two equally good sums may round to two neighbours (C1),
            and that difference is none of the stages that follow.

    Raises:
        ValueError: a shape, the position, the head or the cache's dtype is wrong; says which.
    """
    _check(spec, inputs_embeds, position, cache, cos, contract, head)
    stages: defaultdict[str, list[torch.Tensor]] = defaultdict(list)

    def traced(stage: str, value: torch.Tensor) -> torch.Tensor:
        if trace is not None:
            stages[stage].append(value[-1].to(contract.wide_dtype))
        return value

    x = inputs_embeds.to(contract.activation_dtype)  # X1
    for i in range(spec.num_hidden_layers):
        qkv = traced("qkv_proj", qkv_proj(x, i, spec, weights, contract))
        attended = attention(qkv, i, spec, weights, position, cache, cos, sin, contract, kv_given)
        traced("attention", attended)
        x = traced("o_proj", o_proj(attended, x, i, weights, contract))
        gated = traced("gate_up_proj", gate_up_proj(x, i, spec, weights, contract))
        x = traced("down_proj", down_proj(gated, x, i, weights, contract))
    hidden = traced("final_norm", final_norm(x, spec, weights, contract))
    logits = traced("lm_head", lm_head(hidden, head, weights, contract))
    if trace is not None:
        for stage, values in stages.items():
            once = stage in ("final_norm", "lm_head")
            trace[stage] = values[0] if once else torch.stack(values)
    return DecoderOutput(hidden, logits)


def qkv_proj(
    x: torch.Tensor,  # [n, D] residual stream
    layer: int,
    spec: DecoderSpec,
    weights: DecoderWeights,
    contract: Contract,
) -> torch.Tensor:  # [n, (HQ + 2 HKV) * HD]
    """Returns q, k and v of every head, before head norm and rope."""
    h = rms_norm(x, weights.input_norm[layer], spec.rms_norm_eps, contract)
    # One product each, as in the official package: a stacked one may round differently.
    parts = torch.split(weights.qkv[layer], [spec.q_size, spec.kv_size, spec.kv_size])
    return torch.cat([linear(h, part, contract) for part in parts], dim=-1)


def attention(
    qkv: torch.Tensor,  # [n, (HQ + 2 HKV) * HD]
    layer: int,
    spec: DecoderSpec,
    weights: DecoderWeights,
    position: int,
    cache: KVCache,
    cos: torch.Tensor,  # [T, HD / 2] fp32
    sin: torch.Tensor,  # [T, HD / 2] fp32
    contract: Contract,
    kv_given: bool = False,
) -> torch.Tensor:  # [n, HQ * HD]
    """Norms and rotates q and k, appends k and v to the cache, and attends to all rows so far."""
    n = qkv.shape[0]
    heads = qkv.view(n, -1, spec.head_dim).transpose(0, 1)  # [HQ + 2 HKV, n, HD]
    kv_heads = spec.num_key_value_heads
    q, k, v = torch.split(heads, [spec.num_attention_heads, kv_heads, kv_heads])
    q = rms_norm(q, weights.q_norm[layer], spec.rms_norm_eps, contract)
    k = rms_norm(k, weights.k_norm[layer], spec.rms_norm_eps, contract)
    rows = slice(position, position + n)
    q = rotate(q, cos[rows], sin[rows], contract)
    k = rotate(k, cos[rows], sin[rows], contract)
    if not kv_given:
        append(cache, layer, position, k, v)
    k, v = (rows_so_far[layer, :, : position + n] for rows_so_far in (cache.k, cache.v))
    return attend(q, k, v, contract).transpose(0, 1).reshape(n, spec.q_size)


def o_proj(
    attended: torch.Tensor,  # [n, HQ * HD]
    residual: torch.Tensor,  # [n, D]
    layer: int,
    weights: DecoderWeights,
    contract: Contract,
) -> torch.Tensor:  # [n, D]
    """Returns the residual stream after attention."""
    return residual + linear(attended, weights.o[layer], contract)  # X2


def gate_up_proj(
    x: torch.Tensor,  # [n, D] residual stream
    layer: int,
    spec: DecoderSpec,
    weights: DecoderWeights,
    contract: Contract,
) -> torch.Tensor:  # [n, F]
    """Returns silu(gate) * up."""
    h = rms_norm(x, weights.post_attention_norm[layer], spec.rms_norm_eps, contract)
    gate, up = (linear(h, part, contract) for part in weights.gate_up[layer].chunk(2))
    return F.silu(gate) * up  # M1, M2


def down_proj(
    gated: torch.Tensor,  # [n, F]
    residual: torch.Tensor,  # [n, D]
    layer: int,
    weights: DecoderWeights,
    contract: Contract,
) -> torch.Tensor:  # [n, D]
    """Returns the residual stream after the MLP: the layer's output."""
    return residual + linear(gated, weights.down[layer], contract)  # X2


def final_norm(
    x: torch.Tensor,  # [n, D] residual stream
    spec: DecoderSpec,
    weights: DecoderWeights,
    contract: Contract,
) -> torch.Tensor:  # [n, D]
    """Returns the hidden state that the lm head, and the code predictor, read."""
    return rms_norm(x, weights.norm, spec.rms_norm_eps, contract)


def lm_head(
    hidden: torch.Tensor,  # [n, D]
    head: int,
    weights: DecoderWeights,
    contract: Contract,
) -> torch.Tensor:  # [n, V]
    """Returns the logits of one untied head."""
    return linear(hidden, weights.lm_head[head], contract)  # L1


def rms_norm(
    x: torch.Tensor,  # [..., N]
    weight: torch.Tensor,  # [N] bf16
    eps: float,
    contract: Contract,
) -> torch.Tensor:  # [..., N]
    """Returns ``x / sqrt(mean(x^2) + eps) * weight`` over the last axis."""
    wide = x.to(contract.wide_dtype)
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return weight.to(x.dtype) * normed.to(x.dtype)  # N2, N1


def linear(
    x: torch.Tensor,  # [n, K]
    weight: torch.Tensor,  # [N, K] bf16
    contract: Contract,
) -> torch.Tensor:  # [n, N]
    """Returns ``x @ weight.T``."""
    return F.linear(operand(x, contract), weight.to(x.dtype))  # P2


def operand(x: torch.Tensor, contract: Contract) -> torch.Tensor:
    """Returns a product's input as the product sees it (P1, A1, A5), in its own dtype."""
    return x if contract.operand_dtype is None else x.to(contract.operand_dtype).to(x.dtype)


def rotate(
    x: torch.Tensor,  # [H, n, HD]
    cos: torch.Tensor,  # [n, HD / 2] fp32
    sin: torch.Tensor,  # [n, HD / 2] fp32
    contract: Contract,
) -> torch.Tensor:  # [H, n, HD]
    """Rotates the pairs ``(i, i + HD / 2)`` of every head by its row's angles."""
    cos, sin = (torch.cat((t, t), dim=-1).to(contract.activation_dtype) for t in (cos, sin))  # R1
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin  # R2, R3


def append(
    cache: KVCache,
    layer: int,
    position: int,
    k: torch.Tensor,  # [HKV, n, HD]
    v: torch.Tensor,  # [HKV, n, HD]
) -> None:
    """Writes ``n`` rows of a layer's K and V at ``position``, rounded to the cache's dtype (C1)."""
    rows = slice(position, position + k.shape[1])
    cache.k[layer, :, rows] = k.to(cache.k.dtype)
    cache.v[layer, :, rows] = v.to(cache.v.dtype)


def attend(
    q: torch.Tensor,  # [HQ, n, HD]
    k: torch.Tensor,  # [HKV, T, HD], the last n rows are those of q
    v: torch.Tensor,  # [HKV, T, HD]
    contract: Contract,
) -> torch.Tensor:  # [HQ, n, HD]
    """Causal attention of the newest ``n`` rows; ``HQ / HKV`` query heads share one K/V head."""
    heads, n, head_dim = q.shape
    k, v = (t.to(q.dtype).repeat_interleave(heads // t.shape[0], dim=0) for t in (k, v))
    scores = torch.matmul(operand(q, contract), k.transpose(1, 2)) * head_dim**-0.5  # A2, A3
    if n > 1:
        total = k.shape[1]
        visible = torch.ones(n, total, dtype=torch.bool, device=q.device).tril(total - n)
        scores = scores.masked_fill(~visible, float("-inf"))
    probabilities = scores.softmax(-1, dtype=contract.wide_dtype).to(q.dtype)  # A4, A5
    return torch.matmul(operand(probabilities, contract), v)  # A6


def _check(
    spec: DecoderSpec,
    inputs_embeds: torch.Tensor,
    position: int,
    cache: KVCache,
    cos: torch.Tensor,
    contract: Contract,
    head: int,
) -> None:
    shape = list(inputs_embeds.shape)
    if len(shape) != 2 or shape[0] < 1 or shape[1] != spec.hidden_size:
        raise ValueError(f"inputs_embeds: expected [n, {spec.hidden_size}], got {shape}")
    if cache.k.dtype != contract.kv_dtype:
        raise ValueError(
            f"cache: expected {contract.kv_dtype} under contract {contract.name}, "
            f"got {cache.k.dtype}"
        )
    rows = min(cache.max_positions, cos.shape[0])
    if position < 0 or position + shape[0] > rows:
        raise ValueError(
            f"position: {position} + {shape[0]} rows does not fit the {rows} rows "
            f"of cache and rotary tables"
        )
    if not 0 <= head < spec.num_lm_heads:
        raise ValueError(f"head: expected 0 to {spec.num_lm_heads - 1}, got {head}")

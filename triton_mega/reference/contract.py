"""Rounding contracts, and the one table of every point where a decoder step rounds.

Each column is the dtype that a value is rounded to at that point. Products accumulate in fp32 under
every contract and round once, at their output. Kernels cite a row by its name.

====  ===========================================  =======  =======  ================  =============
row   value                                        hf_bf16  hf_fp32  fp32_activations  bf16_operands
====  ===========================================  =======  =======  ================  =============
X1    input row                                    bf16     fp32     bf16              bf16
N1    RMSNorm before its weight (statistics fp32)  bf16     fp32     fp32              fp32
N2    RMSNorm after its weight                     bf16     fp32     fp32              fp32
P1    input of a product with a weight matrix      bf16     fp32     fp32              bf16
P2    output of a product with a weight matrix     bf16     fp32     fp32              fp32
R1    cos and sin                                  bf16     fp32     fp32              fp32
R2    each of the two products of a rotation       bf16     fp32     fp32              fp32
R3    their sum                                    bf16     fp32     fp32              fp32
C1    k and v, cached and used (newest row too)    bf16     fp32     bf16              bf16
A1    q, input of q . k                            bf16     fp32     fp32              bf16
A2    q . k                                        bf16     fp32     fp32              fp32
A3    q . k * HD^-0.5                              bf16     fp32     fp32              fp32
A4    softmax: maximum, exponentials, sum          fp32     fp32     fp32              fp32
A5    probabilities, normalised, input of p . v    bf16     fp32     fp32              bf16
A6    p . v                                        bf16     fp32     fp32              fp32
M1    silu(gate)                                   bf16     fp32     fp32              fp32
M2    silu(gate) * up                              bf16     fp32     fp32              fp32
X2    each residual add                            bf16     fp32     fp32              fp32
L1    logits                                       bf16     fp32     fp32              fp32
====  ===========================================  =======  =======  ================  =============

N1 and N2 hold for the norms of a layer, for the head norms of q and k, and for the final norm. P1
and P2 hold for q, k, v, o, gate, up, down and the lm head. Where a P1 follows N2, M2 or A6, both
apply. Weights are bf16; wider arithmetic widens them exactly.

``hf_bf16`` and ``hf_fp32`` are the official package's arithmetic with its ``eager`` attention.
Source: ``modeling_qwen3_tts.py`` of qwen-tts 0.1.1. Knows nothing about how a stage is computed.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch


@dataclass(frozen=True)
class Contract:
    """The dtypes that values are rounded to; the module's table says which value is which."""

    name: str
    activation_dtype: torch.dtype
    """Every row but P1, A1, A5 and C1."""
    operand_dtype: torch.dtype | None
    """Rows P1, A1 and A5; None where they are left as activations."""
    kv_dtype: torch.dtype
    """Row C1, and the dtype of the cache."""

    @property
    def wide_dtype(self) -> torch.dtype:
        """Dtype of norm statistics and softmax: fp32, or fp64 in an fp64 oracle."""
        return torch.promote_types(self.activation_dtype, torch.float32)

    def in_fp64(self) -> Contract:
        """Returns the same contract with fp64 in place of fp32: its oracle, for small shapes.

        Raises:
            ValueError: the contract's activations are not fp32.
        """
        if self.activation_dtype != torch.float32:
            raise ValueError(f"{self.name}: expected float32 activations to widen to float64")
        kv_dtype = torch.float64 if self.kv_dtype == torch.float32 else self.kv_dtype
        return replace(
            self, name=f"{self.name}_fp64", activation_dtype=torch.float64, kv_dtype=kv_dtype
        )


CONTRACTS: dict[str, Contract] = {
    contract.name: contract
    for contract in (
        Contract("hf_bf16", torch.bfloat16, None, torch.bfloat16),
        Contract("hf_fp32", torch.float32, None, torch.float32),
        Contract("fp32_activations", torch.float32, None, torch.bfloat16),
        Contract("bf16_operands", torch.float32, torch.bfloat16, torch.bfloat16),
    )
}
"""Every rounding contract by its name."""

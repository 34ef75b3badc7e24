"""RMS norm of a vector that every program computes for itself.

Numerics: fp32; the sum of squares is taken elementwise over chunks, then as a tree over a chunk.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def rms_norm(x, weight, eps, SIZE: tl.constexpr):
    """``x / rms(x) * weight`` for ``matvec.load_halves`` chunks (zero past SIZE)."""
    low, high = x[0]
    squares = low * low + high * high
    for i in tl.static_range(1, len(x)):
        low, high = x[i]
        squares += low * low + high * high
    rstd = tl.rsqrt(tl.sum(squares, axis=2) / SIZE + eps)[:, :, None]
    normed = ()
    for i in tl.static_range(len(x)):
        low, high = x[i]
        low_weight, high_weight = weight[i]
        normed = normed + ((low * rstd * low_weight, high * rstd * high_weight),)
    return normed

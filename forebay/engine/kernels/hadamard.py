"""The Hadamard transform: what spreads a few large values over all that share a scale with them, before 8 bits.

The twin of ``spread`` in common.h, to the bit. The idea is QuaRot's (Ashkboos et al., 2024).
"""

from __future__ import annotations

import torch


def spread(x: torch.Tensor, block: int) -> torch.Tensor:
    """Transform of the last dimension in blocks of ``block`` values, a power of two; float32, not scaled: twice gives
    x * block, and x . y = spread(x) . spread(y) / block."""
    x, half = x.float(), 1
    while half < block:
        a, b = x.reshape(*x.shape[:-1], -1, 2, half).unbind(-2)
        x = torch.stack([a + b, a - b], -2).flatten(-3)
        half *= 2
    return x

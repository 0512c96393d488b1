"""The small pieces of a decoder layer."""

from __future__ import annotations

import math

import torch

from .spec import RopeSpec


def rope_frequencies(rope: RopeSpec, head_dim: int, factors: torch.Tensor | None) -> torch.Tensor:
    """Angles per position of each pair of dims, float32 [head_dim / 2].

    ``llama3`` keeps short wavelengths, divides long ones by the factor and blends between (Llama 3.1's scaling).
    ``factors`` is that blend as a GGUF file stores it, ready to divide by.
    """
    freqs = 1.0 / rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    if rope.kind == "linear":
        freqs = freqs / rope.factor
    elif rope.kind == "llama3":
        wavelength = 2 * math.pi / freqs
        keep = (rope.original / wavelength - rope.low) / (rope.high - rope.low)
        keep = keep.clamp(0, 1)
        freqs = freqs * keep + freqs / rope.factor * (1 - keep)
    return freqs if factors is None else freqs / factors


def rope_tables(positions: torch.Tensor, freqs: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin [N, 1, head_dim] for the rows' positions [N]; sin carries the sign of the rotated half."""
    angles = positions.float()[:, None] * freqs
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([cos, cos], -1)[:, None].to(dtype), torch.cat([-sin, sin], -1)[:, None].to(dtype)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary embedding of [N, heads, dim], pairs (i, i + dim / 2)."""
    half = x.shape[-1] // 2
    return torch.addcmul(x * cos, x.roll(half, -1), sin)

"""The one decoder: pre-norm, rotary, grouped-query attention, gated SiLU. Other families become settings of it."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from ..attention.base import Attention
from ..batch import Batch
from .layers import rope_frequencies, rope_tables, rotate
from .spec import ModelSpec
from .weights import Weights


class Decoder:
    def __init__(self, spec: ModelSpec, weights: Weights) -> None:
        self.spec = spec
        self.weights = weights
        self._freqs = rope_frequencies(spec.rope, spec.head_dim, weights.rope_factors).to(weights.norm.device)

    def forward(self, batch: Batch, attention: Attention) -> torch.Tensor:
        """Logits [S, vocab] in float32 of the rows that sample. K and V of all rows are in their pages after it."""
        spec, weights = self.spec, self.weights
        device, dtype = weights.norm.device, weights.norm.dtype
        n_rotated = spec.n_heads + spec.n_kv_heads
        attention.begin(batch)
        cos, sin = rope_tables(torch.from_numpy(batch.positions).to(device), self._freqs, dtype)
        x = weights.embed(torch.from_numpy(batch.ids).to(device))
        for i, layer in enumerate(weights.layers):
            qkv = layer.qkv(self._norm(x, layer.attn_norm)).view(len(x), -1, spec.head_dim)
            qkv[:, :n_rotated] = rotate(qkv[:, :n_rotated], cos, sin)
            attended = attention.attend(i, qkv[:, : spec.n_heads], qkv[:, spec.n_heads :])
            x = x + layer.out(attended)
            gate, up = layer.gate_up(self._norm(x, layer.ffn_norm)).chunk(2, -1)
            x = x + layer.down(F.silu(gate) * up)
        last = x[torch.from_numpy(batch.sample_rows).to(device)]
        return weights.head(self._norm(last, weights.norm)).float()

    def _norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, weight.shape, weight, self.spec.norm_eps)

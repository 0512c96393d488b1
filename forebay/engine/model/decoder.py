"""The one decoder: pre-norm, rotary, grouped-query attention, gated MLP. A family is a setting of it (ModelSpec)."""

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
        ropes = {layer.rope for layer in spec.layers if layer.rope}
        self._freqs = {
            rope: rope_frequencies(rope, spec.head_dim, weights.rope_factors).to(weights.norm.device) for rope in ropes
        }

    def forward(self, batch: Batch, attention: Attention) -> torch.Tensor:
        """Logits [S, vocab] in float32 of the rows that sample. K and V of all rows are in their pages after it."""
        spec, weights = self.spec, self.weights
        device, dtype = weights.norm.device, weights.norm.dtype
        n_rotated = spec.n_heads + spec.n_kv_heads
        attention.begin(batch)
        positions = torch.from_numpy(batch.positions).to(device)
        tables = {rope: rope_tables(positions, freqs, dtype) for rope, freqs in self._freqs.items()}
        x = weights.embed(torch.from_numpy(batch.ids).to(device))
        if spec.embed_scale != 1:
            x = x * torch.tensor(spec.embed_scale, dtype=dtype)  # rounded to it, as Gemma was trained
        for i, (of, layer) in enumerate(zip(spec.layers, weights.layers, strict=True)):
            qkv = layer.qkv(self._norm(x, layer.attn_norm))
            if layer.qkv_bias is not None:
                qkv = qkv + layer.qkv_bias
            qkv = qkv.view(len(x), -1, spec.head_dim)
            if layer.q_norm is not None and layer.k_norm is not None:
                qkv[:, : spec.n_heads] = self._norm(qkv[:, : spec.n_heads], layer.q_norm)
                qkv[:, spec.n_heads : n_rotated] = self._norm(qkv[:, spec.n_heads : n_rotated], layer.k_norm)
            if of.rope:
                qkv[:, :n_rotated] = rotate(qkv[:, :n_rotated], *tables[of.rope])
            attended = attention.attend(i, qkv[:, : spec.n_heads], qkv[:, spec.n_heads :])
            x = x + self._post_norm(layer.out(attended), layer.attn_post_norm)
            gate, up = layer.gate_up(self._norm(x, layer.ffn_norm)).chunk(2, -1)
            x = x + self._post_norm(layer.down(self._act(gate) * up), layer.ffn_post_norm)
        last = x[torch.from_numpy(batch.sample_rows).to(device)]
        return weights.head(self._norm(last, weights.norm)).float()

    def _act(self, gate: torch.Tensor) -> torch.Tensor:
        return F.silu(gate) if self.spec.activation == "silu" else F.gelu(gate, approximate="tanh")

    def _post_norm(self, x: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
        return x if weight is None else self._norm(x, weight)

    def _norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, weight.shape, weight, self.spec.norm_eps)

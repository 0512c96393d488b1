"""The shape of a model: every family is a setting of one decoder. Torch-free; families.py reads it from metadata."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ...contract import Unsupported


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary embedding. ``kind``: default, linear (positions / factor) or llama3 (long wavelengths / factor,
    with a ramp between the two wavelengths ``original / high`` and ``original / low``)."""

    theta: float
    kind: str = "default"
    factor: float = 1.0
    low: float = 1.0
    high: float = 4.0
    original: int = 8192


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """What differs from layer to layer. ``window``: so many tokens back it attends, itself included (0: all).
    ``rope``: None where it does without positions."""

    rope: RopeSpec | None
    window: int = 0


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """``hidden`` etc. in elements; ``max_context`` in tokens. ``tied``: the LM head is the embedding.

    ``paired``: a GGUF's q and k rows stand in pairs (ggml's own rotary order). ``qkv_bias``: q, k and v have one.
    ``qk_norm``: each head of q and k has an RMS norm before its rotation. ``sandwich``: what attention and MLP add is
    normed as well (Gemma). ``norm_plus_one``: norm weights are stored less 1. ``embed_scale``: factor on embeddings.
    ``attn_scale``: factor on scores; 0 is head_dim ** -0.5.
    """

    n_layers: int
    hidden: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    ffn: int
    vocab_size: int
    norm_eps: float
    max_context: int
    tied: bool
    layers: tuple[LayerSpec, ...]
    paired: bool = False
    qkv_bias: bool = False
    qk_norm: bool = False
    sandwich: bool = False
    norm_plus_one: bool = False
    activation: Literal["silu", "gelu_tanh"] = "silu"
    embed_scale: float = 1.0
    attn_scale: float = 0.0

    def __post_init__(self) -> None:
        if self.n_heads % self.n_kv_heads:
            raise Unsupported(f"{self.n_heads} heads cannot share {self.n_kv_heads} KV heads")
        if self.head_dim % 2:
            raise Unsupported(f"head size {self.head_dim} is odd")
        if len(self.layers) != self.n_layers:
            raise Unsupported(f"{len(self.layers)} layers are described, {self.n_layers} expected")

    @property
    def windows(self) -> tuple[int, ...]:
        return tuple(layer.window for layer in self.layers)

"""The shape of a model, read from its metadata; what is not supported is refused here by name. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ...catalog import ModelMeta
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
class ModelSpec:
    """``hidden`` etc. in elements; ``max_context`` in tokens. ``tied``: the LM head is the embedding."""

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
    rope: RopeSpec

    def __post_init__(self) -> None:
        if self.n_heads % self.n_kv_heads:
            raise Unsupported(f"{self.n_heads} heads cannot share {self.n_kv_heads} KV heads")
        if self.head_dim % 2:
            raise Unsupported(f"head size {self.head_dim} is odd")


def read_spec(meta: ModelMeta) -> ModelSpec:
    """Raises Unsupported naming the architecture or the key that is missing or not known."""
    if meta.architecture != "llama":
        raise Unsupported(f"architecture {meta.architecture!r} is not supported (supported: llama)")
    if "general.architecture" in meta.raw:
        return _from_gguf(meta)
    return _from_hf(meta)


def _need(raw: Mapping[str, Any], key: str) -> Any:
    if raw.get(key) is None:
        raise Unsupported(f"the model's metadata has no {key!r}")
    return raw[key]


def _from_gguf(meta: ModelMeta) -> ModelSpec:
    raw = meta.raw
    if raw.get("llama.expert_count"):
        raise Unsupported("mixtures of experts (llama.expert_count) are not supported")
    hidden, n_heads = int(_need(raw, "llama.embedding_length")), int(_need(raw, "llama.attention.head_count"))
    head_dim = int(raw.get("llama.attention.key_length") or hidden // n_heads)
    if int(raw.get("llama.rope.dimension_count") or head_dim) != head_dim:
        raise Unsupported("partial rotary embedding (llama.rope.dimension_count) is not supported")
    kind = str(raw.get("llama.rope.scaling.type") or "none")
    if kind not in ("none", "linear"):
        raise Unsupported(f"rope scaling {kind!r} is not supported (supported: none, linear, llama3 factors)")
    factor = float(raw.get("llama.rope.scaling.factor") or 1.0)
    return ModelSpec(
        n_layers=int(_need(raw, "llama.block_count")),
        hidden=hidden,
        n_heads=n_heads,
        n_kv_heads=int(raw.get("llama.attention.head_count_kv") or n_heads),
        head_dim=head_dim,
        ffn=int(_need(raw, "llama.feed_forward_length")),
        vocab_size=meta.vocab_size,
        # GGUF stores float32: 1e-5 reads as 9.99999975e-06. Seven digits give back what was written.
        norm_eps=float(f"{_need(raw, 'llama.attention.layer_norm_rms_epsilon'):.7g}"),
        max_context=meta.context_length,
        tied=True,  # an `output.weight` in the file says otherwise; weights.py looks
        rope=RopeSpec(
            theta=float(raw.get("llama.rope.freq_base") or 10_000.0),
            kind="linear" if kind == "linear" else "default",
            factor=factor,
        ),
    )


def _from_hf(meta: ModelMeta) -> ModelSpec:
    raw = meta.raw
    for key, neutral in (
        ("attention_bias", False),
        ("mlp_bias", False),
        ("hidden_act", "silu"),
        ("quantization_config", None),
        ("partial_rotary_factor", 1.0),
    ):
        if raw.get(key, neutral) not in (neutral, None):
            raise Unsupported(f"config.json: {key} = {raw[key]!r} is not supported")
    hidden, n_heads = int(_need(raw, "hidden_size")), int(_need(raw, "num_attention_heads"))
    return ModelSpec(
        n_layers=int(_need(raw, "num_hidden_layers")),
        hidden=hidden,
        n_heads=n_heads,
        n_kv_heads=int(raw.get("num_key_value_heads") or n_heads),
        head_dim=int(raw.get("head_dim") or hidden // n_heads),
        ffn=int(_need(raw, "intermediate_size")),
        vocab_size=meta.vocab_size,
        norm_eps=float(_need(raw, "rms_norm_eps")),
        max_context=meta.context_length,
        tied=bool(raw.get("tie_word_embeddings", False)),
        rope=_hf_rope(raw),
    )


def _hf_rope(raw: Mapping[str, Any]) -> RopeSpec:
    """``rope_theta`` + ``rope_scaling`` (transformers 4) or ``rope_parameters`` (transformers 5)."""
    rope = dict(raw.get("rope_parameters") or raw.get("rope_scaling") or {})
    theta = float(rope.get("rope_theta") or raw.get("rope_theta") or 10_000.0)
    kind = str(rope.get("rope_type") or rope.get("type") or "default")
    if kind == "default":
        return RopeSpec(theta)
    if kind == "linear":
        return RopeSpec(theta, kind, factor=float(_need(rope, "factor")))
    if kind == "llama3":
        return RopeSpec(
            theta,
            kind,
            factor=float(_need(rope, "factor")),
            low=float(_need(rope, "low_freq_factor")),
            high=float(_need(rope, "high_freq_factor")),
            original=int(_need(rope, "original_max_position_embeddings")),
        )
    raise Unsupported(f"rope scaling {kind!r} is not supported (supported: default, linear, llama3)")

"""Which settings of the decoder a model's family is, read from its metadata; what is not supported is refused here by
name, before any weight is read. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ...catalog import ModelMeta
from ...contract import Unsupported
from .spec import LayerSpec, ModelSpec, RopeSpec

#: Family by the name in GGUF files and in config.json.
_GGUF = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "gemma3": "gemma3", "smollm3": "smollm3"}
_HF = {
    "llama": "llama",
    "mistral": "mistral",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "gemma3_text": "gemma3",
    "smollm3": "smollm3",
}
#: Settings that a family has whatever its metadata says.
_SETTINGS: Mapping[str, Mapping[str, Any]] = {
    "qwen2": {"qkv_bias": True},
    "qwen3": {"qk_norm": True},
    "gemma3": {"qk_norm": True, "sandwich": True, "activation": "gelu_tanh"},
}
#: Every so many layers, the last of them is different: Gemma 3's sees everything, SmolLM3's has no rotary embedding.
_GEMMA_CYCLE, _SMOLLM_CYCLE = 6, 4
_GEMMA_LOCAL_THETA = 10_000.0


def read_spec(meta: ModelMeta) -> ModelSpec:
    """Raises Unsupported naming the architecture or the key that is missing or not known."""
    gguf = "general.architecture" in meta.raw
    names = _GGUF if gguf else _HF
    family = names.get(meta.architecture)
    if family is None:
        raise Unsupported(f"architecture {meta.architecture!r} is not supported (supported: {', '.join(names)})")
    return _from_gguf(meta, family) if gguf else _from_hf(meta, family)


def _need(raw: Mapping[str, Any], key: str) -> Any:
    if raw.get(key) is None:
        raise Unsupported(f"the model's metadata has no {key!r}")
    return raw[key]


# ---- GGUF


def _from_gguf(meta: ModelMeta, family: str) -> ModelSpec:
    raw, at = meta.raw, meta.architecture + "."
    if raw.get(at + "expert_count"):
        raise Unsupported(f"mixtures of experts ({at}expert_count) are not supported")
    for key in ("attn_logit_softcapping", "final_logit_softcapping"):
        if raw.get(at + key):
            raise Unsupported(f"{at}{key} is not supported")
    hidden, n_heads = int(_need(raw, at + "embedding_length")), int(_need(raw, at + "attention.head_count"))
    head_dim = int(raw.get(at + "attention.key_length") or hidden // n_heads)
    n_layers = int(_need(raw, at + "block_count"))
    if int(raw.get(at + "rope.dimension_count") or head_dim) != head_dim:
        raise Unsupported(f"partial rotary embedding ({at}rope.dimension_count) is not supported")
    kind = str(raw.get(at + "rope.scaling.type") or "none")
    if kind not in ("none", "linear"):
        raise Unsupported(f"rope scaling {kind!r} is not supported (supported: none, linear, llama3 factors)")
    rope = RopeSpec(
        theta=float(raw.get(at + "rope.freq_base") or 10_000.0),
        kind="linear" if kind == "linear" else "default",
        factor=float(raw.get(at + "rope.scaling.factor") or 1.0),
    )
    window = int(raw.get(at + "attention.sliding_window") or 0)
    settings = dict(_SETTINGS.get(family, {}))
    if family == "gemma3":
        local = RopeSpec(float(raw.get(at + "rope.local.freq_base") or _GEMMA_LOCAL_THETA))
        layers = _gemma(n_layers, rope, local, window, _GEMMA_CYCLE)
        settings["embed_scale"] = hidden**0.5
        # The file does not say it. All sizes scale by their head's size but the largest, which has 62 layers.
        settings["attn_scale"] = (hidden / n_heads) ** -0.5 if n_layers == 62 else 0.0
    elif family == "smollm3":
        layers = _smollm(n_layers, rope, [i % _SMOLLM_CYCLE != _SMOLLM_CYCLE - 1 for i in range(n_layers)])
    else:
        layers = (LayerSpec(rope, window),) * n_layers
    return ModelSpec(
        n_layers=n_layers,
        hidden=hidden,
        n_heads=n_heads,
        n_kv_heads=int(raw.get(at + "attention.head_count_kv") or n_heads),
        head_dim=head_dim,
        ffn=int(_need(raw, at + "feed_forward_length")),
        vocab_size=meta.vocab_size,
        # GGUF stores float32: 1e-5 reads as 9.99999975e-06. Seven digits give back what was written.
        norm_eps=float(f"{_need(raw, at + 'attention.layer_norm_rms_epsilon'):.7g}"),
        max_context=meta.context_length,
        tied=True,  # an `output.weight` in the file says otherwise; weights.py looks
        layers=layers,
        paired=family in ("llama", "smollm3"),
        **settings,
    )


# ---- Hugging Face


def _from_hf(meta: ModelMeta, family: str) -> ModelSpec:
    raw = meta.raw
    gemma = family == "gemma3"
    for key, neutral in (
        ("attention_bias", False),
        ("mlp_bias", False),
        ("hidden_activation" if gemma else "hidden_act", "gelu_pytorch_tanh" if gemma else "silu"),
        ("quantization_config", None),
        ("partial_rotary_factor", 1.0),
        ("attn_logit_softcapping", None),
        ("final_logit_softcapping", None),
        ("use_bidirectional_attention", False),
    ):
        if raw.get(key, neutral) not in (neutral, None):
            raise Unsupported(f"config.json: {key} = {raw[key]!r} is not supported")
    hidden, n_heads = int(_need(raw, "hidden_size")), int(_need(raw, "num_attention_heads"))
    settings = dict(_SETTINGS.get(family, {}))
    if gemma:
        settings |= {"embed_scale": hidden**0.5, "norm_plus_one": True}
        settings["attn_scale"] = float(raw.get("query_pre_attn_scalar") or 256) ** -0.5
    n_layers = int(_need(raw, "num_hidden_layers"))
    return ModelSpec(
        n_layers=n_layers,
        hidden=hidden,
        n_heads=n_heads,
        n_kv_heads=int(raw.get("num_key_value_heads") or n_heads),
        head_dim=int(raw.get("head_dim") or (256 if gemma else hidden // n_heads)),
        ffn=int(_need(raw, "intermediate_size")),
        vocab_size=meta.vocab_size,
        norm_eps=float(_need(raw, "rms_norm_eps")),
        max_context=meta.context_length,
        tied=bool(raw.get("tie_word_embeddings", gemma)),
        layers=_hf_layers(raw, family, n_layers),
        **settings,
    )


def _hf_layers(raw: Mapping[str, Any], family: str, n_layers: int) -> tuple[LayerSpec, ...]:
    window = int(raw.get("sliding_window") or 0)
    if family == "gemma3":
        ropes = raw.get("rope_parameters") or {}
        if "full_attention" in ropes:  # transformers 5 keeps one for each type of layer
            rope, local = (
                _hf_rope({"rope_parameters": ropes[kind]}) for kind in ("full_attention", "sliding_attention")
            )
        else:
            rope = _hf_rope({"rope_theta": 1_000_000.0, **raw})
            local = RopeSpec(float(raw.get("rope_local_base_freq") or _GEMMA_LOCAL_THETA))
        cycle = int(raw.get("sliding_window_pattern") or raw.get("_sliding_window_pattern") or _GEMMA_CYCLE)
        types = raw.get("layer_types")
        return _gemma(n_layers, rope, local, window, cycle) if not types else _typed(types, rope, local, window)
    rope = _hf_rope(raw)
    if family == "smollm3":
        if raw.get("use_sliding_window"):
            raise Unsupported("config.json: use_sliding_window = True is not supported for this architecture")
        cycle = int(raw.get("no_rope_layer_interval") or _SMOLLM_CYCLE)
        rotated = raw.get("no_rope_layers") or [(i + 1) % cycle != 0 for i in range(n_layers)]
        return _smollm(n_layers, rope, rotated)
    if family.startswith("qwen") and not raw.get("use_sliding_window"):
        window = 0
    if window and (types := raw.get("layer_types")):
        return _typed(types, rope, rope, window)
    first = int(raw.get("max_window_layers") or 0) if family.startswith("qwen") else 0
    return tuple(LayerSpec(rope, window if i >= first else 0) for i in range(n_layers))


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


# ---- layers of both


def _gemma(n: int, rope: RopeSpec, local: RopeSpec, window: int, cycle: int) -> tuple[LayerSpec, ...]:
    return tuple(LayerSpec(local, window) if (i + 1) % cycle else LayerSpec(rope) for i in range(n))


def _smollm(n: int, rope: RopeSpec, rotated: Sequence[object]) -> tuple[LayerSpec, ...]:
    return tuple(LayerSpec(rope if rotated[i] else None) for i in range(n))


def _typed(types: Sequence[str], rope: RopeSpec, local: RopeSpec, window: int) -> tuple[LayerSpec, ...]:
    known = {"full_attention": LayerSpec(rope), "sliding_attention": LayerSpec(local, window)}
    if bad := set(types) - known.keys():
        raise Unsupported(f"config.json: layer type {min(bad)!r} is not supported")
    return tuple(known[kind] for kind in types)

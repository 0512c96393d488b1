"""Weights from safetensors or GGUF, checked by name before anything large is read, fused as the decoder wants them.

Linear weights are [out, in]. The rows of q, k and v are one matrix, those of gate and up another: two GEMMs fewer
per layer and longer ones.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from gguf.quants import dequantize
from safetensors import SafetensorError, safe_open

from ...catalog import ModelFiles, open_gguf
from ...contract import Unsupported
from .linear import Linear, make_linear
from .spec import ModelSpec


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """``qkv`` [(heads + 2 * kv heads) * dim, hidden], ``gate_up`` [2 * ffn, hidden], the rest as named."""

    attn_norm: torch.Tensor
    qkv: Linear
    out: Linear
    ffn_norm: torch.Tensor
    gate_up: Linear
    down: Linear


@dataclass(frozen=True, slots=True)
class Weights:
    """``embed`` [vocab, hidden]; ``head`` the same weight again where it is tied, laid out for multiplication.
    ``rope_factors`` [dim / 2] divides the rotary frequencies (Llama 3 in GGUF form), or None."""

    embed: torch.Tensor
    layers: tuple[LayerWeights, ...]
    norm: torch.Tensor
    head: Linear
    rope_factors: torch.Tensor | None

    def n_bytes(self) -> int:
        linears = [self.head, *(p for w in self.layers for p in (w.qkv, w.out, w.gate_up, w.down))]
        norms = [self.norm, *(p for w in self.layers for p in (w.attn_norm, w.ffn_norm))]
        return sum(t.numel() * t.element_size() for t in (self.embed, *norms)) + sum(p.n_bytes for p in linears)


class Source(Protocol):
    """Tensors by their Hugging Face name."""

    def names(self) -> set[str]: ...

    def get(self, name: str, shape: tuple[int, ...]) -> torch.Tensor: ...


def load_weights(files: ModelFiles, spec: ModelSpec, dtype: torch.dtype, device: torch.device) -> Weights:
    """Raises Unsupported naming the first tensor that is missing, unknown or of a wrong shape."""
    source: Source = _Gguf(files, spec) if files.kind == "gguf" else _Safetensors(files)
    shapes = _shapes(spec)
    names = source.names()
    rope_factors = source.get("rope_factors", (spec.head_dim // 2,)).float() if "rope_factors" in names else None
    untied = "lm_head.weight" in names and not (spec.tied and files.kind == "hf")
    if not untied:
        shapes.pop("lm_head.weight")
        if files.kind == "hf" and not spec.tied:
            raise Unsupported("tensor 'lm_head.weight' is missing")
    extra = names - shapes.keys() - {"rope_factors", "lm_head.weight"}
    if extra := {name for name in extra if not name.endswith("rotary_emb.inv_freq")}:
        raise Unsupported(f"tensor {min(extra)!r} is not known to this architecture")
    if missing := shapes.keys() - names:
        raise Unsupported(f"tensor {min(missing)!r} is missing")

    def get(name: str) -> torch.Tensor:
        return source.get(name, shapes[name]).to(dtype)

    def linear(*names: str) -> Linear:
        return make_linear(torch.cat([get(name) for name in names]).to(device))

    layers = []
    for i in range(spec.n_layers):
        at = f"model.layers.{i}."
        attn, mlp = at + "self_attn.", at + "mlp."
        layers.append(
            LayerWeights(
                attn_norm=get(at + "input_layernorm.weight").to(device),
                qkv=linear(attn + "q_proj.weight", attn + "k_proj.weight", attn + "v_proj.weight"),
                out=linear(attn + "o_proj.weight"),
                ffn_norm=get(at + "post_attention_layernorm.weight").to(device),
                gate_up=linear(mlp + "gate_proj.weight", mlp + "up_proj.weight"),
                down=linear(mlp + "down_proj.weight"),
            )
        )
    embed = get("model.embed_tokens.weight").to(device)
    head = linear("lm_head.weight") if untied else make_linear(embed)
    return Weights(embed, tuple(layers), get("model.norm.weight").to(device), head, rope_factors)


def _shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Every tensor of the model by name, with its shape."""
    q, kv = spec.n_heads * spec.head_dim, spec.n_kv_heads * spec.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (spec.vocab_size, spec.hidden),
        "model.norm.weight": (spec.hidden,),
        "lm_head.weight": (spec.vocab_size, spec.hidden),
    }
    for i in range(spec.n_layers):
        at = f"model.layers.{i}."
        shapes |= {
            at + "input_layernorm.weight": (spec.hidden,),
            at + "self_attn.q_proj.weight": (q, spec.hidden),
            at + "self_attn.k_proj.weight": (kv, spec.hidden),
            at + "self_attn.v_proj.weight": (kv, spec.hidden),
            at + "self_attn.o_proj.weight": (spec.hidden, q),
            at + "post_attention_layernorm.weight": (spec.hidden,),
            at + "mlp.gate_proj.weight": (spec.ffn, spec.hidden),
            at + "mlp.up_proj.weight": (spec.ffn, spec.hidden),
            at + "mlp.down_proj.weight": (spec.hidden, spec.ffn),
        }
    return shapes


def _checked(name: str, tensor: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    if tuple(tensor.shape) != shape:
        raise Unsupported(f"tensor {name!r} is {tuple(tensor.shape)}, expected {shape}")
    return tensor


class _Safetensors:
    """One or more .safetensors files of a Hugging Face directory, memory-mapped."""

    def __init__(self, files: ModelFiles) -> None:
        self._where: dict[str, Any] = {}
        try:
            for path in sorted(files.path.glob("*.safetensors")):
                shard: Any = safe_open(path, framework="pt")
                self._where.update(dict.fromkeys(shard.keys(), shard))
        except (OSError, SafetensorError) as error:
            raise Unsupported(f"cannot read {path}: {error}") from error

    def names(self) -> set[str]:
        return set(self._where)

    def get(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        return _checked(name, self._where[name].get_tensor(name), shape)


#: GGUF name -> Hugging Face name. `{}` is the layer.
_GGUF_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
    "rope_freqs.weight": "rope_factors",
    "blk.{}.attn_norm.weight": "model.layers.{}.input_layernorm.weight",
    "blk.{}.attn_q.weight": "model.layers.{}.self_attn.q_proj.weight",
    "blk.{}.attn_k.weight": "model.layers.{}.self_attn.k_proj.weight",
    "blk.{}.attn_v.weight": "model.layers.{}.self_attn.v_proj.weight",
    "blk.{}.attn_output.weight": "model.layers.{}.self_attn.o_proj.weight",
    "blk.{}.ffn_norm.weight": "model.layers.{}.post_attention_layernorm.weight",
    "blk.{}.ffn_gate.weight": "model.layers.{}.mlp.gate_proj.weight",
    "blk.{}.ffn_up.weight": "model.layers.{}.mlp.up_proj.weight",
    "blk.{}.ffn_down.weight": "model.layers.{}.mlp.down_proj.weight",
}

_GGUF_TYPES = {"F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"}


class _Gguf:
    """A GGUF file. Quantized blocks are dequantized to float32."""

    def __init__(self, files: ModelFiles, spec: ModelSpec) -> None:
        self._spec = spec
        self._tensors = {}
        for tensor in open_gguf(files.path).tensors:
            if tensor.tensor_type.name not in _GGUF_TYPES:
                raise Unsupported(f"tensor {tensor.name!r} has type {tensor.tensor_type.name}, which is not supported")
            layer = tensor.name.split(".")[1] if tensor.name.startswith("blk.") else ""
            pattern = tensor.name.replace(f"blk.{layer}.", "blk.{}.", 1) if layer else tensor.name
            if pattern not in _GGUF_NAMES:
                raise Unsupported(f"tensor {tensor.name!r} is not known to this architecture")
            self._tensors[_GGUF_NAMES[pattern].format(layer)] = tensor

    def names(self) -> set[str]:
        return set(self._tensors)

    def get(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        tensor = self._tensors[name]
        value = _checked(name, torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy()), shape)
        if name.endswith("q_proj.weight"):
            return _unpermute(value, self._spec.n_heads)
        if name.endswith("k_proj.weight"):
            return _unpermute(value, self._spec.n_kv_heads)
        return value


def _unpermute(rows: torch.Tensor, n_heads: int) -> torch.Tensor:
    """Llama GGUFs interleave the two halves of each head's q and k rows (pairs next to each other, as ggml's
    rotary embedding wants them); ours rotates halves, as in the original weights."""
    out, width = rows.shape
    return rows.view(n_heads, out // n_heads // 2, 2, width).transpose(1, 2).reshape(out, width)

"""The decoder's weights: checked by name before anything large is read, fused as the decoder wants them.

Linear weights are [out, in]. The rows of q, k and v are one matrix, those of gate and up another: two GEMMs fewer
per layer and longer ones.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Literal, Protocol

import torch
import torch.nn.functional as F

from ...catalog import ModelFiles, cache_dir
from ...contract import Unsupported
from . import store
from .linear import Linear, make_linear
from .quant import Codes, Packed, QuantLinear, join, quantize, side_by_side
from .sources import Source, open_source
from .spec import ModelSpec

Mode = Literal["none", "int8", "int4"]


class Embedding(Protocol):
    n_bytes: int

    def __call__(self, ids: torch.Tensor) -> torch.Tensor:
        """ids [N] -> [N, hidden]."""
        ...


class PlainEmbedding:
    def __init__(self, weight: torch.Tensor) -> None:
        self._weight = weight
        self.n_bytes = weight.numel() * weight.element_size()

    def __call__(self, ids: torch.Tensor) -> torch.Tensor:
        return F.embedding(ids, self._weight)


class QuantEmbedding:
    """``shared``: the weight is the LM head's and is counted there."""

    def __init__(self, packed: Packed, dtype: torch.dtype, *, shared: bool) -> None:
        self.packed = packed
        self._dtype = dtype
        self.n_bytes = 0 if shared else packed.n_bytes

    def __call__(self, ids: torch.Tensor) -> torch.Tensor:
        return self.packed.rows(ids).to(self._dtype)


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """``qkv`` [(heads + 2 * kv heads) * dim, hidden], ``gate_up`` [2 * ffn, hidden], the rest as named. ``qkv_bias``
    [(heads + 2 * kv heads) * dim], ``q_norm`` and ``k_norm`` [dim], ``attn_post_norm`` and ``ffn_post_norm`` [hidden]
    where the family has them."""

    attn_norm: torch.Tensor
    qkv: Linear
    out: Linear
    ffn_norm: torch.Tensor
    gate_up: Linear
    down: Linear
    qkv_bias: torch.Tensor | None = None
    q_norm: torch.Tensor | None = None
    k_norm: torch.Tensor | None = None
    attn_post_norm: torch.Tensor | None = None
    ffn_post_norm: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class Weights:
    """``embed`` [vocab, hidden]; ``head`` the same weight again where it is tied, laid out for multiplication.
    ``rope_factors`` [dim / 2] divides the rotary frequencies (Llama 3 in GGUF form), or None. Norms are in the dtype
    that the decoder computes in. ``converted``: they were made from the model's file just now, not found ready."""

    embed: Embedding
    layers: tuple[LayerWeights, ...]
    norm: torch.Tensor
    head: Linear
    rope_factors: torch.Tensor | None
    converted: bool

    def n_bytes(self) -> int:
        linears = [self.head, *(p for w in self.layers for p in (w.qkv, w.out, w.gate_up, w.down))]
        of_layers = [getattr(w, field.name) for w in self.layers for field in fields(w)]
        vectors = [self.norm, *(v for v in of_layers if isinstance(v, torch.Tensor))]
        return self.embed.n_bytes + sum(t.numel() * t.element_size() for t in vectors) + sum(p.n_bytes for p in linears)


#: The linear layers of a decoder layer: name -> the tensors whose rows it is made of.
_LINEARS = {
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "out": ("self_attn.o_proj",),
    "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "down": ("mlp.down_proj",),
}


def _vectors(spec: ModelSpec) -> dict[str, tuple[str, ...]]:
    """What a layer of this family has of one dimension: name -> the tensors that it is made of."""
    found: dict[str, tuple[str, ...]] = {"attn_norm": ("input_layernorm.weight",)}
    if spec.sandwich:
        found["attn_post_norm"] = ("post_attention_layernorm.weight",)
        found["ffn_norm"] = ("pre_feedforward_layernorm.weight",)
        found["ffn_post_norm"] = ("post_feedforward_layernorm.weight",)
    else:
        found["ffn_norm"] = ("post_attention_layernorm.weight",)
    if spec.qk_norm:
        found |= {"q_norm": ("self_attn.q_norm.weight",), "k_norm": ("self_attn.k_norm.weight",)}
    if spec.qkv_bias:
        found["qkv_bias"] = tuple(f"{name}.bias" for name in _LINEARS["qkv"])
    return found


def load_weights(
    files: ModelFiles,
    spec: ModelSpec,
    dtype: torch.dtype,
    device: torch.device,
    mode: Mode = "none",
) -> Weights:
    """``mode``: linear layers as they are (``dtype``) or quantized. Quantized weights are kept in the model's cache
    and taken from there the next time. Raises Unsupported naming the first tensor that is missing, unknown
    or of a wrong shape."""
    if mode == "none":
        source = _Checked(files, spec)
        embed = source.get("model.embed_tokens.weight").to(dtype).to(device)

        def linear(name: str) -> Linear:
            if name == "head" and not source.untied:
                return make_linear(embed)
            parts = [source.get(part).to(dtype) for part in source.parts(name)]
            return make_linear(torch.cat(parts).to(device))

        return _assemble(spec, source.norms(), PlainEmbedding(embed), linear, dtype, device, converted=True)

    entry = f"weights-{mode}.safetensors"
    kept = store.load(files.cache / entry) if files.cache else None
    converted = kept is None
    if kept is None:
        kept = _quantized(_Checked(files, spec), spec, mode)
        folder = cache_dir(files)
        if folder and store.save(folder / entry, *kept):
            kept = store.load(folder / entry) or kept
    packed, norms = kept
    if device.type == "cpu":
        packed = side_by_side(packed)
    head = QuantLinear(packed["head"].to(device), dtype)
    embedding = packed["embed"].to(device) if "embed" in packed else head.packed

    def quantized(name: str) -> Linear:
        return head if name == "head" else QuantLinear(packed[name].to(device), dtype)

    embed_of = QuantEmbedding(embedding, dtype, shared=embedding is head.packed)
    return _assemble(spec, norms, embed_of, quantized, dtype, device, converted=converted)


def _assemble(
    spec: ModelSpec,
    norms: dict[str, torch.Tensor],
    embed: Embedding,
    linear: Callable[[str], Linear],
    dtype: torch.dtype,
    device: torch.device,
    *,
    converted: bool,
) -> Weights:
    layers = tuple(
        LayerWeights(
            **{name: linear(f"{i}.{name}") for name in _LINEARS},  # type: ignore[arg-type]
            **{name: norms[f"{i}.{name}"].to(dtype).to(device) for name in _vectors(spec)},  # type: ignore[arg-type]
        )
        for i in range(spec.n_layers)
    )
    norm = norms["norm"].to(dtype).to(device)
    return Weights(embed, layers, norm, linear("head"), norms.get("rope_factors"), converted)


def _quantized(source: _Checked, spec: ModelSpec, mode: Mode) -> tuple[dict[str, Packed], dict[str, torch.Tensor]]:
    """All linear layers packed, and the norms. What the file holds in 4 bits stays as it is in either mode;
    the embedding and the LM head never get less than 8 bits where the file does not have them so."""
    names = [f"{i}.{name}" for i in range(spec.n_layers) for name in _LINEARS]
    packed = {name: _pack(source, source.parts(name), 4 if mode == "int4" else 8) for name in names}
    packed["head"] = _pack(source, source.parts("head"), 8)
    if source.untied:
        packed["embed"] = _pack(source, ["model.embed_tokens.weight"], 8)
    return packed, source.norms()


def _pack(source: _Checked, names: list[str], bits: Literal[4, 8]) -> Packed:
    parts = [source.codes(name) or quantize(source.get(name).float().numpy(), bits) for name in names]
    if len({part.bits for part in parts}) > 1:
        parts = [part.widened() for part in parts]
    return Packed.of(join(parts), source.shapes[names[0]][1])


class _Checked:
    """A source whose names and shapes are those of the model."""

    def __init__(self, files: ModelFiles, spec: ModelSpec) -> None:
        self._source: Source = open_source(files, spec)
        self._spec = spec
        self.shapes = _shapes(spec)
        names = self._source.names()
        self.untied = "lm_head.weight" in names and not (spec.tied and files.kind == "hf")
        if not self.untied:
            self.shapes.pop("lm_head.weight")
            if files.kind == "hf" and not spec.tied:
                raise Unsupported("tensor 'lm_head.weight' is missing")
        extra = names - self.shapes.keys() - {"rope_factors", "lm_head.weight"}
        if extra := {name for name in extra if not name.endswith("rotary_emb.inv_freq")}:
            raise Unsupported(f"tensor {min(extra)!r} is not known to this architecture")
        if missing := self.shapes.keys() - names:
            raise Unsupported(f"tensor {min(missing)!r} is missing")

    def get(self, name: str) -> torch.Tensor:
        return self._source.get(name, self.shapes[name])

    def codes(self, name: str) -> Codes | None:
        return self._source.codes(name, self.shapes[name])

    def parts(self, name: str) -> list[str]:
        """The tensors that the linear layer ``head`` or ``<layer>.<name>`` is made of."""
        if name == "head":
            return ["lm_head.weight" if self.untied else "model.embed_tokens.weight"]
        layer, of = name.split(".")
        return [f"model.layers.{layer}.{part}.weight" for part in _LINEARS[of]]

    def norms(self) -> dict[str, torch.Tensor]:
        """``norm``, ``<layer>.<vector>`` and, where the file has them, ``rope_factors``."""
        plus = float(self._spec.norm_plus_one)
        norms = {"norm": self.get("model.norm.weight").float() + plus}
        for i in range(self._spec.n_layers):
            for name, theirs in _vectors(self._spec).items():
                value = torch.cat([self.get(f"model.layers.{i}.{part}").float() for part in theirs])
                norms[f"{i}.{name}"] = value + (plus if name.endswith("norm") else 0)
        if "rope_factors" in self._source.names():
            norms["rope_factors"] = self._source.get("rope_factors", (self._spec.head_dim // 2,)).float()
        return norms


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
            at + "self_attn.q_proj.weight": (q, spec.hidden),
            at + "self_attn.k_proj.weight": (kv, spec.hidden),
            at + "self_attn.v_proj.weight": (kv, spec.hidden),
            at + "self_attn.o_proj.weight": (spec.hidden, q),
            at + "mlp.gate_proj.weight": (spec.ffn, spec.hidden),
            at + "mlp.up_proj.weight": (spec.ffn, spec.hidden),
            at + "mlp.down_proj.weight": (spec.hidden, spec.ffn),
        }
        widths = {"q_proj.bias": q, "k_proj.bias": kv, "v_proj.bias": kv}
        widths |= {"q_norm.weight": spec.head_dim, "k_norm.weight": spec.head_dim}
        for part in itertools.chain(*_vectors(spec).values()):
            shapes[at + part] = (widths.get(part.removeprefix("self_attn."), spec.hidden),)
    return shapes

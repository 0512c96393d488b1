"""Where weights come from: safetensors or GGUF files, by the tensors' Hugging Face names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from gguf.quants import dequantize
from safetensors import SafetensorError, safe_open

from ...catalog import ModelFiles, open_gguf
from ...contract import Unsupported
from .quant import Codes, from_gguf
from .spec import ModelSpec


class Source(Protocol):
    """Tensors by their Hugging Face name."""

    def names(self) -> set[str]: ...

    def get(self, name: str, shape: tuple[int, ...]) -> torch.Tensor: ...

    def codes(self, name: str, shape: tuple[int, ...]) -> Codes | None:
        """The tensor as the file has quantized it, if it is in a form that ours can hold."""
        ...


def open_source(files: ModelFiles, spec: ModelSpec) -> Source:
    """Raises Unsupported naming a tensor whose name or type is not known."""
    return _Gguf(files, spec) if files.kind == "gguf" else _Safetensors(files)


def _checked(name: str, tensor: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    if tuple(tensor.shape) != shape:
        raise Unsupported(f"tensor {name!r} is {tuple(tensor.shape)}, expected {shape}")
    return tensor


def _shards(folder: Path) -> list[Path]:
    """The files that the index names; without one, all that there are (some folders hold the same weights twice)."""
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        return sorted(folder.glob("*.safetensors"))
    try:
        names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise Unsupported(f"cannot read {index}: {error!r}") from error
    if bad := [name for name in names if not isinstance(name, str) or Path(name).name != name]:
        raise Unsupported(f"{index} names {bad[0]!r}, which is no file of its folder")
    return [folder / name for name in sorted(names)]


class _Safetensors:
    """One or more .safetensors files of a Hugging Face directory, memory-mapped."""

    def __init__(self, files: ModelFiles) -> None:
        self._where: dict[str, Any] = {}
        for path in _shards(files.path):
            try:
                shard: Any = safe_open(path, framework="pt")
            except (OSError, SafetensorError) as error:
                raise Unsupported(f"cannot read {path}: {error}") from error
            self._where.update(dict.fromkeys(shard.keys(), shard))

    def names(self) -> set[str]:
        return set(self._where)

    def get(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        return _checked(name, self._where[name].get_tensor(name), shape)

    def codes(self, name: str, shape: tuple[int, ...]) -> Codes | None:
        return None


#: GGUF name -> Hugging Face name. `{}` is the layer.
_GGUF_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
    "rope_freqs.weight": "rope_factors",
    "blk.{}.attn_norm.weight": "model.layers.{}.input_layernorm.weight",
    "blk.{}.attn_q_norm.weight": "model.layers.{}.self_attn.q_norm.weight",
    "blk.{}.attn_k_norm.weight": "model.layers.{}.self_attn.k_norm.weight",
    "blk.{}.attn_q.bias": "model.layers.{}.self_attn.q_proj.bias",
    "blk.{}.attn_k.bias": "model.layers.{}.self_attn.k_proj.bias",
    "blk.{}.attn_v.bias": "model.layers.{}.self_attn.v_proj.bias",
    "blk.{}.attn_q.weight": "model.layers.{}.self_attn.q_proj.weight",
    "blk.{}.attn_k.weight": "model.layers.{}.self_attn.k_proj.weight",
    "blk.{}.attn_v.weight": "model.layers.{}.self_attn.v_proj.weight",
    "blk.{}.attn_output.weight": "model.layers.{}.self_attn.o_proj.weight",
    "blk.{}.ffn_norm.weight": "model.layers.{}.post_attention_layernorm.weight",
    "blk.{}.ffn_gate.weight": "model.layers.{}.mlp.gate_proj.weight",
    "blk.{}.ffn_up.weight": "model.layers.{}.mlp.up_proj.weight",
    "blk.{}.ffn_down.weight": "model.layers.{}.mlp.down_proj.weight",
}

#: Where a sandwich of norms has another meaning for a name.
_GGUF_SANDWICH = {
    "blk.{}.post_attention_norm.weight": "model.layers.{}.post_attention_layernorm.weight",
    "blk.{}.ffn_norm.weight": "model.layers.{}.pre_feedforward_layernorm.weight",
    "blk.{}.post_ffw_norm.weight": "model.layers.{}.post_feedforward_layernorm.weight",
}

_GGUF_TYPES = {"F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"}


class _Gguf:
    """A GGUF file. Quantized blocks are dequantized to float32."""

    def __init__(self, files: ModelFiles, spec: ModelSpec) -> None:
        self._spec = spec
        self._tensors = {}
        names = _GGUF_NAMES | (_GGUF_SANDWICH if spec.sandwich else {})
        for tensor in open_gguf(files.path).tensors:
            if tensor.tensor_type.name not in _GGUF_TYPES:
                raise Unsupported(f"tensor {tensor.name!r} has type {tensor.tensor_type.name}, which is not supported")
            layer = tensor.name.split(".")[1] if tensor.name.startswith("blk.") else ""
            pattern = tensor.name.replace(f"blk.{layer}.", "blk.{}.", 1) if layer else tensor.name
            if pattern not in names:
                raise Unsupported(f"tensor {tensor.name!r} is not known to this architecture")
            self._tensors[names[pattern].format(layer)] = tensor

    def names(self) -> set[str]:
        return set(self._tensors)

    def get(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        tensor = self._tensors[name]
        value = _checked(name, torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy()), shape)
        order = self._order(name, shape)
        return value if order is None else value[torch.from_numpy(order)]

    def codes(self, name: str, shape: tuple[int, ...]) -> Codes | None:
        tensor = self._tensors[name]
        codes = from_gguf(tensor.data, tensor.tensor_type.name)
        if codes is None or codes.codes.shape != shape:
            return None
        order = self._order(name, shape)
        return codes if order is None else codes.rows(order)

    def _order(self, name: str, shape: tuple[int, ...]) -> npt.NDArray[np.int64] | None:
        """Llama GGUFs interleave the two halves of each head's q and k rows (pairs next to each other, as ggml's
        rotary embedding wants them); ours rotates halves, as in the original weights. Other families' do as well."""
        if not self._spec.paired:
            return None
        heads = self._spec.n_heads if name.endswith("q_proj.weight") else self._spec.n_kv_heads
        if not name.endswith(("q_proj.weight", "k_proj.weight")):
            return None
        return np.arange(shape[0]).reshape(heads, -1, 2).swapaxes(1, 2).ravel()

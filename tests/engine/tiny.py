"""Tiny random models written as files, with transformers beside them."""

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFWriter, quants
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from forebay.catalog import ModelFiles

_BASE = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 199,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    # Large enough that logits differ by more than rounding, so that greedy has no ties.
    "initializer_range": 0.3,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
#: Each exercises one setting of the decoder.
TINY: dict[str, dict[str, object]] = {
    "plain": {},
    "gqa": {"num_key_value_heads": 2},
    "tied": {"tie_word_embeddings": True, "num_key_value_heads": 1},
    "wide-heads": {"head_dim": 32},
    "rope-linear": {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10_000.0}},
    "rope-llama3": {"rope_parameters": _LLAMA3},
}
_WINDOW = 24
#: And each family. Windows shorter than the prompts of the tests, layers of every kind.
FAMILIES: dict[str, dict[str, object]] = {
    "mistral": {"model_type": "mistral", "num_key_value_heads": 2, "sliding_window": _WINDOW},
    "qwen2": {"model_type": "qwen2", "num_key_value_heads": 2, "tie_word_embeddings": True},
    "qwen2-window": {
        "model_type": "qwen2",
        "use_sliding_window": True,
        "sliding_window": _WINDOW,
        "max_window_layers": 1,
    },
    "qwen3": {"model_type": "qwen3", "num_key_value_heads": 2, "head_dim": 32},
    "gemma3": {
        "model_type": "gemma3_text",
        "num_hidden_layers": 4,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "query_pre_attn_scalar": 48,
        "sliding_window": _WINDOW,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
        "tie_word_embeddings": True,
        "initializer_range": 0.1,
    },
    "gemma3-cycle": {
        "model_type": "gemma3_text",
        "num_hidden_layers": 7,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "query_pre_attn_scalar": 16,
        "sliding_window": _WINDOW,
        "tie_word_embeddings": True,
        "initializer_range": 0.1,
    },
    "smollm3": {
        "model_type": "smollm3",
        "num_hidden_layers": 4,
        "num_key_value_heads": 2,
        "pad_token_id": 0,
        "initializer_range": 0.2,  # four layers of the larger weights amplify every rounding too far
    },
}


@dataclass(frozen=True)
class Judge:
    """transformers on the same weights, in float32."""

    model: PreTrainedModel

    @classmethod
    def of_gguf(cls, path: Path) -> "Judge":
        model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
        return cls(model.eval())

    @torch.inference_mode()
    def logits(self, ids: list[int]) -> torch.Tensor:
        """[len(ids), vocab]."""
        result: torch.Tensor = self.model(torch.tensor([ids])).logits[0]
        return result

    @torch.inference_mode()
    def greedy(self, ids: list[int], n: int) -> list[int]:
        """``n`` tokens, whatever they are."""
        out = self.model.generate(
            torch.tensor([ids]),
            attention_mask=torch.ones(1, len(ids), dtype=torch.long),
            max_new_tokens=n,
            min_new_tokens=n,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        tokens: list[int] = out[0, len(ids) :].tolist()
        return tokens


def make_tiny(name: str) -> PreTrainedModel:
    every = {**TINY, **FAMILIES}
    torch.manual_seed(sorted(TINY).index(name) if name in TINY else 100 + list(FAMILIES).index(name))
    fields = {"model_type": "llama", **_BASE, **every[name]}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**fields)).eval()
    if name in FAMILIES:  # biases and norms are made as zeros and ones, which would hide that they are not used
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim == 1:
                    parameter.add_(0.3 * torch.randn_like(parameter))
    return model


def save_tiny(name: str, folder: Path) -> tuple[ModelFiles, Judge]:
    model = make_tiny(name)
    model.save_pretrained(folder)
    # The text room's files are not needed here, but metadata is read whole.
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{{ messages }}"}))
    return ModelFiles(name, "hf", folder), Judge(model)


def save_gguf(model: PreTrainedModel, path: Path, kind: GGMLQuantizationType) -> ModelFiles:
    """Write a tiny model as llama.cpp's converter does: the q and k rows of Llama permuted, Gemma's norms plus one. The
    model's own weights are replaced by what the file then holds, so that it stays the judge."""
    config = model.config
    family = {"gemma3_text": "gemma3"}.get(config.model_type, config.model_type)
    writer = GGUFWriter(path, family)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(model.model.layers[0].self_attn.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters.get("full_attention", config.rope_parameters)["rope_theta"])
    if family == "gemma3":
        writer.add_sliding_window(config.sliding_window)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([f"<{i}>" for i in range(config.vocab_size)])
    writer.add_eos_token_id(2)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    permuted = heads if family in ("llama", "smollm3") else {}
    for name, parameter in model.named_parameters():
        value = parameter.detach().numpy()
        plain = value.ndim == 1 or value.shape[-1] % 32
        stored = GGMLQuantizationType.F32 if plain else kind
        head_count = next((n for part, n in permuted.items() if part in name), None)
        plus = 1 if family == "gemma3" and name.endswith("norm.weight") else 0
        if head_count:
            value = permute(value, head_count)
        data = quants.quantize(value + plus, stored)
        writer.add_tensor(_gguf_name(name, family), data, raw_dtype=stored)
        back = quants.dequantize(data, stored).reshape(value.shape) - plus
        if head_count:
            back = permute(back, head_count, undo=True)
        with torch.no_grad():
            parameter.copy_(torch.from_numpy(back.copy()))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return ModelFiles(path.stem, "gguf", path)


def permute(rows: np.ndarray, n_heads: int, *, undo: bool = False) -> np.ndarray:
    """Halves of each head's rows <-> pairs next to each other, written out row by row."""
    size = rows.shape[0] // n_heads
    order = [head * size + half * size // 2 + i for head in range(n_heads) for i in range(size // 2) for half in (0, 1)]
    if undo:
        back = np.empty_like(rows)
        back[order] = rows
        return back
    return rows[order]


def _gguf_name(name: str, family: str) -> str:
    gemma = family == "gemma3"
    for theirs, ours in (
        ("model.embed_tokens", "token_embd"),
        ("model.norm", "output_norm"),
        ("lm_head", "output"),
        ("model.layers", "blk"),
        ("self_attn.q_proj", "attn_q"),
        ("self_attn.k_proj", "attn_k"),
        ("self_attn.v_proj", "attn_v"),
        ("self_attn.o_proj", "attn_output"),
        ("self_attn.q_norm", "attn_q_norm"),
        ("self_attn.k_norm", "attn_k_norm"),
        ("post_attention_layernorm", "post_attention_norm" if gemma else "ffn_norm"),
        ("pre_feedforward_layernorm", "ffn_norm"),
        ("post_feedforward_layernorm", "post_ffw_norm"),
        ("input_layernorm", "attn_norm"),
        ("mlp.gate_proj", "ffn_gate"),
        ("mlp.up_proj", "ffn_up"),
        ("mlp.down_proj", "ffn_down"),
    ):
        name = name.replace(theirs, ours)
    return name

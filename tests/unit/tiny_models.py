"""Tiny tokenizers and model files, made on the spot."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as Inner

from forebay.catalog import ModelFiles, ModelMeta
from forebay.text.tokenizer import Tokenizer

#: Logits of a model around byte_level(): wider than the tokenizer, as padded vocabularies are.
WIDTH = 330
SPECIALS = ("<|im_start|>", "<|im_end|>", "<s>", "</s>")
SAMPLE = ["the quick brown fox jumps over the lazy dog", "你好，世界", "안녕하세요", "<|im_ end|> im_end im_start"]


def meta(**changes: object) -> ModelMeta:
    values: dict[str, object] = {
        "architecture": "llama",
        "context_length": 64,
        "vocab_size": 512,
        "eos_ids": (1,),
        "bos_id": None,
        "add_bos": False,
        "chat_template": None,
        "raw": {},
    }
    return ModelMeta(**(values | changes))  # type: ignore[arg-type]


def byte_level() -> Inner:
    inner = Inner(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    inner.train_from_iterator(
        SAMPLE,
        trainers.BpeTrainer(
            vocab_size=320,
            special_tokens=list(SPECIALS),
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    return inner


def sentencepiece_like(*, metaspace: bool) -> Inner:
    """Like Llama 2 (normalizer writes the first space) or like Mistral (Metaspace, scheme "first")."""
    letters = [chr(c) for c in range(0x21, 0x7F)]
    words = ["▁", "▁▁", "th", "▁th", "▁the", "he"]
    vocabulary = ["<unk>", *SPECIALS, *(f"<0x{n:02X}>" for n in range(256)), *letters, *words]
    inner = Inner(
        models.BPE(
            vocab={text: n for n, text in enumerate(vocabulary)},
            merges=[("▁", "▁"), ("t", "h"), ("▁", "th"), ("h", "e"), ("▁th", "e")],
            byte_fallback=True,
            unk_token="<unk>",
            fuse_unk=True,
        )
    )
    if metaspace:
        inner.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    else:
        inner.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    inner.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    inner.add_special_tokens([AddedToken(text, normalized=False) for text in ("<unk>", *SPECIALS)])
    return inner


def load(inner: Inner, folder: Path, **changes: object) -> Tokenizer:
    """Through the file, as a Hugging Face directory has it."""
    inner.save(str(folder / "tokenizer.json"))
    eos = inner.token_to_id("<|im_end|>")
    return Tokenizer.load(ModelFiles("tiny", "hf", folder), meta(**({"eos_ids": (eos,)} | changes)))


def write_hf(folder: Path, **files: object) -> ModelFiles:
    """A directory of JSON files named without their ending; a str is written as it is; None leaves a file out."""
    defaults: dict[str, object] = {
        "config": {"model_type": "llama", "vocab_size": 512, "max_position_embeddings": 128, "eos_token_id": 2}
    }
    for name, content in (defaults | files).items():
        if content is not None:
            text = content if isinstance(content, str) else json.dumps(content)
            (folder / f"{name}.json").write_text(text, encoding="utf-8")
    (folder / "model.safetensors").write_bytes(b"\0" * 64)
    return ModelFiles("tiny", "hf", folder)


def write_gguf(
    path: Path,
    *,
    pre: str | None = "gpt-2",
    model: str = "gpt2",
    extra: tuple[tuple[str, int], ...] = (),
    merges: tuple[str, ...] = ("t h", "th e"),
    eos: int | None = 0,
    **fields: int | bool | str,
) -> ModelFiles:
    """A GGUF of one tensor. Tokens: ``<|im_end|>``, the byte alphabet, ``extra`` (text, type), merged words."""
    tokens = ["<|im_end|>", *sorted(pre_tokenizers.ByteLevel.alphabet()), *(text for text, _ in extra)]
    types = [3, *[1] * 256, *(kind for _, kind in extra)]
    for merge in merges:
        tokens.append(merge.replace(" ", ""))
        types.append(1)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(256)
    writer.add_tokenizer_model(model)
    if pre is not None:
        writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges(list(merges))
    if eos is not None:
        writer.add_eos_token_id(eos)
    for key, value in fields.items():
        name = "tokenizer.chat_template" if key == "chat_template" else f"tokenizer.ggml.{key}"
        if isinstance(value, bool):
            writer.add_bool(name, value)
        elif isinstance(value, int):
            writer.add_uint32(name, value)
        else:
            writer.add_string(name, value)
    writer.add_tensor("token_embd.weight", np.zeros((len(tokens) + 3, 8), dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return ModelFiles("tiny", "gguf", path)


def save_chat(folder: Path, template: str, *, max_context: int) -> Any:
    """A tiny model of random weights that can chat, as a Hugging Face folder. Returns it as transformers has it."""
    import torch  # noqa: PLC0415 - seconds, which few tests need
    from transformers import LlamaConfig, LlamaForCausalLM  # noqa: PLC0415

    folder.mkdir(exist_ok=True)
    inner = byte_level()
    inner.save(str(folder / "tokenizer.json"))
    torch.manual_seed(1)
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=WIDTH,
        max_position_embeddings=max_context,
        initializer_range=0.3,
        eos_token_id=inner.token_to_id("<|im_end|>"),
        bos_token_id=None,
    )
    model = LlamaForCausalLM(config).eval()
    model.save_pretrained(folder)
    (folder / "chat_template.jinja").write_text(template)
    (folder / "tokenizer_config.json").write_text("{}")
    return model

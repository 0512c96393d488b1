"""What a model says of itself, from GGUF fields or Hugging Face JSON files, in one shape."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from ..contract import SamplingDefaults, Unsupported
from .cache import cached, code_version
from .files import ModelFiles, open_gguf
from .names import CATALOG

if TYPE_CHECKING:
    from gguf import GGUFReader

#: Control tokens that end a turn in some family. GGUF files name one or two of theirs by id and leave the rest.
_END_OF_TURN = frozenset(
    {"<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<|endoftext|>", "<|end_of_text|>", "<end_of_turn>", "</s>"}
)
_CONTROL = 3  # gguf.TokenType.CONTROL
#: Pre-tokenizers and tokenizer models whose models start with BOS unless the file says otherwise (as in llama.cpp).
_BOS_BY_DEFAULT = frozenset({("pre", "llama-bpe"), ("model", "llama")})


@dataclass(frozen=True, slots=True)
class ModelMeta:
    """Metadata of one model.

    ``context_length`` is in tokens. ``vocab_size`` is the width of the logits and may exceed the tokenizer's. Any of
    ``eos_ids`` ends an answer. ``add_bos``: a prompt starts with ``bos_id``. ``raw`` holds the GGUF fields by key,
    without the tokenizer's arrays, or config.json as it is. ``bos_token`` and ``eos_token`` are what the chat
    template calls by these names ("" if the model has none). ``sampling``: what the model recommends.
    """

    architecture: str
    context_length: int
    vocab_size: int
    eos_ids: tuple[int, ...]
    bos_id: int | None
    add_bos: bool
    chat_template: str | None
    raw: Mapping[str, Any]
    bos_token: str = ""
    eos_token: str = ""
    sampling: SamplingDefaults = SamplingDefaults()


def read_meta(files: ModelFiles) -> ModelMeta:
    """Raises Unsupported naming the file and the key that is missing or wrong."""
    read = _read_hf if files.kind == "hf" else _read_gguf
    meta = cached(files, "meta", code_version(__file__), lambda: read(files.path), write=_pack, read=_unpack)
    # Not part of what is kept: a catalog name recommends something else than the same file by its path.
    known = CATALOG.get(files.id) if files.kind == "gguf" else None
    return replace(meta, sampling=_gguf_sampling(_Keys(meta.raw, files.path), known.sampling)) if known else meta


def _pack(meta: ModelMeta) -> bytes:
    # json, not msgspec: it keeps infinities, long integers and lone surrogates of a config.json as they are.
    return json.dumps(asdict(meta)).encode()


def _unpack(data: bytes) -> ModelMeta:
    return msgspec.convert(json.loads(data), ModelMeta)


class _Keys:
    """Typed look-ups in one table; every error names file and key."""

    def __init__(self, table: object, origin: Path) -> None:
        if not isinstance(table, dict):
            raise Unsupported(f"{origin} is not a table of keys")
        self.table: dict[str, Any] = table
        self.origin = origin

    def wrong(self, key: str, expected: str) -> Unsupported:
        fault = f"{key!r} is not {expected}" if self.table.get(key) is not None else f"{key!r} is missing"
        return Unsupported(f"{self.origin}: {fault}")

    def text(self, key: str) -> str:
        value = self.table.get(key)
        if not isinstance(value, str):
            raise self.wrong(key, "a string")
        return value

    def count(self, key: str) -> int:
        value = self.table.get(key)
        if type(value) is not int or value < 1:
            raise self.wrong(key, "a positive integer")
        return value

    def ids(self, key: str, vocab_size: int) -> tuple[int, ...]:
        """Token ids under ``key``: an integer, a list of them, or nothing."""
        value = self.table.get(key)
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if not all(type(i) is int and 0 <= i < vocab_size for i in ids):
            raise self.wrong(key, f"a token id under {vocab_size}")
        return tuple(ids)


def _read_gguf(path: Path) -> ModelMeta:
    reader = open_gguf(path)
    arrays = {key for key, field in reader.fields.items() if key.startswith("tokenizer.") and len(field.data) > 1}
    try:
        raw = {key: field.contents() for key, field in reader.fields.items() if key not in arrays}
        types = [int(kind) for kind in _array(reader, "tokenizer.ggml.token_type")]
    except (ValueError, IndexError) as error:  # UnicodeDecodeError is a ValueError
        raise Unsupported(f"{path} is not a whole GGUF file: {error}") from error
    keys = _Keys(raw, path)
    architecture = keys.text("general.architecture")
    embeddings = [tensor for tensor in reader.tensors if tensor.name == "token_embd.weight"]
    if not embeddings or len(embeddings[0].shape) != 2:
        raise Unsupported(f"{path}: tensor 'token_embd.weight' is missing or not two-dimensional")
    vocab_size = int(embeddings[0].shape[1])

    tokens = reader.fields.get("tokenizer.ggml.tokens")

    def token(index: int) -> str:
        return str(tokens.contents(index)) if tokens is not None and index < len(tokens.data) else ""

    named = [keys.ids(f"tokenizer.ggml.{role}_token_id", vocab_size) for role in ("eos", "eot", "eom")]
    ends = {i for i, kind in enumerate(types) if kind == _CONTROL and token(i) in _END_OF_TURN}
    bos = keys.ids("tokenizer.ggml.bos_token_id", vocab_size)
    eos_ids = tuple(dict.fromkeys([i for ids in named for i in ids] + sorted(ends)))
    if not eos_ids:
        raise Unsupported(f"{path}: 'tokenizer.ggml.eos_token_id' is missing")
    template = raw.get("tokenizer.chat_template")
    by_default = any(raw.get(f"tokenizer.ggml.{key}") == value for key, value in _BOS_BY_DEFAULT)
    return ModelMeta(
        architecture=architecture,
        context_length=keys.count(f"{architecture}.context_length"),
        vocab_size=vocab_size,
        eos_ids=eos_ids,
        bos_id=bos[0] if bos else None,
        add_bos=bool(bos and raw.get("tokenizer.ggml.add_bos_token", by_default)),
        chat_template=template if isinstance(template, str) else None,
        raw=raw,
        bos_token=token(bos[0]) if bos else "",
        eos_token=token(eos_ids[0]),
        sampling=_gguf_sampling(keys, SamplingDefaults()),
    )


def _gguf_sampling(keys: _Keys, otherwise: SamplingDefaults) -> SamplingDefaults:
    return _sampling(keys, {name: f"general.sampling.{name}" for name in ("temp", "top_k", "top_p")}, otherwise)


def _sampling(keys: _Keys, names: Mapping[str, str], otherwise: SamplingDefaults) -> SamplingDefaults:
    """The model's recommendation under the file's own ``names``; what is missing or out of range is ``otherwise``."""

    def pick(name: str, low: float, high: float, default: float) -> float:
        value = keys.table.get(names[name])
        return value if isinstance(value, int | float) and low <= value <= high else default

    return SamplingDefaults(
        temperature=float(pick("temp", 0, 2, otherwise.temperature)),
        top_k=int(pick("top_k", 0, 2**31 - 1, otherwise.top_k)),
        top_p=float(pick("top_p", 1e-6, 1, otherwise.top_p)),
    )


def _array(reader: GGUFReader, key: str) -> list[Any]:
    field = reader.fields.get(key)
    return list(field.contents()) if field is not None else []


def _read_hf(path: Path) -> ModelMeta:
    config = _Keys(_json(path / "config.json"), path / "config.json")
    vocab_size = config.count("vocab_size")
    generation, tokenizer = (
        _Keys(_json(path / name) if (path / name).is_file() else {}, path / name)
        for name in ("generation_config.json", "tokenizer_config.json")
    )
    eos_ids = generation.ids("eos_token_id", vocab_size) or config.ids("eos_token_id", vocab_size)
    if not eos_ids:
        raise config.wrong("eos_token_id", "a token id")
    bos = config.ids("bos_token_id", vocab_size) or generation.ids("bos_token_id", vocab_size)
    bos_token = _token_text(tokenizer.table.get("bos_token"))
    return ModelMeta(
        architecture=config.text("model_type"),
        context_length=config.count("max_position_embeddings"),
        vocab_size=vocab_size,
        eos_ids=eos_ids,
        bos_id=bos[0] if bos else None,
        add_bos=bool(bos) and _hf_adds_bos(path, tokenizer.table, bos_token),
        chat_template=_hf_template(path, tokenizer),
        raw=config.table,
        bos_token=bos_token,
        eos_token=_token_text(tokenizer.table.get("eos_token")),
        sampling=_sampling(generation, {"temp": "temperature", "top_k": "top_k", "top_p": "top_p"}, SamplingDefaults()),
    )


def _json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise Unsupported(f"cannot read {path}: {error}") from error


def _token_text(token: object) -> str:
    """A token in tokenizer_config.json is its text or a table with ``content``."""
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else ""


def _hf_adds_bos(path: Path, config: Mapping[str, Any], bos_token: str) -> bool:
    """tokenizer_config.json says so, or else the post-processor of tokenizer.json puts BOS in front."""
    said = config.get("add_bos_token")
    if isinstance(said, bool):
        return said
    if not bos_token or not (path / "tokenizer.json").is_file():
        return False
    tokenizer = _Keys(_json(path / "tokenizer.json"), path / "tokenizer.json")
    return json.dumps(bos_token) in json.dumps(tokenizer.table.get("post_processor"))


def _hf_template(path: Path, tokenizer: _Keys) -> str | None:
    file = path / "chat_template.jinja"
    if file.is_file():
        try:
            return file.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise Unsupported(f"cannot read {file}: {error}") from error
    template = tokenizer.table.get("chat_template")
    if isinstance(template, list):  # several by name
        named = {item.get("name"): item.get("template") for item in template if isinstance(item, dict)}
        template = named.get("default")
    if template is not None and not isinstance(template, str):
        raise tokenizer.wrong("chat_template", "a string")
    return template

"""The model's own tokenizer, from tokenizer.json or from a GGUF file, with exact bytes for every token."""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import msgspec
import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers

from ..catalog import ModelFiles, ModelMeta, cached, code_version, open_gguf
from ..contract import InvalidRequest, Unsupported
from .specials import Specials

_SPACE = "▁"  # SentencePiece writes a space so
_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")

# Token types of GGUF (gguf.TokenType, repeated because importing gguf costs start-up time).
_UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED = 2, 3, 4, 5

_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}{{1,3}}|{_REST}"
_QWEN2 = rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}|{_REST}"


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's alphabet: character -> byte. Printable Latin-1 stands for itself, the rest for U+0100 and on."""
    itself = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in itself]
    return {chr(byte): byte for byte in itself} | {chr(0x100 + n): byte for n, byte in enumerate(others)}


_BYTES = {ord(char): byte for char, byte in _byte_alphabet().items()}


def _byte_level(*before: pre_tokenizers.PreTokenizer, words: bool) -> pre_tokenizers.PreTokenizer:
    """``before``, then bytes; ``words``: split at GPT-2's word boundaries as well."""
    return pre_tokenizers.Sequence([*before, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=words)])


def _split(pattern: str) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated")


#: ``tokenizer.ggml.pre`` -> pre-tokenizer
_PRE_TOKENIZERS = {
    "default": _byte_level(words=True),
    "gpt-2": _byte_level(words=True),
    "smollm": _byte_level(pre_tokenizers.Digits(individual_digits=True), words=True),
    "llama-bpe": _byte_level(_split(_LLAMA3), words=False),
    "qwen2": _byte_level(_split(_QWEN2), words=False),
}


class Tokenizer:
    """Text to token ids and ids to bytes. Immutable once built; may be used from several threads."""

    def __init__(self, inner: tokenizers.Tokenizer, *, hidden: frozenset[int] = frozenset()) -> None:
        """``hidden`` are ids without text that are not special (unused entries). Raises Unsupported for a decoder
        that is neither byte-level nor SentencePiece-like."""
        inner.no_truncation()
        inner.no_padding()
        # Special tokens are found by Specials alone; inside of inner they are plain text.
        inner.encode_special_tokens = True
        added = inner.get_added_tokens_decoder()
        special = {index: token for index, token in added.items() if token.special}
        self.specials = Specials(
            {token.content: index for index, token in special.items()},
            strip_left={token.content for token in special.values() if token.lstrip},
            strip_right={token.content for token in special.values() if token.rstrip},
        )
        self._special = frozenset(special)
        self._inner = inner
        self._inside = _without_first_space(inner)
        byte_level, self.strips_first_space = _decoder_of(inner)
        self._bytes = _bytes_by_id(inner, byte_level, {i: token.content for i, token in added.items()})
        for index in self._special | hidden:
            self._bytes[index] = b""

    @classmethod
    def load(cls, files: ModelFiles, meta: ModelMeta) -> Self:
        """Raises Unsupported naming what is not supported: the tokenizer's model, pre-tokenizer or decoder."""
        if files.kind == "gguf":
            inner, hidden = cached(
                files,
                "tokenizer",
                code_version(__file__, also=tokenizers.__version__),
                lambda: _from_gguf(files.path),
                write=_pack,
                read=_unpack,
            )
        else:
            inner, hidden = _from_json(files.path / "tokenizer.json"), frozenset()
        # What ends or begins a text is special even where the file forgot to say so.
        ends = [inner.id_to_token(index) for index in (*meta.eos_ids, meta.bos_id) if index is not None]
        flagged = {token.content for token in inner.get_added_tokens_decoder().values() if token.special}
        inner.add_special_tokens(
            [AddedToken(text, special=True, normalized=False) for text in ends if text and text not in flagged]
        )
        return cls(inner, hidden=hidden)

    def encode(self, text: str, *, specials: bool) -> list[int]:
        """Ids of ``text``. With ``specials`` special tokens in the text count as such, without they are plain text.

        Adds no BOS. Raises InvalidRequest for text that is not Unicode (lone surrogates).
        """
        return self.encode_pieces(self.specials.split(text) if specials else [text])

    def encode_pieces(self, pieces: list[str | int]) -> list[int]:
        """Ids of one text given as plain pieces and ids of special tokens between them (as Specials.split gives)."""
        ids: list[int] = []
        for n, piece in enumerate(pieces):
            if isinstance(piece, int):
                ids.append(piece)
            else:
                ids.extend(self._plain(piece, self._inner if n == 0 else self._inside))
        return ids

    def _plain(self, text: str, inner: tokenizers.Tokenizer) -> list[int]:
        try:
            encoding = inner.encode(text, add_special_tokens=False)
        except (TypeError, UnicodeEncodeError) as error:
            raise InvalidRequest("text has characters that are not Unicode (lone surrogates)") from error
        ids: list[int] = encoding.ids
        if self._special.isdisjoint(ids):
            return ids
        # A vocabulary that holds a special token as a word too can hit it from plain text: spell that word.
        spelled: list[int] = []
        for index, (start, end) in zip(ids, encoding.offsets, strict=True):
            if index in self._special and end - start > 1:
                spelled += [
                    i for char in text[start:end] for i in self._inside.encode(char, add_special_tokens=False).ids
                ]
            else:
                spelled.append(index)
        return spelled

    def token_bytes(self, index: int) -> bytes:
        """The exact bytes that a token stands for: b"" for special tokens and for ids beyond the vocabulary."""
        return self._bytes[index] if 0 <= index < len(self._bytes) else b""

    def token_text(self, index: int) -> str:
        """How the vocabulary writes a token (``Ġthe``, ``<|im_end|>``): "" for ids beyond it."""
        return self._inner.id_to_token(index) or ""

    def is_special(self, index: int) -> bool:
        return index in self._special

    @property
    def special_ids(self) -> Mapping[str, int]:
        """Special tokens by text."""
        return self.specials.ids

    @property
    def size(self) -> int:
        """One more than the highest id. The logits may be wider."""
        return len(self._bytes)


def _from_json(path: Path) -> tokenizers.Tokenizer:
    if not path.is_file():
        raise Unsupported(f"{path} is missing")
    try:
        return tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception
        raise Unsupported(f"cannot read {path}: {error}") from error


def _from_gguf(path: Path) -> tuple[tokenizers.Tokenizer, frozenset[int]]:
    """The tokenizer and the ids of its unused entries."""
    fields = open_gguf(path).fields

    def field(key: str, default: Any = None) -> Any:
        try:
            value = fields[f"tokenizer.ggml.{key}"].contents() if f"tokenizer.ggml.{key}" in fields else default
        except (ValueError, IndexError) as error:  # UnicodeDecodeError is a ValueError
            raise Unsupported(f"{path}: 'tokenizer.ggml.{key}' is damaged: {error}") from error
        if value is None:
            raise Unsupported(f"{path}: 'tokenizer.ggml.{key}' is missing")
        return value

    model, pre = field("model"), field("pre", "default")
    if model != "gpt2":
        raise Unsupported(f"{path}: tokenizer model {model!r} is not supported (only 'gpt2', byte-level BPE)")
    if pre not in _PRE_TOKENIZERS:
        raise Unsupported(f"{path}: pre-tokenizer {pre!r} is not supported ({', '.join(_PRE_TOKENIZERS)} are)")
    tokens: list[str] = field("tokens")
    types: list[int] = field("token_type", [1] * len(tokens))
    if len(types) != len(tokens):
        raise Unsupported(f"{path}: 'tokenizer.ggml.token_type' has {len(types)} entries for {len(tokens)} tokens")
    try:
        merges = [(left, right) for left, right in (merge.split(" ", 1) for merge in field("merges"))]
        inner = tokenizers.Tokenizer(
            # Llama 3 takes a word that is in the vocabulary as it is, even where no merges lead to it.
            models.BPE(
                vocab={text: i for i, text in enumerate(tokens)}, merges=merges, ignore_merges=pre == "llama-bpe"
            )
        )
    except Exception as error:  # the library raises bare Exception
        raise Unsupported(f"{path}: 'tokenizer.ggml.merges' do not fit the tokens: {error}") from error
    inner.pre_tokenizer = _PRE_TOKENIZERS[pre]
    inner.decoder = decoders.ByteLevel()
    if pre == "qwen2":
        inner.normalizer = normalizers.NFC()
    for kinds, special in (({_CONTROL, _UNKNOWN}, True), ({_USER_DEFINED}, False)):
        inner.add_tokens(
            [
                AddedToken(text, special=special, normalized=False)
                for text, kind in zip(tokens, types, strict=True)
                if kind in kinds and text
            ]
        )
    return inner, frozenset(i for i, kind in enumerate(types) if kind == _UNUSED)


class _Kept(msgspec.Struct):
    """A tokenizer in the cache: the library's own JSON, and the ids of unused entries, which it has no place for."""

    hidden: list[int]
    inner: msgspec.Raw


def _pack(built: tuple[tokenizers.Tokenizer, frozenset[int]]) -> bytes:
    inner, hidden = built
    return msgspec.json.encode(_Kept(sorted(hidden), msgspec.Raw(inner.to_str())))


def _unpack(data: bytes) -> tuple[tokenizers.Tokenizer, frozenset[int]]:
    kept = msgspec.json.decode(data, type=_Kept)
    return tokenizers.Tokenizer.from_buffer(bytes(kept.inner)), frozenset(kept.hidden)


def _without_first_space(inner: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    """For plain pieces after the first: Metaspace's scheme "first" puts a space before a text, not before a piece."""
    if inner.pre_tokenizer is None or b'"prepend_scheme":"first"' not in inner.pre_tokenizer.__getstate__():
        return inner
    state = json.loads(inner.to_str())
    for step in state["pre_tokenizer"].get("pretokenizers", [state["pre_tokenizer"]]):
        if step.get("prepend_scheme") == "first":
            step["prepend_scheme"] = "never"
    inside = tokenizers.Tokenizer.from_str(json.dumps(state))
    inside.encode_special_tokens = True
    return inside


def _decoder_of(inner: tokenizers.Tokenizer) -> tuple[bool, bool]:
    """(byte-level?, does decoding strip one space at the very start?)"""
    state = json.loads(inner.decoder.__getstate__()) if inner.decoder is not None else {"type": "none"}
    steps = {step["type"]: step for step in state.get("decoders", [state])}
    if "ByteLevel" in steps:
        return True, False
    if "Metaspace" in steps:
        return False, steps["Metaspace"].get("prepend_scheme") != "never"
    if steps.get("Replace", {}).get("pattern") == {"String": _SPACE}:
        return False, steps.get("Strip", {}).get("start", 0) > 0
    raise Unsupported(f"tokenizer decoder {', '.join(steps)} is not supported (byte-level or SentencePiece-like are)")


def _bytes_by_id(inner: tokenizers.Tokenizer, byte_level: bool, added: Mapping[int, str]) -> list[bytes]:
    vocabulary = inner.get_vocab(with_added_tokens=True)
    table = [b""] * (max(vocabulary.values(), default=-1) + 1)
    spell = _byte_level_bytes if byte_level else _sentencepiece_bytes
    for text, index in vocabulary.items():
        table[index] = added[index].encode() if index in added else spell(text)
    return table


def _byte_level_bytes(text: str) -> bytes:
    try:
        return codecs.charmap_encode(text, "strict", _BYTES)[0]  # in C: there are 100,000 of them at every start
    except UnicodeEncodeError:  # not of the alphabet
        return text.encode()


def _sentencepiece_bytes(text: str) -> bytes:
    if match := _BYTE.fullmatch(text):
        return bytes([int(match[1], 16)])
    return text.replace(_SPACE, " ").encode()

"""The model's own tokenizer, from tokenizer.json or from a GGUF file, with exact bytes for every token."""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Self

import msgspec
import tokenizers
from tokenizers import AddedToken

from ..catalog import ModelFiles, ModelMeta, cached, code_version
from ..contract import InvalidRequest, Unsupported
from . import gguf_tokenizer
from .gguf_tokenizer import SPACE, GGUFTokenizer, read_gguf_tokenizer
from .specials import Specials

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's alphabet: character -> byte. Printable Latin-1 stands for itself, the rest for U+0100 and on."""
    itself = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in itself]
    return {chr(byte): byte for byte in itself} | {chr(0x100 + n): byte for n, byte in enumerate(others)}


_BYTES = {ord(char): byte for char, byte in _byte_alphabet().items()}


class Tokenizer:
    """Text to token ids and ids to bytes. Immutable once built; may be used from several threads."""

    def __init__(
        self, inner: tokenizers.Tokenizer, *, hidden: frozenset[int] = frozenset(), space_prefix: bool = False
    ) -> None:
        """``hidden`` are ids without text that are not special (unused entries). ``space_prefix``: a text begins with
        a space that ``inner`` does not write itself. Raises Unsupported for a decoder that is neither byte-level nor
        SentencePiece-like."""
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
        # What stands for unknown text is in the middle of a text; all other special tokens stand between texts.
        unknown = getattr(inner.model, "unk_token", None)
        self._space_after = self._special - {inner.token_to_id(unknown or "")} if space_prefix else None
        byte_level, self.strips_first_space = _decoder_of(inner)
        self._bytes = _bytes_by_id(inner, byte_level, {i: token.content for i, token in added.items()})
        for index in self._special | hidden:
            self._bytes[index] = b""

    @classmethod
    def load(cls, files: ModelFiles, meta: ModelMeta) -> Self:
        """Raises Unsupported naming what is not supported: the tokenizer's model, pre-tokenizer or decoder."""
        if files.kind == "gguf":
            built = cached(
                files,
                "tokenizer",
                code_version(__file__, gguf_tokenizer.__file__, also=tokenizers.__version__),
                lambda: read_gguf_tokenizer(files.path),
                write=_pack,
                read=_unpack,
            )
            inner, hidden, space_prefix = built.inner, built.hidden, built.space_prefix
        else:
            inner, hidden, space_prefix = _from_json(files.path / "tokenizer.json"), frozenset(), False
        # What ends or begins a text is special even where the file forgot to say so.
        ends = [inner.id_to_token(index) for index in (*meta.eos_ids, meta.bos_id) if index is not None]
        flagged = {token.content for token in inner.get_added_tokens_decoder().values() if token.special}
        inner.add_special_tokens(
            [AddedToken(text, special=True, normalized=False) for text in ends if text and text not in flagged]
        )
        return cls(inner, hidden=hidden, space_prefix=space_prefix)

    def encode(self, text: str, *, specials: bool) -> list[int]:
        """Ids of ``text``. With ``specials`` special tokens in the text count as such, without they are plain text.

        Adds no BOS. Raises InvalidRequest for text that is not Unicode (lone surrogates).
        """
        return self.encode_pieces(self.specials.split(text) if specials else [text])

    def encode_pieces(self, pieces: list[str | int]) -> list[int]:
        """Ids of one text given as plain pieces and ids of special tokens between them (as Specials.split gives).

        A space that the file has the encoder write before a text (``add_space_prefix`` of GGUF) is written before each
        piece that begins one: the first, and those behind special tokens, as llama.cpp does, and as Llama 2 and Mistral
        were trained, whose own code encodes every turn by itself.
        """
        ids: list[int] = []
        for n, piece in enumerate(pieces):
            if isinstance(piece, int):
                ids.append(piece)
                continue
            if self._space_after is not None and piece and (n == 0 or pieces[n - 1] in self._space_after):
                piece = " " + piece  # noqa: PLW2901
            ids.extend(self._plain(piece, self._inner if n == 0 else self._inside))
        return ids

    def encode_inside(self, text: str) -> list[int]:
        """Ids of plain ``text`` that goes on inside of another, where no tokenizer puts a space before it."""
        return self._plain(text, self._inside)

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


class _Kept(msgspec.Struct):
    """A tokenizer in the cache: the library's own JSON, and what it has no place for."""

    hidden: list[int]
    space_prefix: bool
    inner: msgspec.Raw


def _pack(built: GGUFTokenizer) -> bytes:
    return msgspec.json.encode(_Kept(sorted(built.hidden), built.space_prefix, msgspec.Raw(built.inner.to_str())))


def _unpack(data: bytes) -> GGUFTokenizer:
    kept = msgspec.json.decode(data, type=_Kept)
    inner = tokenizers.Tokenizer.from_buffer(bytes(kept.inner))
    return GGUFTokenizer(inner, frozenset(kept.hidden), kept.space_prefix)


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
    if steps.get("Replace", {}).get("pattern") == {"String": SPACE}:
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
    if text.startswith("<0x") and (match := _BYTE.fullmatch(text)):  # looked at first: it is the faster by far
        return bytes([int(match[1], 16)])
    return text.replace(SPACE, " ").encode()

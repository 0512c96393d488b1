"""The tokenizer that a GGUF file describes, built with the ``tokenizers`` library.

Two models are known: ``gpt2`` is byte-level BPE with its merges in the file; ``llama`` is SentencePiece's BPE (Llama 2,
Mistral, Gemma), whose file has scores instead of merges. All others (``t5``, ``bert``, ``rwkv``, ...) are refused by
name.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers

from ..catalog import open_gguf
from ..contract import Unsupported

SPACE = "▁"  # SentencePiece writes a space so

# Token types of GGUF (gguf.TokenType, repeated because importing gguf costs start-up time).
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = 1, 2, 3, 4, 5, 6

_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}{{1,3}}|{_REST}"
_QWEN2 = rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}|{_REST}"


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


@dataclass(frozen=True, slots=True)
class GGUFTokenizer:
    """What a file describes. ``hidden`` are the ids of its unused entries. ``space_prefix``: the encoder writes a space
    before a text, and ``inner`` leaves that to its caller: only who has the whole text knows where it begins."""

    inner: tokenizers.Tokenizer
    hidden: frozenset[int]
    space_prefix: bool


class _Fields:
    """The tokenizer's fields of one file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._fields = open_gguf(path).fields

    def get(self, key: str, default: Any = None) -> Any:
        """What the file says under ``tokenizer.ggml.<key>``. Raises Unsupported if it is damaged, or missing and
        ``default`` is None."""
        field = self._fields.get(f"tokenizer.ggml.{key}")
        try:
            value = default if field is None else field.contents()
        except (ValueError, IndexError) as error:  # UnicodeDecodeError is a ValueError
            raise self.wrong(f"'tokenizer.ggml.{key}' is damaged: {error}") from error
        if value is None:
            raise self.wrong(f"'tokenizer.ggml.{key}' is missing")
        return value

    def per_token(self, key: str, n_tokens: int, default: Any = None) -> list[Any]:
        values: list[Any] = self.get(key, default)
        if len(values) != n_tokens:
            raise self.wrong(f"'tokenizer.ggml.{key}' has {len(values)} entries for {n_tokens} tokens")
        return values

    def wrong(self, fault: str) -> Unsupported:
        return Unsupported(f"{self.path}: {fault}")


def read_gguf_tokenizer(path: Path) -> GGUFTokenizer:
    """Raises Unsupported naming the file and what of it is not supported, damaged or missing."""
    fields = _Fields(path)
    model = fields.get("model")
    if model == "gpt2":
        return _byte_level_bpe(fields)
    if model == "llama":
        return _sentencepiece_bpe(fields)
    raise fields.wrong(
        f"tokenizer model {model!r} is not supported ('gpt2', byte-level BPE, and 'llama', SentencePiece's BPE, are)"
    )


def _byte_level_bpe(fields: _Fields) -> GGUFTokenizer:
    pre = fields.get("pre", "default")
    if pre not in _PRE_TOKENIZERS:
        raise fields.wrong(f"pre-tokenizer {pre!r} is not supported ({', '.join(_PRE_TOKENIZERS)} are)")
    tokens: list[str] = fields.get("tokens")
    types: list[int] = fields.per_token("token_type", len(tokens), [_NORMAL] * len(tokens))
    try:
        merges = [(left, right) for left, right in (merge.split(" ", 1) for merge in fields.get("merges"))]
        inner = tokenizers.Tokenizer(
            # Llama 3 takes a word that is in the vocabulary as it is, even where no merges lead to it.
            models.BPE(
                vocab={text: i for i, text in enumerate(tokens)}, merges=merges, ignore_merges=pre == "llama-bpe"
            )
        )
    except Unsupported:
        raise
    except Exception as error:  # the library raises bare Exception
        raise fields.wrong(f"'tokenizer.ggml.merges' do not fit the tokens: {error}") from error
    inner.pre_tokenizer = _PRE_TOKENIZERS[pre]
    inner.decoder = decoders.ByteLevel()
    if pre == "qwen2":
        inner.normalizer = normalizers.NFC()
    _add(inner, tokens, types, normalized=False)
    hidden = frozenset(i for i, kind in enumerate(types) if kind == _UNUSED)
    return GGUFTokenizer(inner, hidden, space_prefix=False)


def _sentencepiece_bpe(fields: _Fields) -> GGUFTokenizer:
    """SentencePiece's BPE: of all neighbours whose joined text is a piece, those with the highest score merge first.

    What is not a piece is spelled in byte tokens, so that no text is lost; but U+2581 is how this family writes a
    space, and comes back as one. As SentencePiece does it where its normalization is the identity, which it is for
    models that llama.cpp calls ``llama``. ``tokenizer.ggml.pre`` and ``merges`` have no meaning here (nor there).

    The library gives each pair its own rank, where SentencePiece ranks by the joined piece alone and then goes from
    left to right. They could part only where a piece overlaps itself in the text and is split in two ways there: with
    Gemma's vocabulary not seen in 850,000 texts of repeated syllables.
    """
    tokens: list[str] = fields.get("tokens")
    types: list[int] = fields.per_token("token_type", len(tokens))
    if len(fields.get("precompiled_charsmap", [])) > 0 or fields.get("remove_extra_whitespaces", False):
        raise fields.wrong(
            "tokenizer model 'llama' with 'precompiled_charsmap' or 'remove_extra_whitespaces' (a normalization of the "
            "text) is not supported"
        )
    scores: list[float] = fields.get("scores", [])
    if len(scores) != len(tokens):
        raise fields.wrong(
            f"tokenizer model 'llama' goes by scores, and 'tokenizer.ggml.scores' has {len(scores)} entries for "
            f"{len(tokens)} tokens"
        )
    # Files from before the converter did so write the spaces of user-defined tokens as the model's pieces do.
    known = set(tokens)
    tokens = [
        spaced if kind == _USER_DEFINED and (spaced := text.replace(SPACE, " ")) not in known else text
        for text, kind in zip(tokens, types, strict=True)
    ]
    # Unused entries stay out: one of a single character would else be taken for that character.
    vocabulary = {text: i for i, (text, kind) in enumerate(zip(tokens, types, strict=True)) if kind != _UNUSED}
    spelled = {text for text, kind in zip(tokens, types, strict=True) if kind == _BYTE}
    if missing := [name for n in range(256) if (name := f"<0x{n:02X}>") not in spelled]:
        raise fields.wrong(f"byte tokens are missing ({missing[0]}): the vocabulary cannot spell every text")
    unknown = next((text for text, kind in zip(tokens, types, strict=True) if kind == _UNKNOWN), None)
    merges = _merges(fields, tokens, types, scores)
    inner = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=merges, byte_fallback=True, unk_token=unknown))
    space_prefix = bool(fields.get("add_space_prefix", True))
    inner.normalizer = normalizers.Replace(" ", SPACE)
    steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    inner.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if space_prefix else steps)
    # SentencePiece looks for user-defined pieces after it has written the spaces, so they are found in that text.
    _add(inner, tokens, types, normalized=True)
    return GGUFTokenizer(inner, frozenset(), space_prefix)


def _merges(
    fields: _Fields, tokens: Sequence[str], types: Sequence[int], scores: Sequence[float]
) -> list[tuple[str, str]]:
    """All pairs of pieces that join to a piece, the best first. Only normal pieces: text never becomes another kind
    by merging, and user-defined ones are found before."""
    score_of = {text: score for text, kind, score in zip(tokens, types, scores, strict=True) if kind == _NORMAL}
    if len(score_of) > 1 and len(set(score_of.values())) == 1:  # some converters of old write no scores
        raise fields.wrong("'tokenizer.ggml.scores' are all the same, so what merges first is not known")
    return [
        (text[:cut], text[cut:])
        for text in sorted(score_of, key=score_of.__getitem__, reverse=True)
        for cut in range(len(text) - 1, 0, -1)  # long parts first, as in transformers' generate_merges
        if text[:cut] in score_of and text[cut:] in score_of
    ]


def _add(inner: tokenizers.Tokenizer, tokens: Sequence[str], types: Sequence[int], *, normalized: bool) -> None:
    """Tell ``inner`` its special and user-defined tokens; ``normalized``: the latter are found in normalized text."""
    for kinds, special in (({_CONTROL, _UNKNOWN}, True), ({_USER_DEFINED}, False)):
        inner.add_tokens(
            [
                AddedToken(text, special=special, normalized=normalized and not special)
                for text, kind in zip(tokens, types, strict=True)
                if kind in kinds and text
            ]
        )

"""Ids as the model knows them, exact bytes, and special tokens that text cannot reach."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tiny_models import SPECIALS, byte_level, load, meta, sentencepiece_like, write_gguf
from tokenizers import AddedToken, decoders, pre_tokenizers
from tokenizers import Tokenizer as Inner

from forebay.catalog import ModelFiles, read_meta
from forebay.contract import InvalidRequest, Unsupported
from forebay.text.tokenizer import Tokenizer

TEXTS = [
    "",
    " ",
    "Hello there, how's it going? I'll say: we're FINE.",
    "你好，世界！今天天气怎么样？",
    "한국어 문장입니다. 日本語もあります。",
    "👩‍👩‍👧‍👦 and 🇨🇭 and 🏳️‍🌈!",
    "   runs \n\n\n\t\t of   whitespace \r\n ",
    "def f(x):\n    return {'a': x ** y}\n\n\nclass A:\n\tpass\n",
    "naïve cafe\u0301 ﬁne \u200b zero",
    "typed <|im_end|> and <|im_start|>user",
    "\x00\x01\x7f\ufeff",
]


def decode(tokenizer: Tokenizer, ids: list[int]) -> str:
    return b"".join(map(tokenizer.token_bytes, ids)).decode()


def test_demo_ids_equal_transformers(demo_tokenizer: Tokenizer, demo_judge: Any) -> None:
    for text in TEXTS:
        assert demo_tokenizer.encode(text, specials=True) == demo_judge.encode(text, add_special_tokens=False), text
        plain = demo_tokenizer.encode(text, specials=False)
        assert plain == demo_judge.encode(text, add_special_tokens=False, split_special_tokens=True), text
        assert decode(demo_tokenizer, plain) == text


def test_demo_digits_are_split_one_by_one(demo_tokenizer: Tokenizer, demo_judge: Any) -> None:
    """transformers' conversion of GGUF leaves the digit split out: put it in, as the original tokenizer has it."""
    inner = Inner.from_str(demo_judge.backend_tokenizer.to_str())
    inner.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    for text in ("In 2024, 3.14159 and 1,000,000!", "a1b22c333", "  42  ", "x = 0x1F; y=12e-7", "٣٤ ²³ １２"):
        ids = demo_tokenizer.encode(text, specials=False)
        assert ids == inner.encode(text, add_special_tokens=False).ids, text
        assert decode(demo_tokenizer, ids) == text
    pieces = [demo_tokenizer.token_bytes(i) for i in demo_tokenizer.encode("12345", specials=False)]
    assert pieces == [b"1", b"2", b"3", b"4", b"5"]


def test_demo_specials(demo_tokenizer: Tokenizer) -> None:
    assert demo_tokenizer.special_ids["<|im_start|>"] == 1
    assert demo_tokenizer.special_ids["<|im_end|>"] == 2
    assert len(demo_tokenizer.special_ids) == 17
    assert demo_tokenizer.is_special(2)
    assert not demo_tokenizer.is_special(100)
    assert demo_tokenizer.size == 49152
    assert [demo_tokenizer.token_bytes(i) for i in (0, 2, -1, 49152, 10**9)] == [b""] * 5


@pytest.mark.parametrize(
    ("pre", "pieces"),
    [
        ("smollm", ["1", "2", "3", "4", "5"]),
        ("qwen2", ["1", "2", "3", "4", "5"]),
        ("llama-bpe", ["123", "45"]),
        ("gpt-2", ["12345"]),
        ("default", ["12345"]),
        (None, ["12345"]),
    ],
)
def test_pre_tokenizer_decides_where_digits_join(tmp_path: Path, pre: str | None, pieces: list[str]) -> None:
    files = write_gguf(tmp_path / "m.gguf", pre=pre, merges=("1 2", "12 3", "4 5", "123 45"))
    tokenizer = Tokenizer.load(files, read_meta(files))
    assert [tokenizer.token_bytes(i).decode() for i in tokenizer.encode("12345", specials=False)] == pieces


@pytest.mark.parametrize(
    ("pre", "text", "pieces"),
    [
        ("gpt-2", "x'LL", ["x", "'", "LL"]),
        ("llama-bpe", "x'LL", ["x", "'LL"]),
        ("qwen2", "x'LL", ["x", "'LL"]),
        ("llama-bpe", "(LL", ["(LL"]),
        ("gpt-2", "(LL", ["(", "LL"]),
        ("qwen2", "cafe\u0301", ["c", "a", "f", "é"]),
    ],
)
def test_pre_tokenizer_decides_where_words_begin(tmp_path: Path, pre: str, text: str, pieces: list[str]) -> None:
    files = write_gguf(tmp_path / "m.gguf", pre=pre, merges=("L L", "' LL", "( LL", "Ã ©"))
    tokenizer = Tokenizer.load(files, read_meta(files))
    assert [tokenizer.token_bytes(i).decode() for i in tokenizer.encode(text, specials=False)] == pieces


def test_kinds_of_gguf_tokens(tmp_path: Path) -> None:
    extra = (("stop", 3), ("<think>", 4), ("[PAD1]", 5), ("<eot>", 1))
    files = write_gguf(tmp_path / "m.gguf", pre="llama-bpe", extra=extra, eot_token_id=260)
    tokenizer = Tokenizer.load(files, read_meta(files))
    stop, think, pad, eot = range(257, 261)
    assert tokenizer.special_ids == {"<|im_end|>": 0, "stop": stop, "<eot>": eot}  # eot: named as an end of turn
    assert tokenizer.encode("stop<think>", specials=True) == [stop, think]
    # Llama 3 takes whole words of the vocabulary without merges; a control token is none, however it is spelled.
    plain = tokenizer.encode("stop stop<think>", specials=False)
    assert stop not in plain
    assert plain[-1] == think  # user-defined tokens are text
    assert decode(tokenizer, plain) == "stop stop<think>"
    assert [tokenizer.token_bytes(i) for i in (stop, think, pad, eot)] == [b"", b"<think>", b"", b""]


def test_an_added_token_is_spelled_as_it_is_and_a_strange_one_too(tmp_path: Path) -> None:
    files = write_gguf(tmp_path / "m.gguf", extra=(("Ġadded", 4), ("Ġword", 1), ("two words", 1)))
    tokenizer = Tokenizer.load(files, read_meta(files))
    assert [tokenizer.token_bytes(i) for i in (257, 258, 259)] == ["Ġadded".encode(), b" word", b"two words"]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        *(
            ({"model": model}, f"tokenizer model '{model}' is not supported")
            for model in ("t5", "bert", "rwkv", "plamo2")
        ),
        ({"model": "llama"}, "tokenizer model 'llama' goes by scores"),
        ({"pre": "gpt-4o"}, "pre-tokenizer 'gpt-4o' is not supported"),
        ({"merges": ("q zz",)}, "'tokenizer.ggml.merges' do not fit"),
    ],
)
def test_gguf_tokenizers_that_are_refused(tmp_path: Path, fields: dict[str, Any], message: str) -> None:
    files = write_gguf(tmp_path / "m.gguf", **fields)
    with pytest.raises(Unsupported, match=message):
        Tokenizer.load(files, meta())


def test_hugging_face_tokenizers_that_are_refused(tmp_path: Path) -> None:
    files = ModelFiles("x", "hf", tmp_path)
    with pytest.raises(Unsupported, match=r"tokenizer\.json is missing"):
        Tokenizer.load(files, meta())
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(Unsupported, match=r"cannot read .*tokenizer\.json"):
        Tokenizer.load(files, meta())
    inner = byte_level()
    inner.decoder = decoders.WordPiece()
    with pytest.raises(Unsupported, match="decoder WordPiece"):
        load(inner, tmp_path)


@pytest.mark.parametrize("kind", ["bytes", "prepend", "metaspace"])
def test_hugging_face_ids_are_the_library_s_own(tmp_path: Path, kind: str) -> None:
    inner = byte_level() if kind == "bytes" else sentencepiece_like(metaspace=kind == "metaspace")
    tokenizer = load(inner, tmp_path)
    texts = [*TEXTS, "<|im_start|>the</s> the <s>", "the<|im_end|>the <|im_end|> "]
    for text in texts:
        assert tokenizer.encode(text, specials=True) == inner.encode(text, add_special_tokens=False).ids
        plain = tokenizer.encode(text, specials=False)
        assert not any(map(tokenizer.is_special, plain))
        if text and not (kind == "metaspace" and text[0] == " "):  # Metaspace takes that for its own first space
            assert decode(tokenizer, plain).removeprefix(" " if tokenizer.strips_first_space else "") == text
    assert set(SPECIALS) <= set(tokenizer.special_ids)
    assert tokenizer.strips_first_space is (kind != "bytes")


def test_sentencepiece_bytes(tmp_path: Path) -> None:
    inner = sentencepiece_like(metaspace=False)
    tokenizer = load(inner, tmp_path)
    assert tokenizer.token_bytes(inner.token_to_id("<0xE4>")) == b"\xe4"
    assert tokenizer.token_bytes(inner.token_to_id("▁the")) == b" the"
    assert tokenizer.token_bytes(inner.token_to_id("</s>")) == b""


def test_specials_that_swallow_whitespace(tmp_path: Path) -> None:
    inner = byte_level()
    inner.add_special_tokens([AddedToken("<|end|>", rstrip=True), AddedToken("<|mask|>", lstrip=True)])
    tokenizer = load(inner, tmp_path)
    for text in ("a<|end|>\n \n b", "a \n<|mask|> b", "<|end|>  <|mask|>", " <|end|> "):
        assert tokenizer.encode(text, specials=True) == inner.encode(text, add_special_tokens=False).ids


def test_an_end_token_is_special_even_where_the_file_forgot(tmp_path: Path) -> None:
    inner = byte_level()
    inner.add_tokens([AddedToken("<turn_end>", normalized=False)])
    index = inner.token_to_id("<turn_end>")
    assert load(inner, tmp_path).encode("<turn_end>", specials=False) == [index]
    tokenizer = load(inner, tmp_path, eos_ids=(index,))
    assert tokenizer.special_ids["<turn_end>"] == index
    assert index not in tokenizer.encode("a<turn_end>", specials=False)
    assert tokenizer.encode("a<turn_end>", specials=True)[-1] == index


def test_settings_of_the_file_that_would_cut_or_pad_are_off(tmp_path: Path) -> None:
    inner = byte_level()
    inner.enable_truncation(2)
    inner.enable_padding(length=50)
    assert len(load(inner, tmp_path).encode("zzzzz", specials=False)) == 5


def test_text_that_is_not_unicode(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="surrogates"):
        load(byte_level(), tmp_path).encode("a\ud800b", specials=False)


def test_ids_beyond_a_gap_in_the_vocabulary(tmp_path: Path) -> None:
    load(byte_level(), tmp_path)
    state = json.loads((tmp_path / "tokenizer.json").read_text())
    state["model"]["vocab"]["Ġlonely"] = 1000
    tokenizer = load(Inner.from_str(json.dumps(state)), tmp_path)
    assert (tokenizer.size, tokenizer.token_bytes(1000), tokenizer.token_bytes(999)) == (1001, b" lonely", b"")

"""GGUF tokenizers of model ``llama``: SentencePiece itself, and transformers for the real Gemma 3, judge the ids."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import sentencepiece
import tokenizers
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from forebay.catalog import ModelFiles, ModelMeta, read_meta, resolve
from forebay.contract import Unsupported
from forebay.text import tokenizer as tokenizer_module
from forebay.text.detokenize import Detokenizer
from forebay.text.tokenizer import Tokenizer

quick = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
TEXTS = [
    "",
    " ",
    "▁",
    "Hello there, how's it going? I'll say: we're FINE.",
    "你好，世界！今天天气怎么样？ 龘䶮𠮷",
    "한국어 문장입니다. \u1112\u1161\u11ab 日本語もあります。",
    "👩‍👩‍👧‍👦 and 🇨🇭 and 🏳️‍🌈! 👍🏽 1️⃣",
    "   runs \n\n\n\t\t of   whitespace \r\n ",
    " leading and trailing ",
    "def f(x):\n    return {'a': x ** y}\n\n\nclass A:\n\tpass\n",
    "naïve cafe\u0301 ﬁne \u200b zero",
    "\u200fשלום\u200e مرحبا \u202eabc\u202c",
    "<b>bold</b> <h1>title</h1><table>",
    "typed <s>, </s>, <unk>, <eos>, <turn>, <unused7> and <0x41>",
    "\x00\x01\x7f\ufeff\ufffd",
]
CORPUS = [
    *TEXTS[3:-2],
    "the quick brown fox jumps over the lazy dog",
    "hahaha haha aaaa aaa abab ababa",
    "你好 你好吗 안녕",
]
PARTS = [
    *" \n\t▁ab你好안녕\u0301\u200d\u200f\x00",
    *(
        "  ",
        "   ",
        "\n\n",
        "the",
        "quick",
        "ha",
        "hello",
        "世界",
        "<b>",
        "<turn>",
        "<s>",
        "<0x41>",
        "👩‍👩‍👧‍👦",
        "🇨🇭",
        "👍🏽",
        "2024",
    ),
]
texts = st.one_of(st.text(max_size=40), st.lists(st.sampled_from(PARTS), max_size=25).map("".join))


def write(
    path: Path, tokens: list[str], scores: list[float], types: list[int], **fields: bool | bytes | str
) -> ModelFiles:
    """A GGUF of one tensor with a tokenizer of model ``llama``: id 1 is BOS, id 2 is EOS."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(256)
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    if scores:
        writer.add_token_scores(scores)
    if types:
        writer.add_token_types(types)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    for key, value in fields.items():
        if isinstance(value, bool):
            writer.add_bool(f"tokenizer.ggml.{key}", value)
        elif isinstance(value, bytes):
            writer.add_array(f"tokenizer.ggml.{key}", value)
        else:
            writer.add_string(f"tokenizer.ggml.{key}", value)
    writer.add_tensor("token_embd.weight", np.zeros((len(tokens), 8), dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return ModelFiles("tiny", "gguf", path)


def vocabulary(*words: str) -> tuple[list[str], list[float], list[int]]:
    """The least that is accepted, with ``words`` as normal pieces, the first with the highest score."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{n:02X}>" for n in range(256)), *words]
    scores = [0.0] * 259 + [-float(n) for n in range(len(words))]
    return tokens, scores, [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256, *[NORMAL] * len(words)]


def load(files: ModelFiles) -> Tokenizer:
    return Tokenizer.load(files, read_meta(files))


def pieces(tokenizer: Tokenizer, text: str) -> list[str]:
    return [tokenizer.token_text(i) for i in tokenizer.encode(text, specials=False)]


@pytest.fixture(scope="module", params=[True, False], ids=["prefix", "no-prefix"])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Tokenizer, Any]:
    """A small model trained by SentencePiece: ours from a GGUF file, and SentencePiece's own."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS * 3),
        model_writer=model,
        model_type="bpe",
        vocab_size=700,
        hard_vocab_limit=False,
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        add_dummy_prefix=request.param,
        user_defined_symbols=["\n", "\n\n", "▁▁", "▁▁▁", "<b>", "</b>"],
        control_symbols=["<turn>"],
        minloglevel=2,
    )
    judge = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    kinds: list[tuple[Callable[[int], bool], int]] = [
        (judge.is_unknown, UNKNOWN),
        (judge.is_control, CONTROL),
        (judge.is_byte, BYTE),
        (lambda i: judge.id_to_piece(i) in {"\n", "\n\n", "▁▁", "▁▁▁", "<b>", "</b>"}, USER_DEFINED),
        (lambda i: True, NORMAL),
    ]
    types = [next(kind for test, kind in kinds if test(i)) for i in range(len(judge))]
    tokens = [
        # llama.cpp's converter writes the spaces of user-defined tokens as spaces; older ones did not.
        judge.id_to_piece(i).replace("▁", " ") if kind == USER_DEFINED and i % 2 else judge.id_to_piece(i)
        for i, kind in enumerate(types)
    ]
    scores = [judge.get_score(i) for i in range(len(judge))]
    # What the file does not say is as SentencePiece has it by default.
    said = {} if request.param else {"add_space_prefix": False}
    path = tmp_path_factory.mktemp("spm") / "m.gguf"
    return load(write(path, tokens, scores, types, **said)), judge


def check(pair: tuple[Tokenizer, Any], text: str) -> None:
    tokenizer, judge = pair
    ids = tokenizer.encode(text, specials=False)
    assert ids == judge.encode(text), text
    assert Detokenizer(tokenizer).push(ids) == judge.decode(ids) == text.replace("▁", " ")
    stream = Detokenizer(tokenizer)
    assert "".join(stream.push([i]) for i in ids) == judge.decode(ids)


def test_ids_and_text_are_those_of_sentencepiece(pair: tuple[Tokenizer, Any]) -> None:
    for text in TEXTS:
        check(pair, text)


@quick
@given(text=texts)
@example(text="a ▁  b▁▁")
@example(text="<b> <b>  <b>")
def test_ids_and_text_of_any_text_are_those_of_sentencepiece(pair: tuple[Tokenizer, Any], text: str) -> None:
    check(pair, text)


def test_special_tokens_are_found_and_plain_text_never_is_one(pair: tuple[Tokenizer, Any]) -> None:
    tokenizer, judge = pair
    assert set(tokenizer.special_ids) == {"<unk>", "<s>", "</s>", "<turn>"}
    text = "<s>the<turn> quick</s>"
    plain = tokenizer.encode(text, specials=False)
    assert not any(map(tokenizer.is_special, plain))
    s, turn, end = (judge.piece_to_id(piece) for piece in ("<s>", "<turn>", "</s>"))
    assert tokenizer.encode(text, specials=True) == [s, *judge.encode("the"), turn, *judge.encode(" quick"), end]


def test_a_space_comes_before_a_text_and_not_inside_of_one(pair: tuple[Tokenizer, Any]) -> None:
    tokenizer, judge = pair
    for before in ([], [judge.bos_id()], [judge.eos_id()], [judge.piece_to_id("<turn>")]):
        assert tokenizer.encode_pieces([*before, "the"]) == [*before, *judge.encode("the")]
        assert tokenizer.encode_pieces([*before, ""]) == before
    for before in (judge.unk_id(), judge.piece_to_id("▁the")):  # these stand for text
        ids = tokenizer.encode_pieces([before, "he"])[1:]
        assert b"".join(map(tokenizer.token_bytes, ids)) == b"he"


@pytest.mark.parametrize(
    ("words", "text", "expected"),
    [
        (("bc", "ab", "abc", "a", "b", "c"), "abc", ["abc"]),  # a, bc
        (("ab", "bc", "abc", "a", "b", "c"), "abc", ["abc"]),  # ab, c
        (("bc", "ab", "a", "b", "c"), "abab", ["ab", "ab"]),
        (("bc", "ab", "a", "b", "c"), "ababc", ["ab", "a", "bc"]),
        (("ab", "bc", "a", "b", "c"), "ababc", ["ab", "ab", "c"]),
        (("a", "c", "abc", "b", "ab"), "abc", ["abc"]),
        (("a", "c", "abc", "b"), "abc", ["a", "b", "c"]),  # no two pieces join to it
        (("ab", "a"), "ab你", ["a", "<0x62>", "<0xE4>", "<0xBD>", "<0xA0>"]),
    ],
)
def test_the_pair_with_the_best_score_merges_first(
    tmp_path: Path, words: tuple[str, ...], text: str, expected: list[str]
) -> None:
    tokens, scores, types = vocabulary(*words)
    for order in (1, -1):  # the place in the file says nothing
        known = tokens[:259] + tokens[259:][::order], scores[:259] + scores[259:][::order], types
        tokenizer = load(write(tmp_path / f"{order}.gguf", *known, add_space_prefix=False))
        assert pieces(tokenizer, text) == expected


def test_text_never_becomes_a_control_or_unused_token_by_merging(tmp_path: Path) -> None:
    tokens, scores, types = vocabulary("ab", "a", "b", "c", "bc", "d")
    types[-2:] = [CONTROL, UNUSED]
    types[259] = UNUSED
    tokenizer = load(write(tmp_path / "m.gguf", tokens, scores, types, add_space_prefix=False))
    assert pieces(tokenizer, "abcd") == ["a", "b", "c", "<0x64>"]
    assert [tokenizer.token_bytes(i) for i in (259, 260, 263, 264)] == [b"", b"a", b"", b""]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"scores": []}, "'tokenizer.ggml.scores' has 0 entries for 261 tokens"),
        ({"scores": [0.0]}, "'tokenizer.ggml.scores' has 1 entries for 261 tokens"),
        ({"scores": [-1000.0] * 261}, "'tokenizer.ggml.scores' are all the same"),
        ({"types": []}, "'tokenizer.ggml.token_type' is missing"),
        ({"types": [NORMAL] * 261}, r"byte tokens are missing \(<0x00>\)"),
        ({"remove_extra_whitespaces": True}, "'remove_extra_whitespaces' .* is not supported"),
        ({"precompiled_charsmap": b"abc"}, "'precompiled_charsmap' .* is not supported"),
    ],
)
def test_what_is_refused_and_why(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    tokens, scores, types = vocabulary("a", "b")
    files = write(tmp_path / "m.gguf", **({"tokens": tokens, "scores": scores, "types": types} | change))
    with pytest.raises(Unsupported, match=message):
        load(files)


@pytest.mark.parametrize("prefix", [True, False])
def test_what_is_kept_on_disk_is_the_same_tokenizer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, prefix: bool
) -> None:
    tokens, scores, types = vocabulary("▁a", "▁", "a", "b")
    tokens, scores, types = [*tokens, "  "], [*scores, 0.0], [*types, USER_DEFINED]
    path = write(tmp_path / "m.gguf", tokens, scores, types, add_space_prefix=prefix).path
    first = load(resolve(str(path), tmp_path / "data"))
    monkeypatch.setattr(tokenizer_module, "read_gguf_tokenizer", None)  # the file is not asked again
    again = load(resolve(str(path), tmp_path / "data"))
    for text in ("a", " a", "  b ", "▁▁a", "<s>a<unk>a"):
        for specials in (True, False):
            assert again.encode(text, specials=specials) == first.encode(text, specials=specials)
    assert again.strips_first_space is first.strips_first_space is prefix
    assert [again.token_bytes(i) for i in range(again.size)] == [first.token_bytes(i) for i in range(first.size)]


def plain_of(judge: tokenizers.Tokenizer, text: str, *, specials: bool) -> list[int]:
    judge.encode_special_tokens = not specials
    ids: list[int] = judge.encode(text, add_special_tokens=False).ids
    return ids


def test_ids_of_the_real_gemma_are_those_of_transformers(gemma_tokenizer: Tokenizer, gemma_spelling: Any) -> None:
    for text in (*TEXTS, "<bos><start_of_turn>user\nhi<end_of_turn>\n", *(" " * n + "x" for n in range(32))):
        for specials in (True, False):
            ids = gemma_tokenizer.encode(text, specials=specials)
            assert ids == plain_of(gemma_spelling, text, specials=specials), text
    assert gemma_tokenizer.size == 262144
    assert len(gemma_tokenizer.special_ids) == 6249
    assert not gemma_tokenizer.strips_first_space


@quick
@given(text=texts)
def test_ids_of_any_text_for_the_real_gemma_are_those_of_transformers(
    gemma_tokenizer: Tokenizer, gemma_spelling: Any, text: str
) -> None:
    assert gemma_tokenizer.encode(text, specials=False) == plain_of(gemma_spelling, text, specials=False)


def test_long_runs_of_spaces_are_cut_as_sentencepiece_cuts_them(
    gemma_tokenizer: Tokenizer, gemma_spelling: Any
) -> None:
    """Gemma has user-defined pieces of up to 31 spaces, found longest first. transformers merges spaces by pairs."""
    ids = gemma_tokenizer.encode(" " * 70, specials=False)
    assert [len(gemma_tokenizer.token_bytes(i)) for i in ids] == [31, 31, 8]
    assert plain_of(gemma_spelling, " " * 70, specials=False) != ids


def test_the_real_gemma_says_how_its_texts_begin_and_end(gemma_meta: ModelMeta, gemma_tokenizer: Tokenizer) -> None:
    assert (gemma_meta.add_bos, gemma_meta.bos_token, gemma_meta.eos_token) == (True, "<bos>", "<eos>")
    assert [gemma_tokenizer.token_text(i) for i in gemma_meta.eos_ids] == ["<eos>", "<end_of_turn>"]

"""Streams of any text equal the text, byte for byte, at every chunking, with the tokenizers of two real models."""

from __future__ import annotations

import unicodedata
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, example, given, settings
from hypothesis import strategies as st
from test_detokenize import chunks, slow_reference

from forebay.catalog import ModelMeta
from forebay.contract import Message
from forebay.text.detokenize import Detokenizer
from forebay.text.template import ChatTemplate
from forebay.text.tokenizer import Tokenizer

quick = settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])

#: Gemma 3's way to write a chat (the base model's file brings no template), as its makers publish it, without images.
GEMMA_TEMPLATE = """{{ bos_token }}
{%- for message in messages -%}
    {{ '<start_of_turn>' + ('model' if message.role == 'assistant' else message.role) + '\n' -}}
    {{ message.content | trim }}{{ '<end_of_turn>\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<start_of_turn>model\n' }}{%- endif -%}
"""
#: Bytes that the demo model's vocabulary has no token for. They are lost when text is encoded, here as in transformers:
#: six control characters, and the first byte of all from U+40000 to U+BFFFF, where Unicode has nothing. (The others
#: occur in no text.)
DEMO_LACKS = bytes([0x04, 0x06, 0x13, 0x14, 0x16, 0x1D, 0xC0, 0xC1, 0xF1, 0xF2, *range(0xF5, 0x100)])

FAMILY, SCIENTIST = "👩\u200d👩\u200d👧\u200d👦", "🧑🏽\u200d🔬"
EMOJI = [
    FAMILY,
    SCIENTIST,
    "🏳️\u200d🌈",
    "❤️\u200d🔥",
    "🇨🇭",
    "🇰🇷🇨🇳",
    "👍🏿",
    "1️⃣",
    "🏴\U000e0067\U000e0062\U000e0065\U000e007f",
]
MARKS = ["\u0301", "\u0308\u0304", "\u200d", "\ufe0f", "\u200f", "\u200e", "\u202e", "\u202c", "\u2067", "\u2069"]
CONTROL = ["\0", "\n", "\r\n", "\n\n\n", "\t\t", " ", "   ", "\ufeff", "\ufffd", "\x7f", "\x85", "\u2028"]
OTHERS = ["שלום", "مرحبا", "हिन्दी", "ไทย", "the ", "def f(x):\n\treturn x", "naïve", "<h1>", "<0x41>", "Ġ"]
SPECIAL = [
    "<|im_end|>",
    "<|im_start|>",
    "<|",
    "<end_of_turn>",
    "<start_of_turn>",
    "<bos>",
    "<unused7>",
    "<pad>",
    "end|>",
]

chinese = st.text(
    st.characters(min_codepoint=0x4E00, max_codepoint=0x9FFF) | st.sampled_from("，。！？「」、𠮷龘\u3000")
)
korean = st.text(
    st.characters(min_codepoint=0xAC00, max_codepoint=0xD7A3)
    | st.characters(min_codepoint=0x1100, max_codepoint=0x11FF)
)
anything = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
part = st.one_of(chinese, korean, st.sampled_from(EMOJI), st.sampled_from([*MARKS, *CONTROL, *OTHERS]), anything)
texts = st.lists(part, max_size=12).map("".join)
cuts = st.lists(st.integers(0, 5), min_size=1, max_size=6)


@pytest.fixture(scope="module", params=["demo", "gemma"])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    tokenizer: Tokenizer = request.getfixturevalue(f"{request.param}_tokenizer")
    return tokenizer


@pytest.fixture(scope="module")
def template(tokenizer: Tokenizer, demo_meta: ModelMeta, gemma_meta: ModelMeta) -> ChatTemplate:
    if "<|im_end|>" in tokenizer.special_ids:
        return ChatTemplate.of(demo_meta)
    assert gemma_meta.chat_template is None
    return ChatTemplate(GEMMA_TEMPLATE, bos=gemma_meta.bos_token, eos=gemma_meta.eos_token, bos_id=gemma_meta.bos_id)


def sayable(tokenizer: Tokenizer, text: str) -> str:
    """``text`` without what the vocabulary cannot say."""
    if "<|im_end|>" in tokenizer.special_ids:
        return "".join(char for char in text if set(char.encode()).isdisjoint(DEMO_LACKS))
    return text.replace("▁", " ")  # SentencePiece writes a space so, and cannot tell them apart


def streamed(tokenizer: Tokenizer, ids: list[int], cuts: list[int], stop: tuple[str, ...] = ()) -> str:
    stream = Detokenizer(tokenizer, stop)
    return "".join(stream.push(part) for part in chunks(ids, cuts)) + stream.finish()


def visible(tokenizer: Tokenizer, ids: list[int]) -> str:
    """All of them at once, without a stream."""
    return b"".join(map(tokenizer.token_bytes, ids)).decode()


def slow_certain(text: str, stop: tuple[str, ...]) -> str:
    """What of ``text`` can be said before more comes: all in front of where a stop string is or may begin."""
    for at in range(len(text)):
        if any(s.startswith(text[at:]) or text.startswith(s, at) for s in stop):
            return text[:at]
    return text


def test_the_vocabularies_spell_every_byte_but_those_known(
    demo_tokenizer: Tokenizer, gemma_tokenizer: Tokenizer
) -> None:
    for tokenizer, lacks in ((demo_tokenizer, DEMO_LACKS), (gemma_tokenizer, b"")):
        spelled = {tokenizer.token_bytes(i) for i in range(tokenizer.size)}
        assert bytes(byte for byte in range(256) if bytes([byte]) not in spelled) == lacks


def test_what_the_demo_vocabulary_lacks_is_lost_as_in_transformers(demo_tokenizer: Tokenizer, demo_judge: Any) -> None:
    for text in ("a\x04b", "\x06\x13\x14\x16\x1d", "a\U00040000", "\U000bffff!"):
        ids = demo_tokenizer.encode(text, specials=False)
        assert ids == demo_judge.encode(text, add_special_tokens=False)
        assert b"".join(map(demo_tokenizer.token_bytes, ids)) == text.encode().translate(None, DEMO_LACKS)
    assert sayable(demo_tokenizer, "\U0003ffff\U000c0000\U0010ffff") == "\U0003ffff\U000c0000\U0010ffff"


@quick
@given(text=texts, cuts=cuts)
@example(text=FAMILY, cuts=[1])
@example(text=f"你好{SCIENTIST}안녕🇨🇭", cuts=[2, 1, 3])
@example(text="\u1112\u1161\u11ab한\u0301\n\n\n   \t", cuts=[1])
@example(text=" 你", cuts=[1])
@example(text="", cuts=[1])
def test_a_stream_is_the_text_at_every_chunking(tokenizer: Tokenizer, text: str, cuts: list[int]) -> None:
    text = sayable(tokenizer, text)
    ids = tokenizer.encode(text, specials=False)
    assert visible(tokenizer, ids) == text
    for sizes in ([1], [len(ids) + 1], cuts):
        stream = Detokenizer(tokenizer)
        deltas = [stream.push(part) for part in chunks(ids, sizes)]
        assert "".join(deltas).encode() == text.encode()  # without stop strings nothing is held back
        assert stream.finish() == ""


@quick
@given(text=texts, data=st.data())
def test_two_halves_at_any_place_are_the_text(tokenizer: Tokenizer, text: str, data: st.DataObject) -> None:
    text = sayable(tokenizer, text)
    ids = tokenizer.encode(text, specials=False)
    at = data.draw(st.integers(0, len(ids)))
    stream = Detokenizer(tokenizer)
    assert stream.push(ids[:at]) + stream.push(ids[at:]) + stream.finish() == text


@quick
@given(text=texts, data=st.data(), cuts=cuts)
def test_a_stop_string_never_leaks_and_holds_back_no_more_than_it_must(
    tokenizer: Tokenizer, text: str, data: st.DataObject, cuts: list[int]
) -> None:
    """Stop strings are cut out of the text, so that they cross tokens, and one is the beginning of another."""
    text = sayable(tokenizer, text)
    assume(text)
    ids = tokenizer.encode(text, specials=False)
    start = data.draw(st.integers(0, len(text) - 1))
    there = text[start : start + data.draw(st.integers(1, 9))]
    choices = [there, there[:-1], there + "你", there[1:] + "\ufffd", text[-1] + "!", FAMILY, "한국"]
    stop = tuple(data.draw(st.lists(st.sampled_from(choices), max_size=4)))
    real = tuple(filter(None, stop))
    expected, stopped = slow_reference(text, real)
    for sizes in ([1], [len(ids) + 1], cuts):
        stream = Detokenizer(tokenizer, stop)
        emitted, n_read = "", 0
        for part in chunks(ids, sizes):
            emitted += stream.push(part)
            n_read += len(part)
            so_far = b"".join(map(tokenizer.token_bytes, ids[:n_read])).decode(errors="ignore")
            assert emitted == slow_certain(so_far, real)
        assert (emitted + stream.finish(), stream.stopped) == (expected, stopped)


def test_a_stop_string_across_tokens_of_both_models(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(f"答案是：四十二。完了{FAMILY}", specials=False)
    pieces = [tokenizer.token_bytes(i) for i in ids]
    assert len(pieces) > 6
    for sizes in ([1], [2], [3], [len(ids)]):
        assert streamed(tokenizer, ids, sizes, ("。完了👩",)) == "答案是：四十二"
        assert streamed(tokenizer, ids, sizes, ("。完了👩\u200d👩", "二。完了👦")) == "答案是：四十二"
        assert streamed(tokenizer, ids, sizes, ("。完", "二。完成")) == "答案是：四十二"
        assert streamed(tokenizer, ids, sizes, (FAMILY + "!",)) == f"答案是：四十二。完了{FAMILY}"
    # Of two that overlap the one that begins first ends the text if it comes whole, and else the other.
    stop = ("二。完成", "。完")
    for text, expected in (("四十二。完成了", "四十"), ("四十二。完", "四十二"), ("四十二。完了", "四十二")):
        for sizes in ([1], [2], [9]):
            assert streamed(tokenizer, tokenizer.encode(text, specials=False), sizes, stop) == expected


@quick
@given(text=st.lists(part | st.sampled_from(SPECIAL), max_size=12).map("".join), cuts=cuts)
@example(text="<|im_end|>\n<|im_start|>system\n<end_of_turn><start_of_turn>model", cuts=[1])
@example(text="<unused<end_of_turn>7>" + FAMILY, cuts=[1])
@example(text="▁<bos>", cuts=[1])
def test_what_a_user_writes_is_text_in_the_prompt_and_comes_back(
    tokenizer: Tokenizer, template: ChatTemplate, text: str, cuts: list[int]
) -> None:
    text = sayable(tokenizer, text)
    empty = template.encode(tokenizer, [Message("user", "")])
    ids = template.encode(tokenizer, [Message("user", text)])
    framing = [i for i in empty if tokenizer.is_special(i)]
    assert [i for i in ids if tokenizer.is_special(i)] == framing
    shown = text if "<|im_end|>" in tokenizer.special_ids else text.strip()  # Gemma's template trims
    before, behind = visible(tokenizer, empty).split("user\n")
    expected = f"{before}user\n{shown}{behind}"
    assert visible(tokenizer, ids) == expected
    assert streamed(tokenizer, ids, cuts) == expected


def test_no_unicode_form_is_changed(tokenizer: Tokenizer) -> None:
    for form in ("NFC", "NFD", "NFKC", "NFKD"):
        text = unicodedata.normalize(form, "한국어 é ﬁ Å ｶﾞ 你")  # type: ignore[arg-type]
        assert visible(tokenizer, tokenizer.encode(text, specials=False)) == text

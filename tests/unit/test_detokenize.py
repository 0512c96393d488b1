"""Deltas join to the text, whatever the chunks; stop strings never leak."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from tiny_models import byte_level, load, sentencepiece_like

from forebay.text.detokenize import Detokenizer
from forebay.text.tokenizer import Tokenizer

quick = settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(scope="module", params=["bytes", "prepend", "metaspace"])
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    inner = byte_level() if request.param == "bytes" else sentencepiece_like(metaspace=request.param == "metaspace")
    return load(inner, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return load(byte_level(), tmp_path_factory.mktemp("plain"))


def chunks(ids: list[int], cuts: list[int]) -> Iterator[list[int]]:
    """``ids`` in pieces of the sizes of ``cuts`` (0 is an empty push), over and over."""
    at, n = 0, 0
    while at < len(ids):
        size = cuts[n % len(cuts)] if any(cuts) else 1
        yield ids[at : at + size]
        at, n = at + size, n + 1


def byte_ids(tokenizer: Tokenizer, data: bytes) -> list[int]:
    """One token per byte."""
    single = {tokenizer.token_bytes(i): i for i in range(tokenizer.size)}
    return [single[bytes([byte])] for byte in data]


PARTS = ["你好", "，", "안녕", "👩‍👩‍👧‍👦", "🇨🇭", "e\u0301", "ö", "the", " ", "\n", "a", "\ufeff", "\ufffd"]
texts = st.one_of(st.text(max_size=30), st.lists(st.sampled_from(PARTS), max_size=20).map("".join))
cuts = st.lists(st.integers(0, 5), min_size=1, max_size=6)


@quick
@given(text=texts, cuts=cuts)
@example(text="  the", cuts=[1])
@example(text="👩‍👩‍👧‍👦", cuts=[1, 2])
def test_deltas_join_to_the_text(tokenizer: Tokenizer, text: str, cuts: list[int]) -> None:
    if tokenizer.encode(" a", specials=False) == tokenizer.encode("a", specials=False):
        text = text.lstrip(" ")  # Metaspace itself does not tell them apart
    stream = Detokenizer(tokenizer)
    deltas = [stream.push(part) for part in chunks(tokenizer.encode(text, specials=False), cuts)]
    assert "".join(deltas) + stream.finish() == text
    assert "".join(deltas) == text  # without stop strings nothing is held back
    assert not stream.stopped


def slow_reference(text: str, stop: tuple[str, ...]) -> tuple[str, bool]:
    found = [at for at in range(len(text)) if any(text.startswith(s, at) for s in stop)]
    return (text[: found[0]], True) if found else (text, False)


stops = st.lists(st.text(alphabet="ab你\n", min_size=1, max_size=6), min_size=1, max_size=4).map(tuple)


@quick
@given(text=st.text(alphabet="ab你\n", max_size=40), stop=stops, cuts=cuts)
@example(text="xxabcabd", stop=("abd",), cuts=[1])
@example(text="abcab", stop=("abcd", "bc"), cuts=[1])
@example(text="aab", stop=("ab", "aabb"), cuts=[3])
@example(text="ababab", stop=("ab", "aba"), cuts=[1])
def test_stop_strings_against_a_slow_reference(
    plain: Tokenizer, text: str, stop: tuple[str, ...], cuts: list[int]
) -> None:
    expected, stopped = slow_reference(text, stop)
    stream = Detokenizer(plain, stop)
    emitted = ""
    for part in chunks(byte_ids(plain, text.encode()), cuts):
        emitted += stream.push(part)
        assert expected.startswith(emitted)  # nothing of a stop string, ever
    emitted += stream.finish()
    assert (emitted, stream.stopped) == (expected, stopped)


def test_only_what_may_begin_a_stop_string_is_held(plain: Tokenizer) -> None:
    stream = Detokenizer(plain, ("STOP",))
    assert [stream.push(byte_ids(plain, bytes([b]))) for b in b"aSTxS"] == ["a", "", "", "STx", ""]
    assert stream.finish() == "S"
    assert not stream.stopped


def test_after_a_stop_string_all_is_dropped(plain: Tokenizer) -> None:
    stream = Detokenizer(plain, ("", "ST"))
    assert stream.push(byte_ids(plain, b"aSTb")) == "a"
    assert stream.stopped
    assert stream.push(byte_ids(plain, b"more")) == ""
    assert stream.finish() == ""


def test_a_stop_string_across_three_tokens(plain: Tokenizer) -> None:
    ids = [*plain.encode("the", specials=False), *plain.encode(" quick", specials=False)]
    stream = Detokenizer(plain, ("e qui",))
    assert "".join(stream.push([i]) for i in ids) == "th"
    assert stream.stopped


def test_half_a_character_is_never_emitted(plain: Tokenizer) -> None:
    first, second, third = byte_ids(plain, "你".encode())
    stream = Detokenizer(plain)
    assert [stream.push([first]), stream.push([second]), stream.push([third])] == ["", "", "你"]
    assert stream.push([first, second]) == ""
    assert stream.finish() == ""


def test_invalid_bytes_become_replacement_characters(plain: Tokenizer) -> None:
    data = b"a\xffb\xe4\xbdc\x80"
    stream = Detokenizer(plain)
    assert "".join(stream.push([i]) for i in byte_ids(plain, data)) + stream.finish() == data.decode(errors="replace")


def test_special_and_unknown_ids_are_silent(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("the 你", specials=False)
    between = [tokenizer.special_ids["<s>"], tokenizer.size + 7]
    stream = Detokenizer(tokenizer)
    assert "".join(stream.push([*between, i, *between]) for i in ids) == "the 你"


def test_stripping_the_first_space_is_the_decoder_s_way(tmp_path_factory: pytest.TempPathFactory) -> None:
    inner = sentencepiece_like(metaspace=False)
    tokenizer = load(inner, tmp_path_factory.mktemp("sp"))
    for text in ("the the", " the", "你 the"):
        ids = tokenizer.encode(text, specials=False)
        assert Detokenizer(tokenizer).push(ids) == inner.decode(ids) == text

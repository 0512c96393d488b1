"""The ids that come with an answer's text are that text, as the model wrote it, whatever ends it."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from test_detokenize import chunks
from test_text_streams import texts
from tiny_models import byte_level, load

from forebay.backends.answer import deltas
from forebay.contract import Delta
from forebay.engine.client import Stream
from forebay.engine.sequence import Emit, End, GenSpec
from forebay.text.tokenizer import Tokenizer

quick = settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
cuts = st.lists(st.integers(1, 5), min_size=1, max_size=6)
END = 1


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return load(byte_level(), tmp_path_factory.mktemp("tiny"))


def told(
    tokenizer: Tokenizer, tokens: list[int], cuts: list[int], *, end: End = End.LENGTH, stop: tuple[str, ...] = ()
) -> list[Delta]:
    """What is said of ``tokens`` when they come in pieces; the last one ends the answer."""

    async def play() -> list[Delta]:
        stream = Stream(GenSpec(id=0, ids=[5], max_tokens=1000))
        heard, left = [], len(tokens)
        answer = deltas(stream, tokenizer, stop, None)
        for part in chunks(tokens, cuts):
            left -= len(part)
            stream.put(Emit(0, part, None if left else end))
            heard.append(await anext(answer))
            if heard[-1].finish is not None:
                break
        return heard

    return asyncio.run(play())


def bytes_of(tokenizer: Tokenizer, ids: list[int]) -> bytes:
    return b"".join(map(tokenizer.token_bytes, ids))


def written(tokenizer: Tokenizer, text: str, odd: bool) -> list[int]:
    """``odd``: in other tokens than the text would be given, with characters in several."""
    if not odd:
        return tokenizer.encode_inside(text)
    single = {tokenizer.token_bytes(id): id for id in range(tokenizer.size)}
    return [single[bytes([byte])] for byte in text.encode()]


@quick
@given(text=texts, odd=st.booleans(), cut=st.integers(0, 3), cuts=cuts, stopped=st.booleans())
def test_without_a_stop_string_they_are_what_was_generated(
    tokenizer: Tokenizer, text: str, odd: bool, cut: int, cuts: list[int], stopped: bool
) -> None:
    """Also where the answer ends inside of a character; without the token that ended it."""
    tokens = written(tokenizer, text, odd)
    tokens = tokens[: max(1, len(tokens) - cut)] or [5]
    heard = told(tokenizer, [*tokens, END] if stopped else tokens, cuts, end=End.STOP if stopped else End.LENGTH)
    assert [id for delta in heard for id in delta.ids] == tokens
    assert heard[-1].finish == ("stop" if stopped else "length")


@quick
@given(text=texts, odd=st.booleans(), cuts=cuts, at=st.integers(0, 20), size=st.integers(1, 4))
@example(text="the quick brown", odd=False, cuts=[1], at=6, size=3)
@example(text="你好，世界", odd=False, cuts=[1], at=1, size=2)
@example(text="你好，世界", odd=True, cuts=[2], at=1, size=1)
def test_at_a_stop_string_they_are_the_text_before_it(
    tokenizer: Tokenizer, text: str, odd: bool, cuts: list[int], at: int, size: int
) -> None:
    stop = text[at : at + size]
    tokens = written(tokenizer, text, odd)
    heard = told(tokenizer, tokens or [5], cuts, stop=(stop, stop + "and more"))
    said = "".join(delta.text for delta in heard)
    ids = [id for delta in heard for id in delta.ids]
    if not stop:
        assert ids == (tokens or [5])
        return
    assert heard[-1].finish == "stop"
    assert said == text[: text.index(stop)]
    assert bytes_of(tokenizer, ids) == said.encode()
    # As generated, but for the token in which the stop string began, and characters in several tokens.
    whole = max(n for n in range(len(tokens) + 1) if said.encode().startswith(bytes_of(tokenizer, tokens[:n])))
    assert ids[:whole] == tokens[:whole]


@quick
@given(text=texts, odd=st.booleans(), cuts=cuts, at=st.integers(0, 20))
def test_of_an_answer_that_is_left_they_are_no_more_than_was_said(
    tokenizer: Tokenizer, text: str, odd: bool, cuts: list[int], at: int
) -> None:
    tokens = written(tokenizer, text, odd) or [5]
    said, ids = "", []
    for delta in told(tokenizer, tokens, cuts, stop=(text[at : at + 2] + "never",))[:-1]:
        said += delta.text
        ids += delta.ids
        assert ids == tokens[: len(ids)]
        own = bytes_of(tokenizer, ids).decode()  # whole characters
        assert said.startswith(own)
        assert len(said) - len(own) < max(len(tokenizer.token_bytes(id)) for id in tokens)

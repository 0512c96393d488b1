"""tokenize and detokenize of LocalBackend, over the demo model's own tokenizer and template. No engine runs."""

from __future__ import annotations

import asyncio
import codecs
import threading
from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from forebay.backends import local
from forebay.backends.local import LocalBackend
from forebay.catalog import ModelFiles
from forebay.config import Settings
from forebay.contract import ContextTooLong, Message
from forebay.text.tokenizer import Tokenizer

# Specials and their pieces, bytes of every UTF-8 length, white space of all kinds.
TEXT = st.lists(
    st.one_of(
        st.text(st.characters(exclude_categories=["Cs"])),
        st.sampled_from(
            ["<|im_start|>", "<|im_end|>", "<|endoftext|>", " ", "\n\n", "\t", "12345", "\u00a0", "👩‍👩‍👧", "e\u0301"]
        ),
    ),
    max_size=8,
).map("".join)


@pytest.fixture(scope="module")
def backend(demo_model: ModelFiles) -> LocalBackend:
    made = LocalBackend(demo_model, Settings())
    made._load_text()
    return made


@given(TEXT)
@settings(max_examples=300, deadline=None)
def test_round_trip(backend: LocalBackend, text: str) -> None:
    # The demo model's vocabulary has no token for some bytes (0xF1: U+40000 to U+7FFFF), so they are lost.
    bytes_known = {token for token in map(backend._tokenizer.token_bytes, range(49_152)) if len(token) == 1}
    assume(all(bytes([byte]) in bytes_known for byte in text.encode()))
    tokens = asyncio.run(backend.tokenize(text))
    assert len(tokens.ids) == len(tokens.texts)
    assert all(0 <= i < backend.card.vocab_size for i in tokens.ids)
    assert asyncio.run(backend.detokenize(tokens.ids)) == text


@given(st.lists(st.integers(0, 49_151), max_size=200))
@settings(max_examples=200, deadline=None)
def test_any_ids_have_a_text(backend: LocalBackend, ids: list[int]) -> None:
    data = b"".join(map(backend._tokenizer.token_bytes, ids))
    text = asyncio.run(backend.detokenize(ids))
    assert text == codecs.getincrementaldecoder("utf-8")("replace").decode(
        data
    )  # half a character at the end is dropped


def test_messages_are_what_a_chat_makes_of_them(backend: LocalBackend, demo_tokenizer: Tokenizer) -> None:
    messages = (Message("user", "Hello <|im_end|>"),)
    whole = asyncio.run(backend.tokenize(messages))
    assert list(whole.ids) == backend._template.encode(demo_tokenizer, messages)
    assert whole.texts[-4:] == ("<|im_start|>", "ass", "istant", "Ċ")
    without = asyncio.run(backend.tokenize(messages, generation_prompt=False))
    assert without.ids == whole.ids[:-4]
    assert whole.texts.count("<|im_end|>") == len(messages) + 1  # the template's system message; the user's is text


def test_a_bos_where_the_model_wants_one(backend: LocalBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = asyncio.run(backend.tokenize("hi")).ids
    monkeypatch.setattr(backend, "_meta", replace(backend._meta, add_bos=True, bos_id=1))
    assert asyncio.run(backend.tokenize("hi")).ids == (1, *plain)
    assert asyncio.run(backend.tokenize("hi", bos=False)).ids == plain


def test_long_input_is_refused_or_leaves_the_event_loop(backend: LocalBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    limit = backend.card.max_context
    for source, param in (("x" * (32 * limit + 1), "prompt"), ((Message("user", "x" * (32 * limit + 1)),), "messages")):
        with pytest.raises(ContextTooLong) as caught:
            asyncio.run(backend.tokenize(source))
        assert caught.value.param == param
    seen: list[bool] = []
    inner = backend._tokenizer.token_bytes, backend._tokenizer.token_text

    def here(index: int) -> None:
        seen.append(threading.current_thread() is threading.main_thread())

    monkeypatch.setattr(backend._tokenizer, "token_bytes", lambda i: (here(i), inner[0](i))[1])
    monkeypatch.setattr(backend._tokenizer, "token_text", lambda i: (here(i), inner[1](i))[1])
    for n, in_loop in ((10, True), (local.THREAD_FROM + 1, False)):
        asyncio.run(backend.detokenize([5] * n))
        asyncio.run(backend.tokenize("a " * n))
        assert set(seen) == {in_loop}
        seen.clear()

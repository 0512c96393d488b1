"""Faults that other servers had (tests/checks.toml), sections A and B, bodies of every size: what no other test shows.

Where the server decides, the backend is a scripted one; where text or engine decide, it is the product, with a tiny
model of random weights or with the demo model.
"""

from __future__ import annotations

import asyncio
import gc
import time
from contextlib import suppress
from typing import Any

import httpx
import pytest
from faults import (
    CHAT,
    DETOKENIZE,
    TEXT,
    TOKENIZE,
    USER,
    Asker,
    memory,
    of,
    raw,
    refused,
    watched,
)
from product import words

from forebay.config import ServerSettings

pytestmark = pytest.mark.anyio

MANY: list[tuple[str, dict[str, Any], str]] = [
    (CHAT, {"messages": [USER] * 10_000}, "messages"),
    (CHAT, {"messages": [USER] * 100_000}, "messages"),
    (TEXT, {"prompt": ["a"] * 100_000}, "prompt"),
    (TEXT, {"prompt": [[1]] * 100_000}, "prompt"),
    (TEXT, {"prompt": [1] * 100_000}, "prompt"),
    (TOKENIZE, {"messages": [USER] * 100_000}, "messages"),
    (DETOKENIZE, {"tokens": [1] * 100_000}, "tokens"),
    *((path, {"stop": ["a"] * 100_000}, "stop") for path in (CHAT, TEXT)),
    *((path, {"stop_token_ids": [1] * 100_000}, "stop_token_ids") for path in (CHAT, TEXT)),
    *((path, {"bad_words": ["a"] * 100_000}, "bad_words") for path in (CHAT, TEXT)),
    *((path, {"logit_bias": {str(i): 1 for i in range(100_000)}}, "logit_bias") for path in (CHAT, TEXT)),
]


async def test_lists_of_a_hundred_thousand_are_refused_and_leave_nothing(client: httpx.AsyncClient) -> None:
    bodies = [(path, raw(path, **fields), param) for path, fields, param in MANY]
    for path, content, param in bodies:
        await refused(client, path, content, param)
    before = memory()
    for path, content, param in bodies * 3:
        begun = time.monotonic()
        await refused(client, path, content, param)
        assert time.monotonic() - begun < 2
    assert memory() - before < 30


def filled(unit: str, size: int = 8 * 2**20 - 1000) -> str:
    """``unit`` over and over, with commas between; "#" in it counts."""
    number = size // (len(unit) + 7)
    return ",".join(unit.replace("#", str(i)) for i in range(number))


#: The largest bodies that are read, each full of what is wrong: what comes before it, what it is full of, what behind.
FULL = {
    "messages": ('"messages":[', filled("[]"), "]"),
    "parts": ('"messages":[{"role":"user","content":[', filled('{"type":"text","text":""}'), ",5]}]"),
    "fields": ("", filled('"f#":1'), ""),
    "fields of a message": ('"messages":[{"role":"user","content":"x",', filled('"f#":1'), "}]"),
    "fields of 2,000 messages": (
        '"messages":[',
        ",".join(['{"role":"user","content":"x",' + filled('"f#":1', 4000) + "}"] * 2000),
        "]",
    ),
    "fields of stream_options": ('"stream":true,"stream_options":{', filled('"f#":1'), "}"),
    "stop": ('"stop":[', filled("5"), "]"),
    "bad_words": ('"bad_words":[', filled("5"), "]"),
    "stop_token_ids": ('"stop_token_ids":[', filled('"x"'), "]"),
    "logit_bias": ('"logit_bias":{', filled('"#":1'), "}"),
    "digits": ('"seed":', "9" * 8_000_000, ""),
    "metadata": ('"metadata":[', filled("NaN"), "]"),
}


@pytest.mark.parametrize("what", FULL)
async def test_a_body_full_of_faults_does_not_stop_the_server(client: httpx.AsyncClient, what: str) -> None:
    """The event loop's turns are measured in its own CPU seconds: the machine may be busy with other things. And what
    the test runner has on its heap by now is not the server's to look through."""
    gc.collect()
    gc.freeze()
    content = raw(CHAT)[:-1] + b"," + "".join(FULL[what]).encode() + b"}"
    assert len(content) < ServerSettings().max_body
    turns = [0.0]

    async def tick() -> None:
        while True:
            begun = time.thread_time()
            await asyncio.sleep(0.005)
            turns.append(time.thread_time() - begun)

    ticking = asyncio.create_task(tick())
    response = await client.post(CHAT, content=content, timeout=120)
    ticking.cancel()
    gc.unfreeze()
    assert response.status_code == 400
    assert len(response.content) < 1000
    assert max(turns) < 1.5, f"the event loop was busy for {max(turns):.1f} s at once"


#: Text that splits into very many, very few or very odd words.
SHAPES = ["a", " ", "\n", "1", "你", "<|im_", "\u202e", "\ue000", "a b ", "👩‍👩‍👧‍👦", "'s ", "\t\n "]


async def test_long_text_is_tokenized_in_bounded_time_beside_the_others(real: Asker) -> None:
    """As much text as is looked at at all (32 characters for each token of the context), of every shape."""
    most = 32 * 8192
    bodies = []
    for shape in SHAPES:
        text = (shape * (most // len(shape) + 1))[:most]
        bodies.append((TOKENIZE, raw(TOKENIZE, real.model, messages=None, prompt=text)))
        too_long = text[: most // 2] + "a b " * (most // 8 - 1)  # else some would fit the context, and be answered
        bodies.append((CHAT, raw(CHAT, real.model, messages=[of("user", too_long)])))
    for length in (1, 100):
        turns = [of("user", "x" * length), of("assistant", "y" * length)] * 1024
        bodies.append((CHAT, raw(CHAT, real.model, messages=turns)))
        bodies.append((TOKENIZE, raw(TOKENIZE, real.model, messages=turns)))
    async with watched(real.http) as took:
        for path, content in bodies:
            begun = time.monotonic()
            response = await real.http.post(path, content=content)
            assert response.status_code == (400 if path == CHAT else 200), response.text[:300]
            assert time.monotonic() - begun < 10, content[:100]
    assert max(took) < 1.5, f"a neighbour waited {max(took):.1f} s"


async def test_more_than_the_limits_is_refused_beside_the_others(real: Asker) -> None:
    cases = [
        (CHAT, raw(CHAT, real.model, messages=[of("user", "x" * 10 * 2**20)]), 413),
        (CHAT, raw(CHAT, real.model, messages=[USER] * 10_000), 400),
        (CHAT, raw(CHAT, real.model, messages=[of("user", "x" * 8_000_000)]), 400),
        (TEXT, raw(TEXT, real.model, prompt="x" * 8_000_000), 400),
        (TOKENIZE, raw(TOKENIZE, real.model, messages=None, prompt="x" * 8_000_000), 400),
        (TOKENIZE, raw(TOKENIZE, real.model, messages=None, prompt="x" * 10 * 2**20), 413),
        (DETOKENIZE, raw(DETOKENIZE, real.model, tokens=[5] * 1_000_000), 400),
        (CHAT, raw(CHAT, real.model, messages=[of("user", words(30_000, 1))]), 400),
    ]
    async with watched(real.http) as took:
        for path, content, status in cases * 2:
            begun = time.monotonic()
            # A refusal that comes before all is sent may reach the client as a reset.
            with suppress(httpx.WriteError, httpx.ReadError):
                assert (await real.http.post(path, content=content)).status_code == status
            assert time.monotonic() - begun < 5
    assert max(took) < 1.5, f"a neighbour waited {max(took):.1f} s"

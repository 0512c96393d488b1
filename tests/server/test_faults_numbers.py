"""Faults that other servers had (tests/checks.toml), section A, numbers and sampling: what no other test shows.

Where the server decides, the backend is a scripted one; where text or engine decide, it is the product, with a tiny
model of random weights or with the demo model.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import time
from itertools import combinations
from typing import Any

import httpx
import pytest
import tiny_models
from faults import (
    CHAT,
    DETOKENIZE,
    TEXT,
    Asker,
    generating,
    memory,
    of,
    raw,
    refused,
)
from product import words

WIDTH = tiny_models.WIDTH
pytestmark = pytest.mark.anyio

ABSURD: list[Any] = [10**9, 2**63, -1, 0, 1.5, True]


@generating
@pytest.mark.parametrize("field", ["n", "best_of"])
async def test_absurd_counts_of_answers_cost_nothing(client: httpx.AsyncClient, path: str, field: str) -> None:
    bodies = [raw(path, **{field: value}) for value in ABSURD]
    await client.post(path, content=raw(path))
    before = memory()
    for content in bodies:
        took = []
        for _ in range(7):
            begun = time.monotonic()
            await refused(client, path, content, field)
            took.append(time.monotonic() - begun)
        assert min(took) < 0.01, content
    assert memory() - before < 8
    assert (await client.post(path, content=raw(path))).status_code == 200


NUMBERS = ("temperature", "top_p", "min_p", "repetition_penalty", "frequency_penalty", "presence_penalty", "seed")
COUNTS = ("max_tokens", "min_tokens", "top_k", "n")


@generating
async def test_no_number_comes_as_text_or_as_none_at_all(client: httpx.AsyncClient, path: str) -> None:
    for value in ("NaN", "Infinity", "-Infinity", "1e999", "-1e999"):
        for literal in (value, f'"{value}"', f'"{value.lower()}"'):
            for field in (*NUMBERS, *COUNTS):
                await refused(client, path, raw(path)[:-1] + f',"{field}":{literal}}}'.encode(), field)
            bias = f',"logit_bias":{{"5":{literal}}}}}'
            await refused(client, path, raw(path)[:-1] + bias.encode(), "logit_bias")
            ids = f',"stop_token_ids":[{literal}]}}'
            await refused(client, path, raw(path)[:-1] + ids.encode(), "stop_token_ids")
    assert (await client.post(path, content=raw(path))).status_code == 200


async def test_no_token_id_is_nan(client: httpx.AsyncClient) -> None:
    for literal in ("NaN", "Infinity", "1e999", "1.0", "true", '"1"'):
        await refused(client, DETOKENIZE, raw(DETOKENIZE)[:-1] + f',"tokens":[{literal}]}}'.encode(), "tokens")
        await refused(client, TEXT, raw(TEXT)[:-1] + f',"prompt":[1,{literal}]}}'.encode(), "prompt")


@generating
async def test_a_least_length_without_end_is_refused(small: Asker, path: str) -> None:
    before = await small.said(path)
    for fields, param in (
        ({"min_tokens": 10**9}, "min_tokens"),
        ({"min_tokens": 10**9, "ignore_eos": True}, "min_tokens"),
        ({"min_tokens": 65, "max_tokens": None}, "min_tokens"),
        ({"min_tokens": 10**9, "max_tokens": 10**9}, "max_tokens"),
    ):
        await refused(small.http, path, raw(path, small.model, **fields), param)
    assert await small.said(path) == before


async def test_ready_speaks_of_the_engines_loop(small: Asker) -> None:
    """The web server answers all the while; the engine does not move."""
    engine = small.running.engine()
    os.kill(engine.pid, signal.SIGSTOP)
    try:
        end = time.monotonic() + 10
        while (response := await small.http.get("/ready")).status_code == 200:
            assert time.monotonic() < end
            await asyncio.sleep(0.1)
        assert "no sign of life" in response.json()["error"]["message"]
        assert (await small.http.get("/health")).status_code == 200
    finally:
        os.kill(engine.pid, signal.SIGCONT)
    end = time.monotonic() + 10
    while (await small.http.get("/ready")).status_code != 200:
        assert time.monotonic() < end
        await asyncio.sleep(0.05)
    await small.said()
    assert small.running.engine().pid == engine.pid


#: Each sampling parameter's values: those that do nothing, usual ones, and the ends of what is allowed.
PARAMETERS: dict[str, list[Any]] = {
    "temperature": [0, 1.0, 2.0, 1e-6],
    "top_k": [0, 1, 40, 2**31 - 1],
    "top_p": [1.0, 0.9, 1e-9],
    "min_p": [0.0, 0.1, 1.0],
    "repetition_penalty": [1.0, 1.3, 2.0, 1e-3],
    "frequency_penalty": [0.0, 2.0, -2.0],
    "presence_penalty": [0.0, 2.0, -2.0],
    "logit_bias": [{}, {"0": -100, str(WIDTH - 1): 100}, {str(i): (-1) ** i * i / 10 for i in range(300)}],
    "bad_words": [[], ["the", " a"], [chr(0x61 + i % 26) * (i // 26 + 1) for i in range(128)]],
    "stop": [[], ["e"], ["th", "the quick", "zz"]],
    "stop_token_ids": [[], [WIDTH - 1], list(range(256))],
    "seed": [0, 1, 2**63 - 1, -(2**63)],
    "min_tokens": [0, 3, 8],
    "max_tokens": [8, 9],
    "ignore_eos": [False, True],
    "n": [1, 3],
    "stream": [False, True],
}


def pairwise(parameters: dict[str, list[Any]], seed: int = 0) -> list[dict[str, Any]]:
    """Rows in which every two values of two parameters meet at least once, found greedily."""
    dice = random.Random(seed)
    names = list(parameters)
    open_pairs = {
        (a, i, b, j)
        for a, b in combinations(names, 2)
        for i in range(len(parameters[a]))
        for j in range(len(parameters[b]))
    }
    rows = []
    while open_pairs:
        best: tuple[set[tuple[str, int, str, int]], dict[str, int]] = (set(), {})
        first = min(open_pairs)
        for _ in range(60):
            row = {name: dice.randrange(len(values)) for name, values in parameters.items()}
            row |= {first[0]: first[1], first[2]: first[3]}
            met = {(a, row[a], b, row[b]) for a, b in combinations(names, 2)} & open_pairs
            if len(met) > len(best[0]):
                best = (met, row)
        open_pairs -= best[0]
        rows.append({name: parameters[name][i] for name, i in best[1].items()})
    return rows


@generating
async def test_sampling_parameters_in_every_pair_and_company(small: Asker, path: str) -> None:
    """Alone, by twos and in one crowd of all: no error, and each gets the same answer in any company (law 9)."""
    rows = pairwise(PARAMETERS)
    assert len(rows) < 60
    logprobs: list[dict[str, Any]] = (
        [{"logprobs": True, "top_logprobs": 20}, {}] if path == CHAT else [{"logprobs": 20}, {}]
    )

    async def texts(number: int) -> list[str]:
        fields = rows[number] | logprobs[number % 2]
        response = await small.post(path, **fields)
        assert response.status_code == 200, (fields, response.text[:300])
        found = [""] * fields["n"]
        if fields["stream"]:
            assert response.text.endswith("data: [DONE]\n\n"), (fields, response.text[-300:])
            parts = [json.loads(line[6:]) for line in response.text.split("\n") if line.startswith("data: {")]
        else:
            parts = [response.json()]
        for choice in (choice for part in parts for choice in part["choices"]):
            said = choice if path == TEXT else choice.get("message") or choice["delta"]
            found[choice["index"]] += said.get("text" if path == TEXT else "content") or ""
        return found

    alone = [await texts(number) for number in range(len(rows))]
    twos = [list(await asyncio.gather(texts(number), texts(number - 1))) for number in range(0, len(rows), 2)]
    for number, pair in zip(range(0, len(rows), 2), twos, strict=True):
        assert pair == [alone[number], alone[number - 1]], rows[number]
    crowd: list[list[str]] = []
    for at in range(0, len(rows), 12):
        crowd += await asyncio.gather(*(texts(number) for number in range(at, min(at + 12, len(rows)))))
    assert crowd == alone
    assert (await small.http.get("/ready")).status_code == 200


async def test_ids_at_the_edge_of_the_logits(small: Asker) -> None:
    """All that the logits have is allowed, also what the tokenizer does not know; nothing beyond is."""
    asked = [
        {"messages": [{"role": "user", "content": words(20, i)}], "max_tokens": 48, "ignore_eos": True} for i in (1, 2)
    ]
    alone = [await small.said(**fields) for fields in asked]
    known = tiny_models.byte_level().get_vocab_size()
    assert known < WIDTH
    good, bad = (0, known - 1, known, WIDTH - 1), (WIDTH, WIDTH + 1, -1, 2**31 - 1, 2**31, 2**63 - 1, 2**63, 10**400)

    async def edges() -> None:
        for path in (CHAT, TEXT):
            for id in good:
                for fields in (
                    {"stop_token_ids": [id]},
                    {"logit_bias": {str(id): 100}},
                    {"logit_bias": {str(id): -100}},
                ):
                    assert (await small.post(path, max_tokens=3, **fields)).status_code == 200
            for id in bad:
                for field, value in (("stop_token_ids", [0, id]), ("logit_bias", {"0": 1, str(id): 1})):
                    await refused(small.http, path, raw(path, small.model, **{field: value}), field)
        for id in good:
            for prompt in ([id], [1, id], [[1], [id, 2]]):
                assert (await small.post(TEXT, prompt=prompt, max_tokens=3)).status_code == 200
            assert (await small.post(DETOKENIZE, tokens=[id])).status_code == 200
        for id in bad:
            for prompt in ([id], [1, id], [[1], [id, 2]], ["a", [id]]):
                await refused(small.http, TEXT, raw(TEXT, small.model, prompt=prompt), "prompt")
            await refused(small.http, DETOKENIZE, raw(DETOKENIZE, small.model, tokens=[id]), "tokens")

    async def neighbours(until_done: asyncio.Task[None]) -> None:
        while not until_done.done():
            assert await asyncio.gather(*(small.said(**fields) for fields in asked)) == alone

    edge = asyncio.create_task(edges())
    await neighbours(edge)
    await edge


NOTHING: list[tuple[str, dict[str, Any]]] = [
    (CHAT, {"messages": messages})
    for messages in (
        [],
        [{}],
        [None],
        [of("user", "")],
        [of("user", " \n\t\u3000")],
        [of("user", [{"type": "text", "text": ""}])],
        [of("system", "be brief")],
        [of("system", "")],
        [of("assistant", "")],
        [of("user", "<|im_start|><|im_end|>")],
        [of("user", "<|im_end|>"), of("assistant", "<|endoftext|>")],
        [of("user", "\0")],
    )
] + [
    (TEXT, fields)
    for fields in (
        {"prompt": ""},
        {"prompt": []},
        {"prompt": [[]]},
        {"prompt": [""]},
        {"prompt": ["", "a"]},
        {"prompt": [{}]},
        {"prompt": " \n\t\u3000"},
        {"prompt": "<|im_end|>"},
        {"prompt": "<|im_end|>", "parse_special": True},
        {"prompt": [0]},
        {"prompt": [1, 2, 1, 2]},
        {"prompt": "\0"},
    )
]


async def test_prompts_of_nothing_have_an_answer_or_a_400(small: Asker, real: Asker) -> None:
    for asker in (small, real):
        before = await asker.said()
        for path, fields in NOTHING:
            for stream in (False, True):
                response = await asker.post(path, max_tokens=2, stream=stream, **fields)
                assert response.status_code in (200, 400), (path, fields, response.text)
                assert '"error"' not in response.text or response.status_code == 400, (path, fields, response.text)
        assert await asker.said() == before

"""POST /tokenize and /detokenize: vLLM's shapes, and the limits of a chat request."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest
from scripted import MODEL, ScriptedBackend, served

pytestmark = pytest.mark.anyio
USER = {"role": "user", "content": "hello there"}


async def post(client: httpx.AsyncClient, path: str, **fields: Any) -> httpx.Response:
    return await client.post(path, content=json.dumps({"model": MODEL, **fields}))


async def test_tokenize_a_prompt(client: httpx.AsyncClient) -> None:
    answer = await post(client, "/tokenize", prompt="hi there")
    assert answer.json() == {"count": 3, "max_model_len": 4096, "tokens": [3, 2, 5]}
    assert answer.headers["content-type"] == "application/json"
    bare = await post(client, "/tokenize", prompt="hi there", add_special_tokens=False, return_token_strs=True)
    assert bare.json() == {"count": 2, "max_model_len": 4096, "tokens": [2, 5], "token_strs": ["hi", "there"]}
    assert (await post(client, "/tokenize", prompt="")).json()["tokens"] == [3]


async def test_tokenize_messages(client: httpx.AsyncClient) -> None:
    messages = [{"role": "developer", "content": "be brief"}, USER]
    answer = (await post(client, "/tokenize", messages=messages, return_token_strs=True)).json()
    assert answer["token_strs"] == ["<system>", "be", "brief", "<user>", "hello", "there", "<answer>"]
    answer = (await post(client, "/tokenize", messages=[USER], add_generation_prompt=False)).json()
    assert answer["count"] == 3
    ignored = {"tools": [], "chat_template": None, "continue_final_message": False, "add_special_tokens": False}
    assert (await post(client, "/tokenize", messages=[USER], **ignored)).status_code == 200


async def test_detokenize(client: httpx.AsyncClient) -> None:
    assert (await post(client, "/detokenize", tokens=[1, 2])).json() == {"prompt": "x xx"}
    assert (await post(client, "/detokenize", tokens=[])).json() == {"prompt": ""}
    assert (await post(client, "/detokenize", tokens=[999])).status_code == 200


BAD: list[tuple[str, dict[str, Any], str]] = [
    ("/tokenize", {"model": None, "prompt": "a"}, "model"),
    ("/tokenize", {}, "prompt"),
    ("/tokenize", {"prompt": "a", "messages": [USER]}, "prompt"),
    *(("/tokenize", {"prompt": v}, "prompt") for v in (5, ["a"], [1, 2], "a\ud800", True)),
    ("/tokenize", {"messages": []}, "messages"),
    ("/tokenize", {"messages": [USER] * 2049}, "messages"),
    ("/tokenize", {"messages": [USER | {"role": "tool"}]}, "messages.0.role"),
    ("/tokenize", {"messages": [USER], "add_generation_prompt": 1}, "add_generation_prompt"),
    ("/tokenize", {"messages": [USER], "add_special_tokens": True}, "add_special_tokens"),
    ("/tokenize", {"messages": [USER], "chat_template": "{{ 1 }}"}, "chat_template"),
    ("/tokenize", {"messages": [USER], "tools": [{}]}, "tools"),
    ("/tokenize", {"prompt": "a", "add_generation_prompt": True}, "add_generation_prompt"),
    ("/tokenize", {"prompt": "a", "return_token_strs": 1}, "return_token_strs"),
    ("/tokenize", {"prompt": "a", "tokens": [1]}, "tokens"),
    ("/detokenize", {}, "tokens"),
    ("/detokenize", {"tokens": None}, "tokens"),
    ("/detokenize", {"tokens": "1 2"}, "tokens"),
    *(("/detokenize", {"tokens": [1, v]}, "tokens.1") for v in (-1, 1000, 2**31, 2**63, 10**400, 1.0, True, "1", None)),
    ("/detokenize", {"tokens": [1] * 4097}, "tokens"),
    ("/detokenize", {"tokens": [1], "prompt": "a"}, "prompt"),
]


async def test_bad_fields_are_named(client: httpx.AsyncClient) -> None:
    for path, fields, param in BAD:
        response = await post(client, path, **fields)
        error = response.json()["error"]
        assert (response.status_code, error["param"]) == (400, param), (path, str(fields)[:200], error)
        assert param.split(".")[0] in error["message"]
        assert len(response.content) < 1000


@pytest.mark.parametrize("path", ["/tokenize", "/detokenize"])
async def test_the_limits_of_a_chat_hold(path: str) -> None:
    async with (
        served(ScriptedBackend(), max_body=1000, api_key="secret") as running,
        httpx.AsyncClient(base_url=running.url, headers={"authorization": "Bearer secret"}) as client,
    ):
        assert (await client.post(path, content=b" " * 1001)).status_code == 413
        assert (await client.post(path, content=b"[" * 1000)).status_code == 400
        assert (await client.post(path, content=b'{"a": NaN}')).status_code == 400
        assert (await client.get(path)).status_code == 405
        wrong = await post(client, path, model="gpt-9", prompt="a")
        assert wrong.status_code == (404 if path == "/tokenize" else 400)
        assert (await client.post(path, json={}, headers={"authorization": "none"})).status_code == 401


async def test_only_so_many_at_once() -> None:
    async with (
        served(ScriptedBackend(tokenize_pause=0.3), max_queue=3) as running,
        httpx.AsyncClient(base_url=running.url) as client,
    ):
        answers = await asyncio.gather(*(post(client, "/tokenize", prompt="a") for _ in range(8)))
        assert sorted(answer.status_code for answer in answers) == [200] * 3 + [503] * 5
        assert all(answer.headers["retry-after"] == "1" for answer in answers if answer.status_code == 503)
        assert (await post(client, "/tokenize", prompt="a")).status_code == 200


async def test_openapi_knows_the_shapes(client: httpx.AsyncClient) -> None:
    document = (await client.get("/openapi.json")).json()
    for path, field in (("/tokenize", "add_generation_prompt"), ("/detokenize", "tokens")):
        ref = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]["$ref"]
        assert field in document["components"]["schemas"][ref.rsplit("/", 1)[1]]["properties"]

"""Requests that are refused: each 4xx names its field, costs nothing, and the next request works."""

from __future__ import annotations

import asyncio
import json
import logging
from typing import Any

import httpx
import pytest
from scripted import MODEL, ScriptedBackend, Served, body, served
from starlette.routing import Route

from forebay.contract import InvalidRequest
from forebay.server.auth import OPEN_PATHS

pytestmark = pytest.mark.anyio
CHAT = "/v1/chat/completions"
USER = {"role": "user", "content": "hi"}


def message(**fields: Any) -> dict[str, Any]:
    return {"messages": [USER | fields]}


BAD: list[tuple[dict[str, Any], str]] = [
    ({"model": None}, "model"),
    ({"model": 5}, "model"),
    ({"messages": None}, "messages"),
    ({"messages": []}, "messages"),
    ({"messages": "hi"}, "messages"),
    ({"messages": [USER] * 10_000}, "messages"),
    ({"messages": [{}]}, "messages.0.role"),
    ({"messages": ["hi"]}, "messages.0"),
    ({"messages": [USER, {"role": "tool", "content": "hi"}]}, "messages.1.role"),
    ({"messages": [{"role": "user"}]}, "messages.0.content"),
    (message(content=None), "messages.0.content"),
    (message(content=7), "messages.0.content"),
    (message(content=[]), "messages.0.content"),
    (message(content=["text"]), "messages.0.content"),
    (message(content=[{"type": "image_url", "image_url": {"url": "x"}}]), "messages.0.content"),
    (message(content=[{"type": "text"}]), "messages.0.content"),
    (message(content=[{"type": "text", "text": 5}]), "messages.0.content"),
    (message(content=[{"type": "text", "text": "a\ud800"}]), "messages.0.content"),
    (message(content="a\udfff"), "messages.0.content"),
    (message(name="\ud800"), "messages.0.name"),
    (message(extra=1), "messages.0.extra"),
    (message(tool_calls=[{}]), "messages.0"),
    *(({"max_tokens": v}, "max_tokens") for v in (0, -1, 1.5, 5.0, True, "5", 2**31, 2**63, 10**400)),
    ({"max_completion_tokens": 0}, "max_completion_tokens"),
    ({"max_tokens": 5, "max_completion_tokens": 6}, "max_completion_tokens"),
    *(({"min_tokens": v}, "min_tokens") for v in (-1, 10**9, 513, True)),
    ({"min_tokens": 6, "max_tokens": 5}, "min_tokens"),
    *(({"temperature": v}, "temperature") for v in (-0.1, 2.1, "1", True, "nan", [], 10**400)),
    *(({"top_p": v}, "top_p") for v in (0, -1, 1.01, "1", False)),
    *(({"top_k": v}, "top_k") for v in (-2, 1.5, True, 2**63)),
    *(({"seed": v}, "seed") for v in (2**63, -(2**63) - 1, 0.5, True, "1")),
    ({"stop": ""}, "stop.0"),
    ({"stop": ["a", ""]}, "stop.1"),
    ({"stop": ["a", 5]}, "stop.1"),
    ({"stop": ["x" * 257]}, "stop.0"),
    ({"stop": ["\ud800"]}, "stop.0"),
    ({"stop": ["a"] * 17}, "stop"),
    ({"stop": 5}, "stop"),
    *(({"stop_token_ids": [1, v]}, "stop_token_ids.1") for v in (-1, 1000, 2**31, 2**63, 1.0, True)),
    ({"stop_token_ids": [1] * 257}, "stop_token_ids"),
    ({"ignore_eos": 1}, "ignore_eos"),
    ({"stream": "true"}, "stream"),
    ({"stream": 1}, "stream"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
    ({"stream": True, "stream_options": {"other": 1}}, "stream_options.other"),
    ({"user": 5}, "user"),
    ({"user": "x" * 257}, "user"),
    *(({"n": v}, "n") for v in (0, 17, -1, 1.5, True, 1.0, 10**9, 2**63)),
    *(({"best_of": v}, "best_of") for v in (2, True, 10**9)),
    ({"tools": [{"type": "function"}]}, "tools"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"functions": [{}]}, "functions"),
    ({"response_format": {"type": "json_object"}}, "response_format"),
    *(({"logprobs": v}, "logprobs") for v in (0, 1, "true", [])),
    ({"top_logprobs": 1}, "top_logprobs"),
    *(({"logprobs": True, "top_logprobs": v}, "top_logprobs") for v in (-1, 21, 1.0, True, "2", 2**63)),
    *(({"min_p": v}, "min_p") for v in (-0.01, 1.01, "0.1", True, [], {}, 10**400)),
    *(({"repetition_penalty": v}, "repetition_penalty") for v in (0, -1, 2.01, "1", True, [], 10**400)),
    *(({f: v}, f) for f in ("frequency_penalty", "presence_penalty") for v in (-2.01, 2.01, "0", False, [], 10**400)),
    *(({"logit_bias": {"5": v}}, "logit_bias") for v in (-100.1, 101, "1", True, None, [], 10**400)),
    *(
        ({"logit_bias": {k: 1}}, "logit_bias")
        for k in ("1000", "9999999999", "9" * 5000, "-1", "05", "1.0", " 1", "\u0661", "", "x" * 10_000, "\ud800")
    ),
    ({"logit_bias": {str(i): 1 for i in range(301)}}, "logit_bias"),
    *(({"logit_bias": v}, "logit_bias") for v in ([], [[5, 1]], "5", 5, True)),
    ({"bad_words": [""]}, "bad_words.0"),
    ({"bad_words": ["a", 5]}, "bad_words.1"),
    ({"bad_words": ["a", None]}, "bad_words.1"),
    ({"bad_words": ["x" * 257]}, "bad_words.0"),
    ({"bad_words": ["\ud800"]}, "bad_words.0"),
    ({"bad_words": ["a"] * 129}, "bad_words"),
    *(({"bad_words": v}, "bad_words") for v in ("a", 5, {"a": 1}, True)),
    ({"modalities": ["text", "audio"]}, "modalities"),
    ({"store": True}, "store"),
    ({"metadata": {"a": "b"}}, "metadata"),
    ({"service_tier": "flex"}, "service_tier"),
    ({"reasoning_effort": "high"}, "reasoning_effort"),
    ({"chat_template": "{{ 1 }}"}, "chat_template"),
    *(({"chat_template_kwargs": v}, "chat_template_kwargs") for v in ({"a": 1}, {"a": None}, {"a": "x" * 65}, [], "a")),
    ({"chat_template_kwargs": {str(i): True for i in range(17)}}, "chat_template_kwargs"),
    (message(reasoning_content="I think"), "messages.0"),
    (
        {"messages": [{"role": "assistant", "content": "", "reasoning_content": "\ud800"}]},
        "messages.0.reasoning_content",
    ),
    ({"unknown": None}, "unknown"),
    ({"\ud800": 1}, "\\ud800"),
]


def error_of(response: httpx.Response) -> dict[str, Any]:
    error: dict[str, Any] = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert response.headers["x-request-id"]
    return error


async def post(client: httpx.AsyncClient, fields: dict[str, Any]) -> httpx.Response:
    return await client.post(CHAT, content=json.dumps(body(**fields)))


async def test_bad_fields_are_named(client: httpx.AsyncClient, server: Served) -> None:
    for fields, param in BAD:
        response = await post(client, fields)
        assert response.status_code == 400, str(fields)[:200]
        error = error_of(response)
        assert error["param"] == param, (str(fields)[:200], error)
        assert error["type"] == "invalid_request_error"
        assert param.split(".")[0] in error["message"]
        assert len(response.content) < 1000
    assert server.backend.opened == 0
    assert server.backend.requests == []
    assert (await post(client, {})).status_code == 200


@pytest.mark.parametrize("literal", ["NaN", "Infinity", "-Infinity", "1e999", "-1e999"])
async def test_numbers_that_are_none(client: httpx.AsyncClient, literal: str) -> None:
    numbers = ("temperature", "top_p", "min_p", "repetition_penalty", "frequency_penalty", "presence_penalty", "seed")
    for field in (*numbers, "logit_bias", "bad_words", "stop", "metadata"):
        raw = json.dumps(body())[:-1] + f', "{field}": {literal}}}'
        response = await client.post(CHAT, content=raw)
        assert (response.status_code, error_of(response)["param"]) == (400, field)
    raw = json.dumps(body())[:-1] + f', "logit_bias": {{"5": {literal}}}}}'
    response = await client.post(CHAT, content=raw)
    assert (response.status_code, error_of(response)["param"]) == (400, "logit_bias")


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'"text"',
        b"\xff\xfe{}",
        b'{"model": "\xff"}',
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b'{"model": ' + b"9" * 5000 + b"}",
        json.dumps(body()).encode("utf-16"),
    ],
    ids=lambda raw: repr(raw[:12]),
)
async def test_not_json(client: httpx.AsyncClient, raw: bytes) -> None:
    response = await client.post(CHAT, content=raw)
    assert response.status_code == 400
    assert error_of(response)["type"] == "invalid_request_error"
    assert len(response.content) < 1000


async def test_deep_values_in_known_and_unknown_places(client: httpx.AsyncClient) -> None:
    for field in ("messages", "metadata", "stop", "logit_bias", "bad_words"):
        for depth in (100, 900):
            raw = json.dumps(body())[:-1] + f', "{field}": ' + "[" * depth + "]" * depth + "}"
            response = await client.post(CHAT, content=raw)
            assert response.status_code == 400


async def test_messages_say_what_to_do(client: httpx.AsyncClient) -> None:
    def said(response: httpx.Response) -> str:
        return str(error_of(response)["message"])

    assert "did you mean 'temperature'?" in said(await post(client, {"temprature": 1}))
    assert said(await post(client, {"tools": [{}]})) == "'tools' is not supported yet"
    wrong = await post(client, {"model": "gpt-9"})
    assert wrong.status_code == 404
    assert error_of(wrong)["code"] == "model_not_found"
    assert "gpt-9" in said(wrong)
    assert MODEL in said(wrong)
    assert (await client.get("/v1/models/gpt-9")).status_code == 404


async def test_body_limit() -> None:
    async with served(ScriptedBackend(), max_body=10_000) as running:
        async with httpx.AsyncClient(base_url=running.url) as client:
            declared = await client.post(CHAT, content=b"x" * 10_001)
            assert declared.status_code == 413
            assert error_of(declared)["code"] == "body_too_large"
            fits = json.dumps(body()).encode().ljust(10_000)
            assert (await client.post(CHAT, content=fits)).status_code == 200
        # Without a length, the refusal comes while the body is still being sent.
        reader, writer = await asyncio.open_connection("127.0.0.1", running.port)
        writer.write(f"POST {CHAT} HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n".encode())
        for _ in range(11):
            writer.write(b"3e8\r\n" + b" " * 1000 + b"\r\n")
        assert (await asyncio.wait_for(reader.readline(), 5)).startswith(b"HTTP/1.1 413")
        writer.close()
        await writer.wait_closed()


async def test_unknown_routes_and_methods(client: httpx.AsyncClient) -> None:
    missing = await client.get("/v1/nothing")
    assert (missing.status_code, error_of(missing)["type"]) == (404, "not_found_error")
    wrong = await client.get(CHAT)
    assert (wrong.status_code, error_of(wrong)["type"]) == (405, "invalid_request_error")
    assert wrong.headers["allow"] == "POST"


async def test_backend_refusal_keeps_its_field(client: httpx.AsyncClient, server: Served) -> None:
    server.backend.prepare_error = InvalidRequest("the roles must alternate", param="messages")
    response = await post(client, {})
    assert (response.status_code, error_of(response)["param"]) == (400, "messages")


async def test_unexpected_error_tells_nothing(
    client: httpx.AsyncClient, server: Served, caplog: pytest.LogCaptureFixture
) -> None:
    server.backend.prepare_error = RuntimeError("secret detail")
    response = await post(client, {})
    assert response.status_code == 500
    assert error_of(response)["message"] == "internal error"
    assert "secret detail" not in response.text
    logged = [r for r in caplog.records if r.exc_info and "secret detail" in str(r.exc_info[1])]
    assert len(logged) == 1


async def test_not_ready_and_draining_refuse_at_once(client: httpx.AsyncClient, server: Served) -> None:
    server.backend.ready, server.backend.state = False, "loading"
    starting = await post(client, {"stream": True})
    assert (starting.status_code, error_of(starting)["code"]) == (503, "engine_unavailable")
    assert "loading" in error_of(starting)["message"]
    assert int(starting.headers["retry-after"]) >= 1
    server.backend.ready = True
    server.app.state.draining = True
    draining = await post(client, {})
    assert (draining.status_code, error_of(draining)["type"]) == (503, "overloaded_error")
    assert int(draining.headers["retry-after"]) >= 1


async def test_every_route_but_the_open_ones_needs_the_key(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    async with (
        served(ScriptedBackend(), api_key="sésame") as running,
        httpx.AsyncClient(base_url=running.url) as client,
    ):
        answered = {}
        for route in running.app.router.routes:
            assert isinstance(route, Route), "a new kind of route: teach this test to ask it"
            for method in route.methods or ():
                response = await client.request(method, route.path.replace("{model_id:path}", MODEL), json=body())
                answered[route.path, method] = response.status_code
        opened = {path for (path, _), status in answered.items() if status != 401}
        assert opened == OPEN_PATHS == {"/health", "/ready", "/metrics"}
        assert len(answered) >= 7

        tricks = ["/nowhere", "//health", "/health/", "/health/../v1/models", "/v1/models?x=/health", "/%2e/health"]
        for path in tricks:
            for host in ("x", "x/?", "x/health#", "x/health?"):
                response = await client.get(path, headers={"host": host})
                assert response.status_code == 401, path
        assert (await client.post("/health")).status_code == 405

        for header in ("sésame", "Bearer", "Bearer sésam", "Bearer sésame2", "Basic sésame", ""):
            denied = await client.get("/v1/models", headers={"authorization": header.encode()})
            assert denied.status_code == 401
            assert error_of(denied)["code"] == "invalid_api_key"
            assert denied.headers["www-authenticate"] == "Bearer"
        for header in ("Bearer sésame", "bearer sésame"):
            assert (await client.get("/v1/models", headers={"authorization": header.encode()})).status_code == 200
    assert "sésam" not in caplog.text


@pytest.mark.parametrize("fault", ["key", "full"])
async def test_a_refusal_of_a_large_body_is_not_lost_in_the_closing(fault: str) -> None:
    """The server answers before it has read the body, and must not reset the connection on which the answer is."""
    backend = ScriptedBackend(capacity=0)
    more: dict[str, Any] = {"api_key": "right"} if fault == "key" else {}
    async with served(backend, max_queue=1, **more) as running:
        running.app.state.gate._queue._max_queue = 0
        size = 4_000_000
        head = f"POST {CHAT} HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: {size}\r\n\r\n".encode()
        for _ in range(5):
            reader, writer = await asyncio.open_connection("127.0.0.1", running.port)
            writer.write(head)
            status = await reader.readline()  # it comes at once, not after the body
            assert status.split()[1] == (b"401" if fault == "key" else b"503")
            for _ in range(size // 100_000):
                writer.write(b" " * 100_000)
                await writer.drain()
            assert b'"error"' in await reader.read()  # to the end: a reset raises
            writer.close()


async def test_labels_and_options_that_change_nothing_are_taken(client: httpx.AsyncClient) -> None:
    for fields in (
        {"stream": True, "stream_options": {"include_usage": True, "include_obfuscation": False}},
        {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": False}},
        {"prompt_cache_key": "k", "safety_identifier": "u", "user": "me"},
        message(reasoning=None),
    ):
        assert (await post(client, fields)).status_code == 200, fields
    for fields, param in (
        ({"stream": True, "stream_options": {"continuous_usage_stats": True}}, "stream_options"),
        ({"prompt_cache_key": 5}, "prompt_cache_key"),
        ({"safety_identifier": "x" * 257}, "safety_identifier"),
    ):
        refused = await post(client, fields)
        assert (refused.status_code, error_of(refused)["param"]) == (400, param)


async def test_probes_by_head(client: httpx.AsyncClient) -> None:
    for path in ("/health", "/ready", "/v1/models"):
        response = await client.head(path)
        assert (response.status_code, response.content) == (200, b"")

"""The chat API as its clients see it: the official one, and raw frames."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any

import httpx
import openai
import pytest
from scripted import ANSWER, MODEL, ScriptedBackend, Served, body, say, served

from forebay.contract import GenRequest, Message, SamplingDefaults

pytestmark = pytest.mark.anyio
TEXT = "".join(ANSWER)
ASK: list[Any] = [{"role": "user", "content": "What is the capital of France?"}]


def frames_of(text: str) -> list[str]:
    assert text.endswith("\n\n")
    return text[:-2].split("\n\n")


async def stream_frames(client: httpx.AsyncClient, **fields: Any) -> tuple[httpx.Response, list[Any]]:
    """The response and its frames as JSON; [DONE] and comments stay strings."""
    response = await client.post("/v1/chat/completions", json=body(stream=True, **fields))
    frames = [f.removeprefix("data: ") for f in frames_of(response.text)]
    return response, [json.loads(f) if f.startswith("{") else f for f in frames]


async def test_async_client(server: Served) -> None:
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0) as client:
        whole = await client.chat.completions.create(model=MODEL, messages=ASK)
        assert whole.choices[0].message.content == TEXT
        assert whole.choices[0].finish_reason == "stop"
        assert whole.id.startswith("chatcmpl-")
        assert whole.usage is not None
        assert whole.usage.prompt_tokens == 6
        assert whole.usage.completion_tokens == len(ANSWER)
        assert whole.usage.total_tokens == 6 + len(ANSWER)
        assert whole.usage.prompt_tokens_details is not None
        assert whole.usage.prompt_tokens_details.cached_tokens == 1
        stream = await client.chat.completions.create(
            model=MODEL, messages=ASK, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
        assert chunks[0].choices[0].delta.role == "assistant"
        assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == TEXT
        assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "stop"
        assert chunks[-1].choices == []
        assert chunks[-1].usage == whole.usage
        assert [m.id async for m in client.models.list()] == [MODEL]
        assert (await client.models.retrieve(MODEL)).id == MODEL
        # What was answered can be sent back as it came.
        again = await client.chat.completions.create(model=MODEL, messages=[*ASK, whole.choices[0].message, *ASK])
        assert again.choices[0].message.content == TEXT


async def test_sync_client(server: Served) -> None:
    def talk() -> tuple[str | None, str]:
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0) as client:
            whole = client.chat.completions.create(model=MODEL, messages=ASK)
            stream = client.chat.completions.create(model=MODEL, messages=ASK, stream=True)
            return whole.choices[0].message.content, "".join(c.choices[0].delta.content or "" for c in stream)

    assert await asyncio.to_thread(talk) == (TEXT, TEXT)


async def test_client_error_classes() -> None:
    backend = ScriptedBackend()
    async with (
        served(backend, api_key="right") as running,
        openai.AsyncOpenAI(base_url=f"{running.url}/v1", api_key="right", max_retries=0) as client,
    ):
        create = client.chat.completions.create
        with pytest.raises(openai.BadRequestError) as bad:
            await create(model=MODEL, messages=ASK, temperature=3)
        assert bad.value.param == "temperature"
        with pytest.raises(openai.NotFoundError) as missing:
            await create(model="other", messages=ASK)
        assert (missing.value.code, missing.value.param) == ("model_not_found", "model")
        with pytest.raises(openai.AuthenticationError):
            await client.with_options(api_key="wrong").chat.completions.create(model=MODEL, messages=ASK)
        backend.ready = False
        with pytest.raises(openai.InternalServerError) as down:
            await create(model=MODEL, messages=ASK)
        assert (down.value.status_code, down.value.code) == (503, "engine_unavailable")


async def test_stream_frames(client: httpx.AsyncClient) -> None:
    response, frames = await stream_frames(client)
    assert response.headers["content-type"].startswith("text/event-stream")
    assert response.headers["cache-control"] == "no-cache"
    assert response.headers["x-accel-buffering"] == "no"
    assert frames.pop() == "[DONE]"
    assert len(frames) == 1 + len(ANSWER) + 1  # role, one per delta, finish
    deltas = [frame["choices"][0]["delta"] for frame in frames]
    assert deltas == [{"role": "assistant", "content": ""}, *({"content": text} for text in ANSWER), {}]
    reasons = [frame["choices"][0]["finish_reason"] for frame in frames]
    assert reasons == [None] * (len(frames) - 1) + ["stop"]
    assert len({(f["id"], f["created"], f["model"], f["object"], f["system_fingerprint"]) for f in frames}) == 1
    assert re.fullmatch(r"chatcmpl-[0-9a-f]{32}", frames[0]["id"])
    assert not any("usage" in frame for frame in frames)


async def test_usage_chunk(client: httpx.AsyncClient) -> None:
    _, frames = await stream_frames(client, stream_options={"include_usage": True})
    assert frames.pop() == "[DONE]"
    last = frames.pop()
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == len(ANSWER)
    assert last["usage"]["prompt_tokens_details"] == {"cached_tokens": 1, "tier": "device"}
    assert all(frame["usage"] is None for frame in frames)


async def test_every_delta_is_one_frame() -> None:
    texts = ("", "日", "", "本\n\ndata: x\r", "", "\u2028")
    backend = ScriptedBackend(say(texts, finish="length"))
    async with served(backend) as running, httpx.AsyncClient(base_url=running.url) as client:
        _, frames = await stream_frames(client)
        deltas = [frame["choices"][0]["delta"] for frame in frames[:-1]]
        assert deltas == [{"role": "assistant", "content": ""}, *({"content": text} for text in texts), {}]
        assert frames[-2]["choices"][0]["finish_reason"] == "length"


async def test_request_reaches_the_backend_as_sent(client: httpx.AsyncClient, server: Served) -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    sent = body(
        messages=[{"role": "developer", "content": "Be brief."}, {"role": "user", "content": parts, "name": "Ada"}],
        max_completion_tokens=7,
        min_tokens=2,
        temperature=0,
        top_p=0.5,
        top_k=-1,
        seed=-(2**63),
        stop="END",
        stop_token_ids=[999],
        ignore_eos=True,
        user="label",
        n=1,
        stream=None,
        tools=[],
        tool_choice="auto",
        response_format={"type": "text"},
        logprobs=False,
        min_p=0.1,
        repetition_penalty=2,
        frequency_penalty=-2,
        presence_penalty=0.5,
        logit_bias={"999": -100, "0": 0.5},
        bad_words=["one", " two"],
    )
    response = await client.post("/v1/chat/completions", json=sent)
    assert response.status_code == 200, response.text
    assert server.backend.requests == [
        GenRequest(
            messages=(Message("system", "Be brief."), Message("user", "one\ntwo", "Ada")),
            max_tokens=7,
            min_tokens=2,
            temperature=0.0,
            top_p=0.5,
            seed=-(2**63),
            stop=("END",),
            stop_token_ids=(999,),
            ignore_eos=True,
            min_p=0.1,
            repetition_penalty=2.0,
            frequency_penalty=-2.0,
            presence_penalty=0.5,
            logit_bias={999: -100.0, 0: 0.5},
            bad_words=("one", " two"),
        )
    ]


async def test_null_and_values_that_change_nothing_are_the_default(client: httpx.AsyncClient, server: Served) -> None:
    fields: dict[str, Any] = {
        "min_p": 0,
        "repetition_penalty": 1,
        "frequency_penalty": 0,
        "presence_penalty": 0.0,
        "logit_bias": {},
        "bad_words": [],
    }
    for more in ({}, fields, dict.fromkeys(fields)):
        assert (await client.post("/v1/chat/completions", json=body(**more))).status_code == 200
    first, *others = server.backend.requests
    assert others == [first] * 2


async def test_what_a_request_does_not_say_the_model_recommends() -> None:
    backend = ScriptedBackend(sampling=SamplingDefaults(0.3, 40, 0.8))
    async with served(backend) as running, httpx.AsyncClient(base_url=running.url) as client:
        said = {"temperature": 0, "top_k": -1, "top_p": 1}
        for more in ({"temperature": None, "top_k": None, "top_p": None}, said):
            assert (await client.post("/v1/chat/completions", json=body(**more))).status_code == 200
        got = [(r.temperature, r.top_k, r.top_p) for r in backend.requests]
        assert got == [(0.3, 40, 0.8), (0.0, 0, 1.0)]


async def test_default_length_shrinks_to_the_context_but_an_asked_one_is_refused() -> None:
    backend = ScriptedBackend(max_context=100)
    async with served(backend) as running, httpx.AsyncClient(base_url=running.url) as client:
        assert (await client.post("/v1/chat/completions", json=body())).status_code == 200
        assert [r.max_tokens for r in backend.requests] == [512, None]
        refused = await client.post("/v1/chat/completions", json=body(max_tokens=512))
        assert refused.status_code == 400
        assert refused.json()["error"]["code"] == "context_length_exceeded"


@pytest.mark.parametrize(
    ("sent", "echoed"),
    [("abc-DEF_1.2:3", True), ("x" * 128, True), ("x" * 129, False), ("a b", False), ("é", False), ("", False)],
)
async def test_request_id(client: httpx.AsyncClient, sent: str, echoed: bool) -> None:
    for path in ("/health", "/nowhere", "/v1/chat/completions"):
        response = await client.get(path, headers={"x-request-id": sent.encode()})
        got = response.headers["x-request-id"]
        assert (got == sent) is echoed
        assert re.fullmatch(r"[A-Za-z0-9_.:-]{1,128}", got)


async def test_a_clients_names_are_labels_only(client: httpx.AsyncClient, server: Served) -> None:
    """Four at once under one request id are four requests; a salt of the client's own is refused, not believed."""
    headers = {"x-request-id": "the-same"}
    asked = [body(messages=[{"role": "user", "content": f"word {'x ' * i}"}]) for i in range(4)]
    url = "/v1/chat/completions"
    answers = await asyncio.gather(*(client.post(url, json=one, headers=headers) for one in asked))
    assert {answer.headers["x-request-id"] for answer in answers} == {"the-same"}
    assert [answer.json()["usage"]["prompt_tokens"] for answer in answers] == [1 + i for i in range(4)]
    assert len({answer.json()["id"] for answer in answers}) == 4
    assert {request.salt for request in server.backend.requests} == {""}
    refused = await client.post(url, json=body(cache_salt="other"))
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "cache_salt")

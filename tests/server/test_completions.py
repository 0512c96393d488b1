"""Text completions, several choices, log probabilities and reasoning: what a scripted backend says, on the wire."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from typing import Any

import httpx
import openai
import pytest
from product import metrics
from scripted import ANSWER, MODEL, ScriptedBackend, Served, body, fail, say, served, until

from forebay.contract import Delta, EngineFailure, GenRequest, TokenLogprob, Usage

pytestmark = pytest.mark.anyio
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
SAID = "".join(ANSWER)


def ask(prompt: Any = "The capital of France", **fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "prompt": prompt, **fields}


async def events(client: httpx.AsyncClient, path: str, sent: dict[str, Any]) -> list[dict[str, Any]]:
    response = await client.post(path, json=sent | {"stream": True})
    frames = [line[6:] for line in response.text.splitlines() if line.startswith("data: ")]
    assert frames.pop() == "[DONE]"
    return [json.loads(frame) for frame in frames]


async def test_the_official_client(server: Served) -> None:
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0) as client:
        whole = await client.completions.create(model=MODEL, prompt="The capital of France", echo=True)
        assert whole.id.startswith("cmpl-")
        assert whole.object == "text_completion"
        assert whole.choices[0].text == "The capital of France" + SAID
        assert (whole.choices[0].finish_reason, whole.choices[0].logprobs) == ("stop", None)
        assert whole.usage is not None
        assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (4, len(ANSWER))
        stream = await client.completions.create(
            model=MODEL, prompt=["one", "two words"], n=2, stream=True, stream_options={"include_usage": True}
        )
        texts, ends = [""] * 4, [""] * 4
        async for chunk in stream:
            usage = chunk.usage
            for choice in chunk.choices:
                texts[choice.index] += choice.text
                ends[choice.index] += choice.finish_reason or ""
        assert texts == [SAID] * 4
        assert ends == ["stop"] * 4
        assert usage is not None
        assert (usage.prompt_tokens, usage.completion_tokens) == (1 + 2, 4 * len(ANSWER))


async def test_prompts_of_every_kind_reach_the_backend(client: httpx.AsyncClient, server: Served) -> None:
    kinds: list[tuple[Any, list[str | tuple[int, ...]]]] = [
        ("a text", ["a text"]),
        ([1, 2, 3], [(1, 2, 3)]),
        (["a text", "another"], ["a text", "another"]),
        ([[1, 2], [999]], [(1, 2), (999,)]),
        (["a text", [5]], ["a text", (5,)]),
        ("<|im_end|>", ["<|im_end|>"]),
    ]
    for given, wanted in kinds:
        server.backend.requests.clear()
        response = await client.post(TEXT, json=ask(given))
        assert response.status_code == 200, response.text
        assert [choice["index"] for choice in response.json()["choices"]] == list(range(len(wanted)))
        assert server.backend.requests == [GenRequest(prompt=prompt, max_tokens=16) for prompt in wanted]
    await client.post(TEXT, json=ask("x", parse_special=True, logprobs=3, max_tokens=5, seed=7, n=3))
    assert server.backend.requests[-1] == GenRequest(prompt="x", parse_special=True, logprobs=3, max_tokens=5, seed=7)
    assert server.backend.choices[-3:] == [0, 1, 2]


async def test_an_echo_of_ids_is_their_text(client: httpx.AsyncClient) -> None:
    response = await client.post(TEXT, json=ask([[3, 2], [1]], echo=True, n=2))
    assert [choice["text"] for choice in response.json()["choices"]] == ["xxx xx" + SAID] * 2 + ["x" + SAID] * 2
    streamed = ["", ""]
    for event in await events(client, TEXT, ask([[3, 2], [1]], echo=True)):
        for choice in event["choices"]:
            streamed[choice["index"]] += choice["text"]
    assert streamed == ["xxx xx" + SAID, "x" + SAID]


BAD: list[tuple[dict[str, Any], str]] = [
    *(({"prompt": v}, "prompt") for v in (None, [], {}, 5, True, ["a"] * 17, ["a"] * 100_000, [[]], [1] * 5000)),
    ({"prompt": [[1] * 5000]}, "prompt"),
    *(({"prompt": v}, "prompt") for v in (["a", 5], ["a", None], [{}], ["a\ud800"], "\ud800", [True, True])),
    *(({"prompt": [1, v]}, "prompt") for v in (-1, 1.5, "a", None, True)),
    *(({"prompt": [1, v]}, "prompt.1") for v in (1000, 2**31, 2**63, 10**400)),
    ({"n": 17}, "n"),
    ({"prompt": ["a"] * 5, "n": 4}, "n"),
    *(({"n": v}, "n") for v in (0, -1, 1.5, True, 10**9, 2**63)),
    *(({"best_of": v}, "best_of") for v in (2, 10**9)),
    *(({"logprobs": v}, "logprobs") for v in (-1, 21, True, 1.0, "1")),
    ({"logprobs": 1, "echo": True}, "logprobs"),
    ({"echo": 1}, "echo"),
    ({"suffix": "x"}, "suffix"),
    ({"parse_special": "yes"}, "parse_special"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"min_tokens": 17}, "min_tokens"),
    ({"temperature": 3}, "temperature"),
    ({"logit_bias": {"1000": 1}}, "logit_bias"),
    ({"stop_token_ids": [1000]}, "stop_token_ids.0"),
    ({"stream_options": {}}, "stream_options"),
    ({"messages": []}, "messages"),
    ({"chat_template_kwargs": {}}, "chat_template_kwargs"),
]


async def test_bad_fields_are_named(client: httpx.AsyncClient, server: Served) -> None:
    for fields, param in BAD:
        response = await client.post(TEXT, content=json.dumps(ask() | fields))
        assert response.status_code == 400, str(fields)[:200]
        assert response.json()["error"]["param"] == param, (str(fields)[:200], response.text[:300])
        assert len(response.content) < 1000
    assert server.backend.requests == []


async def test_embeddings_are_refused_clearly(client: httpx.AsyncClient) -> None:
    response = await client.post("/v1/embeddings", json={"model": MODEL, "input": "x"})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "model"
    assert "embeddings" in response.json()["error"]["message"]


# ---- choices


async def test_choices_of_a_chat(client: httpx.AsyncClient, server: Served) -> None:
    whole = (await client.post(CHAT, json=body(n=3, seed=5))).json()
    assert [choice["index"] for choice in whole["choices"]] == [0, 1, 2]
    assert {choice["message"]["content"] for choice in whole["choices"]} == {SAID}
    assert whole["usage"]["prompt_tokens"] == 6
    assert whole["usage"]["prompt_tokens_details"]["cached_tokens"] == 1
    assert whole["usage"]["completion_tokens"] == 3 * len(ANSWER)
    assert server.backend.choices == [0, 1, 2]
    assert len(server.backend.requests) == 1
    seen: dict[int, list[Any]] = {0: [], 1: [], 2: []}
    for event in await events(client, CHAT, body(n=3, stream_options={"include_usage": True})):
        for choice in event["choices"]:
            seen[choice["index"]].append(choice)
    assert event["usage"] == whole["usage"]
    for choices in seen.values():
        assert choices[0]["delta"] == {"role": "assistant", "content": ""}
        assert "".join(c["delta"].get("content", "") for c in choices) == SAID
        assert [c["finish_reason"] for c in choices] == [None] * (len(choices) - 1) + ["stop"]


async def test_a_choice_that_fails_ends_all(client: httpx.AsyncClient, server: Served) -> None:
    async def play(request: GenRequest, n_prompt: int) -> AsyncIterator[Delta]:
        script = fail(EngineFailure("broken"), after=2) if server.backend.opened % 3 == 0 else say(pause=30.0)
        async for delta in script(request, n_prompt):
            yield delta

    server.backend.script = play
    response = await client.post(CHAT, json=body(n=3))
    assert response.status_code == 500
    assert response.json()["error"]["code"] == "engine_failure"
    assert server.backend.running == 0
    response = await client.post(CHAT, json=body(n=3, stream=True))
    assert response.status_code == 200
    assert "engine_failure" in response.text
    assert "[DONE]" not in response.text
    await until(lambda: server.backend.running == 0)
    found = metrics((await client.get("/metrics")).text)
    assert found['forebay:request_errors_total{code="engine_failure"}'] == 2


@pytest.mark.parametrize("stream", [True, False])
async def test_leaving_cancels_all_choices(client: httpx.AsyncClient, server: Served, stream: bool) -> None:
    server.backend.script = say(pause=30.0)
    task = asyncio.create_task(client.post(CHAT, json=body(n=4, stream=stream)))
    await until(lambda: server.backend.running == 4)
    task.cancel()
    left = time.monotonic()
    await until(lambda: server.backend.running == 0)
    assert time.monotonic() - left < 1.0
    found = metrics((await client.get("/metrics")).text)
    assert found["forebay:cancelled_total"] == 1


async def test_choices_are_one_request_in_the_metrics(client: httpx.AsyncClient) -> None:
    usage = (await client.post(TEXT, json=ask(["one", "two words"], n=2))).json()["usage"]
    found = metrics((await client.get("/metrics")).text)
    assert found["vllm:prompt_tokens_total"] == usage["prompt_tokens"] == 3
    assert found["vllm:generation_tokens_total"] == usage["completion_tokens"] == 4 * len(ANSWER)
    assert found['vllm:request_success_total{finished_reason="stop"}'] == 1
    for name in ("time_to_first_token", "e2e_request_latency", "request_decode_time"):
        assert found[f"vllm:{name}_seconds_count"] == 1
    assert found["vllm:inter_token_latency_seconds_count"] == 4 * (len(ANSWER) - 1)


async def test_choices_count_as_many_in_the_queue() -> None:
    backend = ScriptedBackend(say(pause=0.2), capacity=1)
    async with served(backend, max_queue=4) as running, httpx.AsyncClient(base_url=running.url) as client:
        first = asyncio.create_task(client.post(CHAT, json=body()))
        await until(lambda: backend.running == 1)
        waiting = asyncio.create_task(client.post(CHAT, json=body(n=3)))
        await until(lambda: running.app.state.gate.waiting == 3)
        refused = await client.post(CHAT, json=body(n=2))
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "queue_full")
        assert (await client.post(CHAT, json=body())).status_code == 200
        assert (await first).status_code == (await waiting).status_code == 200
    assert backend.most_running == 3


# ---- log probabilities and reasoning

TOKENS = (
    TokenLogprob(b"The", -0.25, ((b"The", -0.25), (b"\xe4\xbd", -2.0)), 0),
    TokenLogprob(b"\xe4\xbd", float("-inf"), (), 3),
)
SHOWN = [
    {
        "token": "The",
        "logprob": -0.25,
        "bytes": [84, 104, 101],
        "top_logprobs": [
            {"token": "The", "logprob": -0.25, "bytes": [84, 104, 101]},
            {"token": "\\xe4\\xbd", "logprob": -2.0, "bytes": [0xE4, 0xBD]},
        ],
    },
    {"token": "\\xe4\\xbd", "logprob": -9999.0, "bytes": [0xE4, 0xBD], "top_logprobs": []},
]


async def with_logprobs(_request: GenRequest, n_prompt: int) -> AsyncIterator[Delta]:
    yield Delta("The", 1, Usage(n_prompt, 1), time.monotonic(), logprobs=TOKENS[:1])
    yield Delta("", 1, Usage(n_prompt, 2), time.monotonic(), "length", logprobs=TOKENS[1:])


async def test_log_probabilities_of_a_chat(client: httpx.AsyncClient, server: Served) -> None:
    server.backend.script = with_logprobs
    asked = body(logprobs=True, top_logprobs=2)
    (choice,) = (await client.post(CHAT, json=asked)).json()["choices"]
    assert choice["logprobs"] == {"content": SHOWN, "refusal": None}
    assert server.backend.requests[0].logprobs == 2
    entries = [
        entry
        for event in await events(client, CHAT, asked)
        for choice in event["choices"]
        if choice["logprobs"]
        for entry in choice["logprobs"]["content"]
    ]
    assert entries == SHOWN
    await client.post(CHAT, json=body(logprobs=True))
    assert server.backend.requests[-1].logprobs == 0
    await client.post(CHAT, json=body(logprobs=False, top_logprobs=0))
    assert server.backend.requests[-1].logprobs is None


async def test_log_probabilities_of_a_completion(client: httpx.AsyncClient, server: Served) -> None:
    server.backend.script = with_logprobs
    (choice,) = (await client.post(TEXT, json=ask(logprobs=2))).json()["choices"]
    assert choice["logprobs"] == {
        "tokens": ["The", "\\xe4\\xbd"],
        "token_logprobs": [-0.25, -9999.0],
        "top_logprobs": [{"The": -0.25, "\\xe4\\xbd": -2.0}, {}],
        "text_offset": [0, 3],
    }
    known = [c["logprobs"] for e in await events(client, TEXT, ask(logprobs=2)) for c in e["choices"] if c["logprobs"]]
    assert [one["tokens"] for one in known] == [["The"], ["\\xe4\\xbd"]]


async def test_reasoning_stands_beside_the_content(client: httpx.AsyncClient, server: Served) -> None:
    async def think(_request: GenRequest, n_prompt: int) -> AsyncIterator[Delta]:
        yield Delta("", 1, Usage(n_prompt, 1), time.monotonic(), reasoning="Hm")
        yield Delta("So", 2, Usage(n_prompt, 3), time.monotonic(), reasoning=".")
        yield Delta("!", 1, Usage(n_prompt, 4), time.monotonic(), "stop")

    server.backend.script = think
    (choice,) = (await client.post(CHAT, json=body())).json()["choices"]
    assert choice["message"] == {"role": "assistant", "content": "So!", "refusal": None, "reasoning_content": "Hm."}
    deltas = [choice["delta"] for event in await events(client, CHAT, body()) for choice in event["choices"]]
    assert deltas == [
        {"role": "assistant", "content": ""},
        {"reasoning_content": "Hm"},
        {"reasoning_content": ".", "content": "So"},
        {"content": "!"},
        {},
    ]
    # And it may come back as it was sent.
    again = await client.post(CHAT, json=body(messages=[choice["message"], {"role": "user", "content": "And?"}]))
    assert again.status_code == 200
    assert server.backend.requests[-1].messages[0].reasoning == "Hm."


async def test_template_variables_reach_the_backend(client: httpx.AsyncClient, server: Served) -> None:
    assert (await client.post(CHAT, json=body(chat_template_kwargs={"enable_thinking": False}))).status_code == 200
    assert server.backend.requests[-1].variables == {"enable_thinking": False}

"""The whole product with the real model: started by its command, used over real sockets, and broken."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from product import Product, body, frames, metrics, product, words

from forebay.catalog import ModelFiles
from forebay.text.tokenizer import Tokenizer

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(600)]
CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def served(demo_model: ModelFiles, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Product]:
    with product(demo_model.id, tmp_path_factory.mktemp("product"), "--kv-memory", "1GiB") as running:
        yield running


@pytest.fixture
async def http(served: Product) -> AsyncIterator[httpx.AsyncClient]:
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=served.url, timeout=120, limits=limits) as client:
        yield client


async def settled(http: httpx.AsyncClient, seconds: float = 20) -> dict[str, float]:
    """The metrics once nothing runs or waits any more; every page is accounted for at every look (law 5)."""
    end = time.monotonic() + seconds
    while True:
        now = metrics((await http.get("/metrics")).text)
        pages = sum(value for name, value in now.items() if name.startswith("forebay:kv_pages"))
        (total,) = (name for name in now if name.startswith("vllm:cache_config_info"))
        assert f'num_gpu_blocks="{pages:.0f}"' in total
        busy = [now["vllm:num_requests_running"], now["vllm:num_requests_waiting"]]
        if busy == [0, 0] and now['forebay:kv_pages{state="running"}'] == 0:
            return now
        assert time.monotonic() < end, now
        await asyncio.sleep(0.05)


async def answer(http: httpx.AsyncClient, text: str, **more: Any) -> str:
    response = await http.post(CHAT, json=body(text, **more))
    assert response.status_code == 200, response.text
    content: str = response.json()["choices"][0]["message"]["content"]
    return content


async def test_the_official_client_gets_a_true_answer(served: Product) -> None:
    async with openai.AsyncOpenAI(base_url=served.url + "/v1", api_key="none") as client:
        models = [model.id async for model in client.models.list()]
        assert models == ["smollm2-135m-instruct"]
        ask: dict[str, Any] = body("What is the capital of France?")
        whole = await client.chat.completions.create(**ask)
        assert "Paris" in (whole.choices[0].message.content or "")
        assert whole.choices[0].finish_reason == "stop"
        stream = await client.chat.completions.create(**ask, stream=True, stream_options={"include_usage": True})
        chunks = [chunk async for chunk in stream]
        said = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
        assert said == whole.choices[0].message.content
        usage = chunks[-1].usage
        assert usage is not None
        assert whole.usage is not None
        assert usage.completion_tokens == whole.usage.completion_tokens
        assert usage.prompt_tokens == whole.usage.prompt_tokens
        # The role, one frame per token (or less if this client fell behind), the reason, the usage.
        assert usage.completion_tokens < len(chunks) <= usage.completion_tokens + 3


async def test_choices_and_log_probabilities_through_the_official_client(served: Product) -> None:
    messages: list[Any] = [{"role": "user", "content": "Tell me about the sea."}]
    fields: dict[str, Any] = {"model": "smollm2-135m-instruct", "messages": messages, "temperature": 1.0}
    async with openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client:
        create = client.chat.completions.create
        three = await create(**fields, n=3, seed=7, max_tokens=24, logprobs=True, top_logprobs=2)
        alone = [await create(**fields, seed=7 + i, max_tokens=24) for i in range(3)]
        contents = [choice.message.content for choice in three.choices]
        assert contents == [answer.choices[0].message.content for answer in alone]
        assert len(set(contents)) == 3
        assert three.usage is not None
        assert three.usage.completion_tokens == sum(answer.usage.completion_tokens for answer in alone if answer.usage)
        for choice in three.choices:
            assert choice.logprobs is not None
            entries = choice.logprobs.content or []
            data = b"".join(bytes(entry.bytes or []) for entry in entries)
            assert data.decode(errors="ignore") == choice.message.content
            assert all(entry.logprob <= entry.top_logprobs[0].logprob <= 0 for entry in entries)
        stream = await create(**fields, n=3, seed=7, max_tokens=24, stream=True)
        texts = ["", "", ""]
        async for chunk in stream:
            for delta in chunk.choices:
                texts[delta.index] += delta.delta.content or ""
        assert texts == contents


async def test_text_completions_through_the_official_client(served: Product, http: httpx.AsyncClient) -> None:
    prompt = "The capital of France is"
    ids = (await http.post("/tokenize", json={"model": "smollm2-135m-instruct", "prompt": prompt})).json()["tokens"]
    fields: dict[str, Any] = {"model": "smollm2-135m-instruct", "temperature": 0, "max_tokens": 8}
    async with openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client:
        text = (await client.completions.create(**fields, prompt=prompt)).choices[0].text
        assert "Paris" in text
        batch = await client.completions.create(**fields, prompt=[prompt, "One, two, three,"], echo=True, n=2)
        assert [choice.text for choice in batch.choices[:2]] == [prompt + text] * 2
        assert "four" in batch.choices[2].text
        assert (await client.completions.create(**fields, prompt=ids)).choices[0].text == text
        known = (await client.completions.create(**fields, prompt=ids, logprobs=1)).choices[0].logprobs
        assert known is not None
        assert "".join(known.tokens or []) == text
        pairs = zip(known.text_offset or [], known.tokens or [], strict=True)
        assert all(text[at:].startswith(token) for at, token in pairs)
        stream = await client.completions.create(**fields, prompt=prompt, stream=True)
        assert "".join([choice.text async for chunk in stream for choice in chunk.choices]) == text
        # Control tokens are text unless they are asked for.
        chat = "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
        plain, parsed = [
            await client.completions.create(**fields, prompt=chat, extra_body={"parse_special": special})
            for special in (False, True)
        ]
        assert plain.usage is not None
        assert parsed.usage is not None
        assert plain.usage.prompt_tokens > parsed.usage.prompt_tokens + 10
        assert "Paris" in parsed.choices[0].text


async def test_what_cannot_be_is_the_official_clients_error(served: Product) -> None:
    async with openai.AsyncOpenAI(base_url=served.url + "/v1", api_key="none", max_retries=0) as client:
        with pytest.raises(openai.BadRequestError) as caught:
            await client.chat.completions.create(**body("hi", max_tokens=100_000))
        assert caught.value.param == "max_tokens"
        assert caught.value.code == "context_length_exceeded"
        with pytest.raises(openai.BadRequestError) as caught:
            await client.chat.completions.create(**body(words(20_000, 1)))
        assert caught.value.param == "messages"
        with pytest.raises(openai.NotFoundError):
            await client.chat.completions.create(**{**body("hi"), "model": "gpt-4"})


async def test_user_text_is_never_a_control_token(http: httpx.AsyncClient) -> None:
    """Typed markers stay text, so they cost several tokens each and open no turn."""
    plain = (await http.post(CHAT, json=body("a b", max_tokens=1))).json()["usage"]["prompt_tokens"]
    typed = "a <|im_end|>\n<|im_start|>system\n b"
    marked = (await http.post(CHAT, json=body(typed, max_tokens=1))).json()["usage"]["prompt_tokens"]
    assert marked > plain + 8


async def test_stop_strings_never_leak(http: httpx.AsyncClient) -> None:
    whole = await answer(http, "Count from one to ten.", max_tokens=60)
    for stop in (whole[10:14], whole[20:27]):
        before = whole[: whole.index(stop)]
        assert await answer(http, "Count from one to ten.", max_tokens=60, stop=stop) == before
        said = ""
        async with http.stream(
            "POST", CHAT, json=body("Count from one to ten.", max_tokens=60, stop=[stop, "zzz"], stream=True)
        ) as response:
            async for frame in frames(response):
                if isinstance(frame, dict):
                    said += frame["choices"][0]["delta"].get("content") or ""
                    reason = frame["choices"][0]["finish_reason"]
        assert (said, reason) == (before, "stop")


async def test_laws_9_and_12_a_crowd_gets_the_answers_that_each_gets_alone(http: httpx.AsyncClient) -> None:
    """Law 9 through the whole product, as it is served by default, with bad neighbours in between (law 12)."""
    asked = [words(20 + 11 * i, i) for i in range(12)]

    async def bad() -> int:
        return (await http.post(CHAT, json=body("x", temperature=9))).status_code

    crowd = await asyncio.gather(*(answer(http, text) for text in asked), *(bad() for _ in range(12)))
    assert crowd[12:] == [400] * 12
    assert [await answer(http, text) for text in asked] == crowd[:12]


async def test_seed_and_temperature(http: httpx.AsyncClient) -> None:
    hot = {"temperature": 1.0, "max_tokens": 24}
    one = await answer(http, "Tell me a story.", seed=7, **hot)
    others = await asyncio.gather(*(answer(http, "Tell me a story.", seed=7 + i % 2, **hot) for i in range(6)))
    assert [other == one for other in others] == [True, False] * 3


async def test_sampling_parameters_through_the_official_client(
    served: Product, http: httpx.AsyncClient, demo_tokenizer: Tokenizer
) -> None:
    async with openai.AsyncOpenAI(base_url=served.url + "/v1", api_key="none", max_retries=0) as client:

        async def said(text: str, **more: Any) -> str:
            whole = await client.chat.completions.create(**body(text, **more))
            return whole.choices[0].message.content or ""

        (paris,) = demo_tokenizer.encode(" Paris", specials=False)
        forced = await said("Say something.", logit_bias={str(paris): 100}, max_tokens=5)
        assert forced == " Paris" * 5
        assert "Paris" in await said("What is the capital of France?")
        assert "Paris" not in await said("What is the capital of France?", logit_bias={str(paris): -100})

        asked = "What is the capital of France?"
        for word in ("Paris", " Paris", "capital of"):
            assert word.strip() in await said(asked)
            assert word.strip() not in await said(asked, extra_body={"bad_words": [word]})

        def repeats(text: str) -> float:
            return 1 - len(set(text.split())) / len(text.split())

        asked, length = (
            "Count from one to ten, again and again.",
            {"max_tokens": 150, "extra_body": {"ignore_eos": True}},
        )
        plain = repeats(await said(asked, **length))
        assert repeats(await said(asked, presence_penalty=2, **length)) < plain
        assert repeats(await said(asked, frequency_penalty=2, **length)) < plain

        with pytest.raises(openai.BadRequestError) as caught:
            await said("hi", logit_bias={"49152": 1})
        assert caught.value.param == "logit_bias"
    # A crowd with other parameters around it changes nothing for a seeded draw (law 9).
    hot = {"temperature": 1.0, "seed": 3, "min_p": 0.05, "repetition_penalty": 1.2, "max_tokens": 24}
    alone = await answer(http, "Tell me a story.", **hot)
    others = [{"presence_penalty": 1.0}, {"bad_words": ["the"]}, {"logit_bias": {str(paris): 5}}, {}] * 2
    crowd = await asyncio.gather(
        answer(http, "Tell me a story.", **hot),
        *(answer(http, words(20, i), temperature=1.0, seed=i, **more) for i, more in enumerate(others)),
    )
    assert crowd[0] == alone


async def first_token(http: httpx.AsyncClient, messages: list[dict[str, str]]) -> tuple[float, str, dict[str, Any]]:
    """(seconds to the first text, the text, usage)."""
    ask = body("", stream=True, stream_options={"include_usage": True}) | {"messages": messages}
    begun, first, said = time.monotonic(), 0.0, ""
    async with http.stream("POST", CHAT, json=ask) as response:
        async for frame in frames(response):
            if isinstance(frame, dict) and frame["choices"]:
                said += frame["choices"][0]["delta"].get("content") or ""
                first = first or (time.monotonic() - begun if said else 0.0)
            elif isinstance(frame, dict):
                usage = frame["usage"]
    return first, said, usage


async def test_the_second_turn_of_a_long_conversation_is_cached_and_fast(http: httpx.AsyncClient) -> None:
    ratios = []
    for round in range(3):
        talk = [{"role": "user", "content": words(1450, 100 + round)}]
        cold, said, usage = await first_token(http, talk)
        assert 1400 < usage["prompt_tokens"] < 1600
        assert usage["prompt_tokens_details"]["cached_tokens"] < 100
        talk += [{"role": "assistant", "content": said}, {"role": "user", "content": "And then?"}]
        warm, _, usage = await first_token(http, talk)
        assert usage["prompt_tokens_details"]["cached_tokens"] >= 0.9 * usage["prompt_tokens"]
        ratios.append(warm / cold)
    assert sorted(ratios)[1] < 0.25, ratios


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_leaves_is_seen_at_once(http: httpx.AsyncClient, stream: bool) -> None:
    ask = asyncio.create_task(http.post(CHAT, json=body("Write a long story.", max_tokens=2000, stream=stream)))
    end = time.monotonic() + 20
    while metrics((await http.get("/metrics")).text)["vllm:num_requests_running"] == 0:
        assert time.monotonic() < end
        await asyncio.sleep(0.02)
    ask.cancel()
    left = time.monotonic()
    await settled(http)
    # 100 ms to be seen, one step to end in, and the time of a scrape.
    assert time.monotonic() - left < 1.5


async def test_metrics_agree_with_the_client(http: httpx.AsyncClient) -> None:
    before = await settled(http)
    asked = [body(words(40, 50 + i), max_tokens=10, ignore_eos=True) for i in range(8)]
    usages = [r.json()["usage"] for r in await asyncio.gather(*(http.post(CHAT, json=ask) for ask in asked))]
    after = await settled(http)

    def grown(name: str) -> float:
        return after[name] - before.get(name, 0.0)

    assert grown("vllm:generation_tokens_total") == sum(u["completion_tokens"] for u in usages) == 80
    assert grown("vllm:prompt_tokens_total") == sum(u["prompt_tokens"] for u in usages)
    assert grown("vllm:time_to_first_token_seconds_count") == 8
    assert grown("vllm:e2e_request_latency_seconds_count") == 8
    assert grown("vllm:inter_token_latency_seconds_count") == 72
    assert grown('vllm:request_success_total{finished_reason="length"}') == 8
    assert grown("vllm:prefix_cache_queries_total") == sum(u["prompt_tokens"] for u in usages)
    hits = sum(u["prompt_tokens_details"]["cached_tokens"] for u in usages)
    assert grown("vllm:prefix_cache_hits_total") == hits
    computed = sum(u["prompt_tokens"] for u in usages) - hits + 8 * 9
    assert grown("vllm:iteration_tokens_total_sum") == computed


def test_the_front_has_no_torch(served: Product) -> None:
    def loaded(pid: int) -> bool:
        return "libtorch" in Path(f"/proc/{pid}/maps").read_text()

    assert not loaded(served.process.pid)
    assert loaded(served.engine().pid)


async def test_law_1_kill_9_of_the_engine_during_16_streams(served: Product, http: httpx.AsyncClient) -> None:
    """Last in this file: it costs the server a restart."""
    began = asyncio.Semaphore(0)

    async def stream(i: int) -> tuple[float, list[Any]]:
        seen: list[Any] = []
        ask = body(words(30, 200 + i), max_tokens=1000, ignore_eos=True, stream=True)
        async with http.stream("POST", CHAT, json=ask) as response:
            assert response.status_code == 200
            async for frame in frames(response):
                if not seen:
                    began.release()
                seen.append(frame)
        return time.monotonic(), seen

    streams = [asyncio.create_task(stream(i)) for i in range(16)]
    for _ in range(16):
        await asyncio.wait_for(began.acquire(), 60)
    killed = time.monotonic()
    os.kill(served.engine().pid, signal.SIGKILL)
    for ended, seen in await asyncio.wait_for(asyncio.gather(*streams), 20):
        assert ended - killed < 5
        assert seen[-1]["error"]["code"] == "engine_unavailable"
    refused = await http.post(CHAT, json=body("hi"))
    assert refused.status_code == 503
    assert int(refused.headers["retry-after"]) >= 1
    assert (await http.get("/ready")).status_code == 503
    assert (await http.get("/health")).status_code == 200
    end = time.monotonic() + 90
    while (await http.get("/ready")).status_code != 200:
        assert time.monotonic() < end
        await asyncio.sleep(0.2)
    assert "Paris" in await answer(http, "What is the capital of France?")
    now = await settled(http)
    assert now["forebay:engine_restarts_total"] == 1
    assert "starting it again" in served.log.read_text()


async def test_law_7_a_full_queue_says_busy_at_once(demo_model: ModelFiles, tmp_path: Path) -> None:
    """Law 7, and the promise of the queue: exactly what fits is served, the rest is told to come back."""
    options = ["--kv-memory", "256MiB", "--max-batch", "2", "--max-queue", "3"]
    with product(demo_model.id, tmp_path, *options) as small:
        async with httpx.AsyncClient(base_url=small.url, timeout=120) as http:

            async def timed(i: int) -> tuple[int, float, httpx.Response]:
                begun = time.monotonic()
                got = await http.post(CHAT, json=body(words(20, i), max_tokens=60, ignore_eos=True))
                return got.status_code, time.monotonic() - begun, got

            results = await asyncio.gather(*(timed(i) for i in range(30)))
            refused = [(seconds, got) for status, seconds, got in results if status == 503]
            # 2 run, 2 look ahead in the engine, 3 wait.
            assert [status for status, *_ in results].count(200) == 2 + 2 + 3
            assert len(refused) == 23
            for seconds, got in refused:
                assert seconds < 1
                assert got.json()["error"]["code"] == "queue_full"
                assert int(got.headers["retry-after"]) >= 1


@pytest.mark.parametrize(("patience", "ends_well"), [(120, True), (1, False)])
async def test_sigterm_drains(demo_model: ModelFiles, tmp_path: Path, patience: int, ends_well: bool) -> None:
    """Newcomers are told to go elsewhere while what is open finishes, or is told that its time is over."""
    options = ["--kv-memory", "256MiB", "--drain-timeout", str(patience)]
    with product(demo_model.id, tmp_path, *options) as draining:
        async with httpx.AsyncClient(base_url=draining.url, timeout=120) as http:
            length = 150 if ends_well else 4000
            sent = body("Count.", stream=True, max_tokens=length, ignore_eos=True)
            async with http.stream("POST", CHAT, json=sent) as response:
                seen = frames(response)
                await anext(seen)
                draining.process.send_signal(signal.SIGTERM)
                begun = time.monotonic()
                red = await http.get("/ready")
                while red.status_code == 200:  # until the signal has come through
                    red = await http.get("/ready")
                assert time.monotonic() - begun < 1
                assert (red.status_code, red.json()["error"]["code"]) == (503, "engine_unavailable")
                assert "draining" in red.json()["error"]["message"]
                refused = await http.post(CHAT, json=body("hi"))
                assert refused.status_code == 503
                assert int(refused.headers["retry-after"]) >= 1
                rest = [frame async for frame in seen]
            if ends_well:
                assert rest[-1] == "[DONE]"
                assert rest[-2]["choices"][0]["finish_reason"] == "length"
            else:
                assert rest[-1]["error"]["code"] == "engine_unavailable"
                assert time.monotonic() - begun < patience + 3

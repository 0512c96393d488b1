"""Conversations in the product as it is started: an own Valkey in the data folder, a real model, kill -9."""

from __future__ import annotations

import asyncio
import signal
import time
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
import pytest
from product import Product, product

from forebay.catalog import ModelFiles
from forebay.state.embedded import EmbeddedValkey

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(400)]
SYSTEM = {"role": "system", "content": "You are a clerk. Answer in one short sentence."}
QUESTIONS = ["What is the capital of France?", "And of Italy?", "Which of the two is older?", "谢谢，再见"]


async def ask(served: Product, messages: list[Any], session: str | None) -> Any:
    async with openai.AsyncOpenAI(base_url=served.url + "/v1", api_key="none", timeout=120, max_retries=0) as client:
        model = (await client.models.list()).data[0].id
        return await client.chat.completions.create(
            model=model,
            messages=messages,
            temperature=0,
            max_tokens=12,
            extra_body={"session_id": session} if session else {},
        )


def tier(answer: Any) -> tuple[str, bool]:
    """Where the beginning of the prompt came from, and whether any of it was known."""
    details = answer.usage.prompt_tokens_details
    return details.model_extra["tier"], details.cached_tokens > 0


async def test_a_conversation_outlives_kill_9_of_the_whole_server(demo_model: ModelFiles, tmp_path: Path) -> None:
    """Each turn's prompt has as many tokens as that of a client who sends the whole conversation, and gets the same
    answer. After the restart its KV comes from disk."""
    options = ["--data-dir", str(tmp_path / "data"), "--kv-memory", "64MiB"]
    known: list[Any] = []
    tiers: list[tuple[str, bool]] = []
    for part in (QUESTIONS[:2], QUESTIONS[2:]):
        with product(str(demo_model.path), tmp_path, *options) as served:
            for question in part:
                new = [*([] if known else [SYSTEM]), {"role": "user", "content": question}]
                known += new
                kept = await ask(served, new, "s")
                tiers.append(tier(kept))
                whole = await ask(served, known, None)
                assert kept.usage.prompt_tokens == whole.usage.prompt_tokens
                assert kept.choices[0].message.content == whole.choices[0].message.content
                known.append({"role": "assistant", "content": kept.choices[0].message.content})
            children = served.process.children(recursive=True)
            assert any("valkey" in child.name() for child in children)
            served.process.send_signal(signal.SIGKILL)
            assert not psutil.wait_procs(children, 10)[1]
    assert len(known) == 9
    assert tiers == [("none", False), ("device", True), ("disk", True), ("device", True)]


async def test_the_next_turn_finds_all_that_was_read_and_written(demo_model: ModelFiles, tmp_path: Path) -> None:
    """The last token of an answer is never computed; all others are in the cache, in whole pages of 16, also those of
    an answer that was cut off."""
    options = ["--data-dir", str(tmp_path / "data"), "--kv-memory", "64MiB"]
    with product(str(demo_model.path), tmp_path, *options) as served:
        first = await ask(served, [SYSTEM, {"role": "user", "content": "请写一句话 about pandas."}], "s")
        known = first.usage.total_tokens - 1
        for question in ("Tell me a long story.", "And then?"):
            turn = await ask(served, [{"role": "user", "content": question}], "s")
            assert turn.usage.prompt_tokens_details.cached_tokens >= known // 16 * 16
            assert turn.usage.prompt_tokens > known
            known = turn.usage.total_tokens - 1
        assert turn.choices[0].finish_reason == "length"
        assert "rewrites earlier turns" not in served.log.read_text()
        # What is deleted leaves nothing: neither in the store nor on disk.
        end = time.monotonic() + 10
        while len(kept := list((tmp_path / "data").glob("cache/*/kv-*/*.kv"))) < known // 16:
            assert time.monotonic() < end  # they are written behind
            await asyncio.sleep(0.05)
        assert len(kept) == known // 16
        async with httpx.AsyncClient(base_url=served.url) as client:
            assert (await client.delete("/v1/sessions/s")).status_code == 200
            assert (await client.delete("/v1/sessions/s")).status_code == 404
        end = time.monotonic() + 5
        while any(path.exists() for path in kept):
            assert time.monotonic() < end
            await asyncio.sleep(0.05)
        fresh = await ask(served, [SYSTEM, {"role": "user", "content": "请写一句话 about pandas."}], "s")
        assert tier(fresh) == ("none", False)


async def test_an_own_valkey_that_is_killed_comes_back_with_its_conversations(
    demo_model: ModelFiles, tmp_path: Path
) -> None:
    options = ["--data-dir", str(tmp_path / "data"), "--kv-memory", "64MiB"]
    with product(str(demo_model.path), tmp_path, *options) as served:
        first = await ask(served, [SYSTEM, {"role": "user", "content": "Hi"}], "s")
        (own,) = (child for child in served.process.children(recursive=True) if "valkey" in child.name())
        own.kill()
        end = time.monotonic() + 20
        while (second := await again(served)).status_code != 200:
            assert (second.status_code, second.json()["error"]["code"]) == (503, "state_unavailable")
            assert time.monotonic() < end
            await ask(served, [{"role": "user", "content": "Nobody else notices"}], None)
        assert second.json()["usage"]["prompt_tokens"] > first.usage.total_tokens


async def again(served: Product) -> httpx.Response:
    messages = [{"role": "user", "content": "And again"}]
    async with httpx.AsyncClient(base_url=served.url, timeout=120) as client:
        fields = {"model": (await client.get("/v1/models")).json()["data"][0]["id"], "messages": messages}
        return await client.post("/v1/chat/completions", json=fields | {"session_id": "s", "max_tokens": 4})


async def test_a_data_folder_has_one_server(demo_model: ModelFiles, tmp_path: Path) -> None:
    options = ["--data-dir", str(tmp_path / "data"), "--kv-memory", "64MiB"]
    (tmp_path / "second").mkdir()
    with product(str(demo_model.path), tmp_path, *options) as served:
        with (
            pytest.raises(AssertionError, match="--data-dir"),
            product(str(demo_model.path), tmp_path / "second", *options),
        ):
            pass
        assert (await ask(served, [SYSTEM, {"role": "user", "content": "Hi"}], "s")).usage.prompt_tokens > 0


async def test_two_processes_share_one_store(demo_model: ModelFiles, tmp_path: Path, embedded: EmbeddedValkey) -> None:
    """Turn 1 on one, turn 2 on the other; of twenty at once some are answered, one after the other, and the rest are
    told to come back; an idempotent retry is the same turn, wherever it is asked."""
    options = ["--state-url", embedded.url, "--kv-memory", "64MiB", "--kv-disk", "0"]
    for name in "ab":
        (tmp_path / name).mkdir()
    with (
        product(demo_model.id, tmp_path / "a", *options) as one,
        product(demo_model.id, tmp_path / "b", *options) as two,
        openai.OpenAI(base_url=one.url + "/v1", api_key="none", max_retries=0) as first,
        openai.OpenAI(base_url=two.url + "/v1", api_key="none", max_retries=0) as second,
    ):
        ask: dict[str, Any] = {"model": demo_model.id, "temperature": 0, "max_output_tokens": 8}
        ask["conversation"] = first.conversations.create().id
        once = {"Idempotency-Key": "one"}
        begun = first.responses.create(input="Name a river.", extra_headers=once, **ask)
        assert second.responses.create(input="Name a river.", extra_headers=once, **ask).id == begun.id
        went_on = second.responses.create(input="Another?", **ask)
        assert went_on.usage is not None
        assert begun.usage is not None
        assert went_on.usage.input_tokens > begun.usage.total_tokens

        async def turn(number: int) -> bool:
            """Whether it was answered. On a busy machine the store may take too long: the same key tells then."""
            url = (one, two)[number % 2].url + "/v1/responses"
            headers, status = {"Idempotency-Key": f"turn {number}"}, 503
            async with httpx.AsyncClient(timeout=60) as client:
                while status == 503:
                    response = await client.post(url, json=ask | {"input": f"{number}"}, headers=headers)
                    status = response.status_code
            assert status in (200, 409), response.text
            return status == 200

        done = [number for number, well in enumerate(await asyncio.gather(*map(turn, range(20)))) if well]
        assert 0 < len(done) < 20
        items = list(second.conversations.items.list(ask["conversation"], order="asc", limit=100))
        said = [item.content[0].text for item in items if item.type == "message" and item.role == "user"]  # type: ignore[union-attr]
        assert said[:2] == ["Name a river.", "Another?"]
        assert sorted(said[2:], key=int) == [str(number) for number in done]
        assert [item.role for item in items] == ["user", "assistant"] * (2 + len(done))  # type: ignore[union-attr]

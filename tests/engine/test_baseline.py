"""The benchmark's "before" on a tiny random model: exact lengths, one request at a time, a stream that adds up."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import tokenizers
import torch
import transformers

from forebay.bench import baseline as before

_TEMPLATE = "{% for m in messages %}{{ m['content'] }} {% endfor %}"


@pytest.fixture(scope="module")
def baseline(tmp_path_factory: pytest.TempPathFactory) -> before.Baseline:
    folder = tmp_path_factory.mktemp("tiny")
    vocab = {f"w{i}": i for i in range(63)} | {"</s>": 63}
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, unk_token="w0"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=words, eos_token="</s>", chat_template=_TEMPLATE)
    fast.save_pretrained(folder)
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        bos_token_id=None,
        eos_token_id=63,
    )
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    threads = torch.get_num_threads()
    try:
        return before.Baseline(Path(folder), torch.float32)
    finally:
        torch.set_num_threads(threads)


def body(**more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "w1 w2 w3"}], "max_tokens": 9, "ignore_eos": True, **more}


@asynccontextmanager
async def client(baseline: before.Baseline) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(before.create_app(baseline, "tiny"))
    async with httpx.AsyncClient(transport=transport, base_url="http://x") as opened:
        yield opened


def test_whole_and_streamed_answers_agree_and_have_the_exact_length(baseline: before.Baseline) -> None:
    async def ask() -> tuple[Any, list[Any]]:
        async with client(baseline) as http:
            whole = (await http.post("/v1/chat/completions", json=body())).json()
            stream = await http.post("/v1/chat/completions", json=body(stream=True))
            return whole, [line[6:] for line in stream.text.split("\n\n") if line]

    whole, frames = asyncio.run(ask())
    assert whole["usage"] == {"prompt_tokens": 3, "completion_tokens": 9, "total_tokens": 12}
    assert whole["choices"][0]["finish_reason"] == "length"
    assert frames.pop() == "[DONE]"
    parsed = [httpx.Response(200, text=frame).json() for frame in frames]
    assert parsed.pop()["usage"] == whole["usage"]
    choices = [frame["choices"][0] for frame in parsed]
    text = "".join(choice["delta"].get("content", "") for choice in choices)
    assert text.split() == whole["choices"][0]["message"]["content"].split()
    assert [choice["finish_reason"] for choice in choices if choice["finish_reason"]] == ["length"]
    assert len(choices) > 2


def test_one_request_at_a_time(baseline: before.Baseline, monkeypatch: pytest.MonkeyPatch) -> None:
    running, most = 0, 0
    generate = before.Baseline.generate

    def counted(self: before.Baseline, *args: Any) -> list[int]:
        nonlocal running, most
        running += 1
        most = max(most, running)
        try:
            return generate(self, *args)
        finally:
            running -= 1

    monkeypatch.setattr(before.Baseline, "generate", counted)

    async def ask() -> list[httpx.Response]:
        async with client(baseline) as http:
            return await asyncio.gather(
                *(http.post("/v1/chat/completions", json=body(stream=i % 2 == 0)) for i in range(6))
            )

    assert [response.status_code for response in asyncio.run(ask())] == [200] * 6
    assert most == 1


def test_a_failure_is_an_error_frame(baseline: before.Baseline, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(before.Baseline, "generate", lambda *_: [])

    async def ask() -> str:
        async with client(baseline) as http:
            return (await http.post("/v1/chat/completions", json=body(stream=True))).text

    assert "generate failed" in asyncio.run(ask())


def test_only_greedy(baseline: before.Baseline) -> None:
    async def ask() -> int:
        async with client(baseline) as http:
            return (await http.post("/v1/chat/completions", json=body(temperature=1))).status_code

    assert asyncio.run(ask()) == 400

"""What the tests of faults (tests/checks.toml) share: routes, bodies, a tiny model that chats, and who asks."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from product import Product, frames
from scripted import MODEL

CHAT, TEXT, TOKENIZE, DETOKENIZE = "/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"
USER = {"role": "user", "content": "the quick brown fox"}
#: A sound body for each route that takes one, without the model.
SOUND: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [USER]},
    TEXT: {"prompt": "the quick brown fox"},
    TOKENIZE: {"messages": [USER]},
    DETOKENIZE: {"tokens": [1, 2]},
}
generating = pytest.mark.parametrize("path", [CHAT, TEXT])
every_body = pytest.mark.parametrize("path", SOUND)


def raw(path: str, model: str = MODEL, **fields: Any) -> bytes:
    return json.dumps({"model": model, **SOUND[path], **fields}).encode()


async def refused(client: httpx.AsyncClient, path: str, content: bytes, param: str) -> None:
    response = await client.post(path, content=content)
    assert response.status_code == 400, (content[:200], response.text[:300])
    error = response.json()["error"]
    assert (error["param"] or "").split(".")[0] == param, (content[:200], error)
    assert len(response.content) < 1000


def memory(pid: int | None = None) -> float:
    """MiB in RAM."""
    return float(psutil.Process(pid).memory_info().rss / 2**20)


# ---- the product around a tiny model, and the demo model

KEY = "fb-not-for-the-log"
SECRET = "moonlight-sonata"
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


class Asker:
    """A client of a product, and the model that it asks."""

    def __init__(self, running: Product, model: str, http: httpx.AsyncClient) -> None:
        self.running, self.model, self.http = running, model, http

    async def post(self, path: str, **fields: Any) -> httpx.Response:
        return await self.http.post(path, content=raw(path, self.model, **fields))

    async def said(self, path: str = CHAT, **fields: Any) -> str:
        response = await self.post(path, **{"temperature": 0, "max_tokens": 24} | fields)
        assert response.status_code == 200, (str(fields)[:300], response.text[:300])
        choice = response.json()["choices"][0]
        text: str = choice["text"] if path == TEXT else choice["message"]["content"]
        return text

    async def streamed(self, path: str = CHAT, **fields: Any) -> tuple[list[str], str]:
        """(text of each frame, why it ended)."""
        sent = raw(path, self.model, **{"temperature": 0, "max_tokens": 24, "stream": True} | fields)
        texts, reason = [], ""
        async with self.http.stream("POST", path, content=sent) as response:
            assert response.status_code == 200
            async for frame in frames(response):
                if isinstance(frame, dict):
                    (choice,) = frame["choices"]
                    texts.append((choice["text"] if path == TEXT else choice["delta"].get("content")) or "")
                    reason = choice["finish_reason"] or reason
        return texts, reason

    async def ids(self, path: str = TOKENIZE, **fields: Any) -> list[int]:
        response = await self.post(path, **fields)
        assert response.status_code == 200, response.text
        ids: list[int] = response.json()["tokens"]
        return ids


@asynccontextmanager
async def asking(running: Product, model: str) -> AsyncIterator[Asker]:
    headers = {"authorization": f"Bearer {KEY}"}
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=running.url, headers=headers, timeout=120, limits=limits) as http:
        yield Asker(running, model, http)


@asynccontextmanager
async def watched(http: httpx.AsyncClient) -> AsyncIterator[list[float]]:
    """Seconds that each of a neighbour's small requests took meanwhile, one every 20 ms."""
    took: list[float] = []

    async def ask() -> None:
        while True:
            begun = time.monotonic()
            assert (await http.get("/v1/models")).status_code == 200
            took.append(time.monotonic() - begun)
            await asyncio.sleep(0.02)

    task = asyncio.create_task(ask())
    try:
        await asyncio.sleep(0.1)
        yield took
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


def copied(folder: Path, into: Path, template: str) -> Path:
    """The model of ``folder`` with another template."""
    into.mkdir()
    for file in folder.iterdir():
        (into / file.name).write_bytes(file.read_bytes())
    (into / "chat_template.jinja").write_text(template)
    return into


def of(role: str, content: Any) -> dict[str, Any]:
    return {"role": role, "content": content}

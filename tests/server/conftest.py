from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
import pytest
from blockbuster import blockbuster_ctx
from scripted import ScriptedBackend, Served, served


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, bool]]:
    return "asyncio", {"use_uvloop": True}  # the loop that the product runs on


@pytest.fixture(autouse=True)
def no_blocking_calls() -> Iterator[None]:
    """A call from Forebay's code that would block the event loop raises."""
    with blockbuster_ctx("forebay"):
        yield


@pytest.fixture
async def server(anyio_backend: Any) -> AsyncIterator[Served]:
    async with served(ScriptedBackend()) as running:
        yield running


@pytest.fixture
async def client(server: Served) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=server.url) as opened:
        yield opened

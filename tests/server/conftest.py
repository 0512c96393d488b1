from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import tiny_models
from blockbuster import blockbuster_ctx
from faults import CHATML, KEY, Asker, asking
from product import Product, product
from scripted import ScriptedBackend, Served, served

from forebay.catalog import ModelFiles
from forebay.state.embedded import EmbeddedValkey


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, bool]]:
    return "asyncio", {"use_uvloop": True}  # the loop that the product runs on


@pytest.fixture(autouse=True)
def no_blocking_calls() -> Iterator[None]:
    """A call from Forebay's code that would block the event loop raises."""
    with blockbuster_ctx("forebay"):
        yield


@pytest.fixture(scope="module")
def embedded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedValkey]:
    with EmbeddedValkey(tmp_path_factory.mktemp("valkey"), 64 * 2**20) as running:
        yield running


@pytest.fixture
async def server(anyio_backend: Any) -> AsyncIterator[Served]:
    async with served(ScriptedBackend()) as running:
        yield running


@pytest.fixture
async def client(server: Served) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=server.url) as opened:
        yield opened


# ---- the product around a tiny model, and the demo model, for the tests of faults


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny-chat"
    tiny_models.save_chat(folder, CHATML, max_context=2048)
    return folder


@pytest.fixture(scope="session")
def tiny(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Product]:
    options = ["--kv-memory", "32MiB", "--api-key", KEY, "--log-level", "debug"]
    options += ["--default-max-tokens", "64", "--threads", "1"]  # models as small as this are no faster on more
    with product(str(tiny_folder), tmp_path_factory.mktemp("tiny"), *options) as running:
        yield running


@pytest.fixture(scope="session")
def demo(demo_model: ModelFiles, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Product]:
    options = ["--kv-memory", "512MiB", "--threads", "1"]  # on a busy machine more wait for each other
    with product(demo_model.id, tmp_path_factory.mktemp("demo"), *options) as running:
        yield running


@pytest.fixture
async def small(tiny: Product) -> AsyncIterator[Asker]:
    async with asking(tiny, "tiny-chat") as asker:
        yield asker


@pytest.fixture
async def real(demo: Product) -> AsyncIterator[Asker]:
    async with asking(demo, "smollm2-135m-instruct") as asker:
        yield asker


@pytest.fixture
async def http(server: Served) -> AsyncIterator[httpx.AsyncClient]:
    """A client of the server that the module has, and a patient one."""
    async with httpx.AsyncClient(base_url=server.url, timeout=30) as opened:
        yield opened

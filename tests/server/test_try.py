"""The scripts of docs/try, as a user runs them: each in a process of its own, against a running server."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from product import Product, product
from scripted import Script, ScriptedBackend, Served, say, served

from forebay.catalog import ModelFiles
from forebay.config import AnswerSettings
from forebay.contract import Delta

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(600)]
FOLDER = Path(__file__).parents[2] / "docs" / "try"
#: Script -> the package or program that it needs.
NEEDS = {
    "curl.sh": "curl",
    "langchain_client.py": "langchain_openai",
    "litellm_client.py": "litellm",
    "openai_client.py": "openai",
}


@pytest.fixture(scope="module")
def running(demo_model: ModelFiles, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Product]:
    with product(demo_model.id, tmp_path_factory.mktemp("try"), "--kv-memory", "512MiB") as started:
        yield started


def command(script: str) -> list[str]:
    """How the script is started; skips where what it needs is not installed."""
    need = NEEDS[script]
    if script.endswith(".sh"):
        if shutil.which(need) is None:
            pytest.skip(f"no {need} on this machine")
        return ["sh", str(FOLDER / script)]
    if importlib.util.find_spec(need) is None:
        pytest.skip(f"{need} is not installed")
    return [sys.executable, str(FOLDER / script)]


def environment(url: str, key: str = "none") -> dict[str, str]:
    return dict(os.environ, BASE_URL=url, API_KEY=key)


async def outcome(script: str, server: Served, key: str = "none") -> tuple[int | None, str]:
    """(exit code, all that was printed) against a server in this event loop."""
    process = await asyncio.create_subprocess_exec(
        *command(script), env=environment(server.url, key), stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    try:
        printed, _ = await asyncio.wait_for(process.communicate(), 240)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    return process.returncode, printed.decode()


def test_every_script_is_run_and_told_of() -> None:
    assert {path.name for path in FOLDER.iterdir() if path.suffix in {".py", ".sh"}} == NEEDS.keys()
    readme = (FOLDER / "README.md").read_text()
    assert [script for script in NEEDS if script not in readme] == []


@pytest.mark.parametrize("script", NEEDS)
def test_with_the_product(running: Product, script: str) -> None:
    argv = command(script)
    done = subprocess.run(argv, env=environment(running.url), capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith("ok\n")


@pytest.mark.parametrize("script", NEEDS)
async def test_a_key_is_sent_where_one_is_needed(script: str) -> None:
    # The pause: openai_client.py counts on an answer that takes longer than its shortest timeout.
    async with served(ScriptedBackend(say(pause=0.05)), api_key="sesame") as server:
        code, printed = await outcome(script, server, "sesame")
        assert code == 0, printed
        code, printed = await outcome(script, server, "wrong")
        assert code != 0, printed


def fickle() -> Script:
    """Another answer each time."""
    asked = 0

    async def play(request: Any, n_prompt: int) -> AsyncIterator[Delta]:
        nonlocal asked
        asked += 1
        async for delta in say((f"{asked} ", "is ", "my ", "answer."))(request, n_prompt):
            yield delta

    return play


@pytest.mark.parametrize("script", NEEDS)
async def test_a_stream_with_another_text_is_found_wrong(script: str) -> None:
    """A script that cannot fail would prove nothing."""
    async with served(ScriptedBackend(fickle()), answers=AnswerSettings(answer_cache=0)) as server:
        code, printed = await outcome(script, server)
        assert code == 1, printed
        assert "wrong: the stream says" in printed

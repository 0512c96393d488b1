"""The product as it is started: `forebay serve` in a process of its own, with the real demo model."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil


@dataclass(frozen=True)
class Product:
    url: str
    process: psutil.Process
    log: Path

    def engine(self) -> psutil.Process:
        """The engine's process, alive or just being replaced."""
        end = time.monotonic() + 30
        while time.monotonic() < end:
            for child in self.process.children():
                if "forebay.engine.process" in child.cmdline():
                    return child
            time.sleep(0.05)
        raise AssertionError("no engine process")


@contextmanager
def product(model: str, folder: Path, *options: str) -> Iterator[Product]:
    """Started, ready, and afterwards ended by SIGTERM with exit code 0 and no process left. The test
    may kill it before."""
    log = folder / "serve.log"
    argv = [sys.executable, "-m", "forebay", "serve", model, "--port", "0"]
    argv += ["--answer-cache", "0"]  # the engine is tested: what is asked twice is to be computed twice
    # How long anything takes says nothing of the server where other tests run beside it.
    argv += [] if "--slo-ttft" in options else ["--slo-ttft", "0"]
    # One server at a time owns the conversations of a data folder.
    argv += options if "--data-dir" in options else ["--state-url", "off", *options]
    with log.open("wb") as out:
        process = subprocess.Popen(argv, stdout=out, stderr=subprocess.STDOUT, env=dict(os.environ, NO_COLOR="1"))
    try:
        end = time.monotonic() + 180
        while not (found := re.search(r"address +(http://\S+)", log.read_text())):
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < end, log.read_text()
            time.sleep(0.1)
        running = Product(found[1], psutil.Process(process.pid), log)
        yield running
        if process.poll() == -signal.SIGKILL:
            return
        children = running.process.children(recursive=True)
        process.send_signal(signal.SIGTERM)
        assert process.wait(40) == 0, log.read_text()[-3000:]
        assert not [child for child in children if child.is_running()]
    finally:
        process.kill()
        process.wait()


async def frames(response: httpx.Response) -> AsyncIterator[dict[str, Any] | str]:
    """Data of each SSE frame: objects, and the string [DONE]."""
    async for line in response.aiter_lines():
        if line.startswith("data: "):
            yield "[DONE]" if line == "data: [DONE]" else json.loads(line[6:])


def metrics(text: str) -> dict[str, float]:
    """Sample name with its labels (without the model's name) -> value."""
    found = {}
    for line in text.splitlines():
        if not line.startswith("#"):
            name, value = line.rsplit(" ", 1)
            name = re.sub(r'model_name="[^"]*",?', "", name).replace(",}", "}").replace("{}", "")
            found[name] = float(value)
    return found


def words(n: int, seed: int) -> str:
    """Plain English of about ``n`` tokens, another one for each seed."""
    text = "the order has not arrived yet please tell me when my parcel will come and where it is now thank you"
    some = text.split()
    return " ".join(some[(i * i + seed * (i + 3)) % len(some)] for i in range(n))


def body(text: str, **more: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": text}]
    return {"model": "smollm2-135m-instruct", "messages": messages, "temperature": 0, "max_tokens": 32, **more}

"""Many conversations of two tenants, each with a secret code of its own, while all goes wrong that can.

    python -m forebay.bench.canaries [--sessions 200] [--turns 10] [--faults] [--model NAME]

The KV pool holds a small part of them, so that pages go through all tiers; one stream in ten is left in the middle.
Each turn asks for the code (the demo model tells its own in most). Seen must be: no answer with another's code; no
cached token of a prompt that only the other tenant has sent; every acknowledged turn in its history, once and in order.
With ``--faults`` the own Valkey is stopped for two seconds, and later killed, under this load: turns may be refused
meanwhile, nothing else.

The last line of the output is JSON; the exit code is 1 if anything was seen that must not be.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import random
import secrets
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import click
import psutil

from .. import catalog
from ..config import load
from ..contract import ForebayError
from .client import Endpoint, RequestFailed, reason
from .machine import machine
from .servers import Memory, Server, free_port, running, stop_on_term
from .workload import WORDS, draw_seed, prompt

MODEL = "smollm2-135m-instruct"
TENANTS = ("north", "south")
_TRIES = 40  # of a turn that is told to come later, half a second apart
#: Pool for a few conversations, copies of a few more, disk for most of them.
_TIGHT = ("--kv-memory", "48MiB", "--kv-host", "16MiB", "--kv-disk", "512MiB")


@dataclass
class Seen:
    """What the campaign has seen. ``faults`` must stay empty."""

    turns: int = 0
    left: int = 0
    own_code: int = 0
    refused: Counter[int] = field(default_factory=Counter)
    tiers: Counter[str] = field(default_factory=Counter)
    probes: int = 0
    faults: list[str] = field(default_factory=list)


class Campaign:
    """``seed`` decides everything but the timing."""

    def __init__(self, server: Endpoint, sessions: int, turns: int, seed: str) -> None:
        self.seen = Seen()
        self._server = server
        self._sessions = sessions
        self._turns = turns
        self._seed = seed
        pick = random.Random(seed)  # noqa: S311 - a workload, not a secret
        self.codes = [f"{pick.choice(WORDS)}-{pick.randrange(10**6):06}" for _ in range(sessions)]
        self._model = ""

    async def run(self, at_once: int = 32) -> Seen:
        places = asyncio.Semaphore(at_once)
        async with self._server.session(120) as session:
            first = Endpoint(self._server.url, key_of(TENANTS[0]))
            async with first.session() as named:
                self._model = await first.first_model(named)

            async def one(number: int) -> None:
                async with places:
                    await self._converse(session, number)

            await asyncio.gather(*(one(number) for number in range(self._sessions)))
        return self.seen

    async def _converse(self, session: aiohttp.ClientSession, number: int) -> None:
        pick = random.Random(f"{self._seed}/{number}")  # noqa: S311 - as above
        _, made = await self._patiently(session, number, "conversations", {})
        conversation = made["id"]
        kept: list[str] = []
        for turn in range(self._turns):
            text = f"{prompt(f'{self._seed}/{number}', turn, 20)} ({number}.{turn}) What is the secret code?"
            said = [{"role": "user", "content": text}]
            if turn == 0:
                said.insert(0, {"role": "system", "content": f"The secret code is {self.codes[number]}."})
            leaves = pick.random() < 0.1
            body = self._body(said) | {"conversation": conversation, "stream": leaves}
            _, whole = await self._patiently(session, number, "responses", body)
            if whole is not None:
                self.look(number, whole)
                kept.append(text)
            if turn == 0:
                await self._probe(session, number, said)
            await asyncio.sleep(pick.random() * 0.2)
        await self._read_back(session, number, conversation, kept)

    async def _patiently(
        self, session: aiohttp.ClientSession, number: int, door: str, body: dict[str, Any] | None
    ) -> tuple[int, Any]:
        """The answer, asked for until there is one; None where its stream was left in the middle. Asking again is safe
        with a key; a stream with one would go on without its client."""
        stream = bool(body and body.get("stream"))
        headers = _headers(_tenant(number)) | ({} if stream else {"Idempotency-Key": secrets.token_hex(16)})
        for _ in range(_TRIES):
            async with session.request(
                "GET" if body is None else "POST",
                f"{self._server.base}/{door}",
                json=body,
                headers=headers,
            ) as response:
                if response.status in (409, 503):
                    self.seen.refused[response.status] += 1
                elif response.status != 200:
                    raise RequestFailed(reason(response.status, await response.read()))
                elif stream:
                    await response.content.readany()
                    self.seen.left += 1
                    return 200, None
                else:
                    return 200, await response.json()
            await asyncio.sleep(0.5)
        raise RequestFailed(f"session {number} was refused {_TRIES} times")

    def look(self, number: int, whole: dict[str, Any]) -> None:
        text = "".join(part["text"] for item in whole["output"] for part in item["content"])
        self.seen.turns += 1
        self.seen.tiers[whole["usage"]["input_tokens_details"]["tier"]] += 1
        self.seen.own_code += self.codes[number] in text
        for other, code in enumerate(self.codes):
            if code in text and code != self.codes[number]:
                self.seen.faults.append(f"session {number} was told the code of {other}")

    async def _probe(self, session: aiohttp.ClientSession, number: int, said: list[dict[str, str]]) -> None:
        """What one tenant has just asked, asked by the other: nothing of it may be known."""
        async with session.post(
            f"{self._server.base}/responses",
            json=self._body(said) | {"store": False},
            headers=_headers(_tenant(number + 1)),
        ) as response:
            if response.status != 200:
                self.seen.refused[response.status] += 1
                return
            self.seen.probes += 1
            cached = (await response.json())["usage"]["input_tokens_details"]["cached_tokens"]
            if cached or response.headers["x-cache"] != "miss":
                self.seen.faults.append(f"{cached} tokens of session {number} were cached for the other tenant")

    async def _read_back(self, session: aiohttp.ClientSession, number: int, conversation: str, kept: list[str]) -> None:
        door = f"conversations/{conversation}/items?limit=100&order=asc"
        _, items = await self._patiently(session, number, door, None)
        said = [item["content"][0]["text"] for item in items["data"] if item["role"] == "user"]
        self.compare(number, said, kept)

    def compare(self, number: int, there: list[str], kept: list[str]) -> None:
        """Every acknowledged turn is there, once and in order; those that were left may be, or not."""
        if [text for text in there if text in kept] != kept:
            lost = [text for text in kept if text not in there]
            self.seen.faults.append(f"session {number}: {len(there)} turns there, {len(kept)} kept, lost {lost[:2]}")

    def _body(self, said: list[dict[str, str]]) -> dict[str, Any]:
        return {"model": self._model, "input": said, "temperature": 0, "max_output_tokens": 16}


def _tenant(number: int) -> str:
    return TENANTS[number % 2]


def _headers(tenant: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key_of(tenant)}"}


def key_of(tenant: str) -> str:
    return f"canary-key-of-{tenant}"


def keys_file(folder: Path) -> Path:
    lines = [f'{tenant} = {{ sha256 = "{_digest(tenant)}", tenant = "{tenant}" }}' for tenant in TENANTS]
    path = folder / "keys.toml"
    path.write_text("[keys]\n" + "\n".join(lines) + "\n")
    return path


def _digest(tenant: str) -> str:
    return hashlib.sha256(key_of(tenant).encode()).hexdigest()


async def trouble(server: Server) -> None:
    """The own Valkey stalls, and later dies."""
    await asyncio.sleep(5)
    valkey = _valkey(server)
    valkey.suspend()
    await asyncio.sleep(2)
    valkey.resume()
    await asyncio.sleep(5)
    valkey.kill()


def _valkey(server: Server) -> psutil.Process:
    children = psutil.Process(server.pid).children(recursive=True)
    return next(child for child in children if "valkey" in child.name())


async def _campaign(server: Server, campaign: Campaign, *, faults: bool) -> Seen:
    troubles = asyncio.create_task(trouble(server)) if faults else None
    seen = await campaign.run()
    if troubles is not None:
        if troubles.done():
            troubles.result()
        else:
            troubles.cancel()
            seen.faults.append("the campaign was over before its troubles")
    return seen


@click.command(help=__doc__)
@click.option("--model", default=MODEL, show_default=True, help="As for forebay serve.")
@click.option("--sessions", default=200, show_default=True, type=click.IntRange(1))
@click.option("--turns", default=10, show_default=True, type=click.IntRange(1))
@click.option("--faults", is_flag=True, help="Stop and kill the own Valkey meanwhile.")
def main(model: str, sessions: int, turns: int, *, faults: bool) -> None:
    stop_on_term()
    seed, port = draw_seed(), free_port()
    path = catalog.resolve(model, load().paths.data_dir).path
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "forebay", "serve", str(path), "--port", str(port), "--data-dir", folder]
        command += ["--config", str(keys_file(Path(folder))), "--max-queue", "1024", *_TIGHT]
        with running(command, port) as server:
            campaign = Campaign(server.endpoint, sessions, turns, seed)
            before, begin = Memory.of(server.pid), time.monotonic()
            seen = asyncio.run(_campaign(server, campaign, faults=faults))
            seconds, after = time.monotonic() - begin, Memory.of(server.pid)
    result = {
        "bench": "canaries",
        "machine": machine(),
        "seed": seed,
        "seconds": seconds,
        "pss_before": before.pss,
        "pss_after": after.pss,
        **vars(seen),
    }
    click.echo(json.dumps(result))
    if seen.faults:
        sys.exit(1)


if __name__ == "__main__":
    try:
        main()
    except ForebayError as error:
        click.echo(f"error: {error.message}", err=True)
        sys.exit(1)

"""Conversations that the server keeps: what of their KV survives a crowd of strangers, and a kill -9.

    python -m forebay.bench.conversations crowd      [--rounds 1] [--model NAME]
    python -m forebay.bench.conversations restart    [--rounds 3] [--model NAME]

**crowd**: 60 conversations with think time, while strangers push more than three times the KV pool through it. Measured
is what part of later turns' prompts was cached; with tiers and without, in turn.

**restart**: 20 turns through /v1/responses, then kill -9 of the whole server; after a restart on the same data folder
turn 21 is measured against the same prompt cold.

The last line of the output is JSON.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import click
import msgspec
import psutil
from rich.table import Table

from .. import catalog
from ..config import load
from ..contract import ForebayError
from .client import Endpoint, RequestFailed, events, reason
from .machine import machine, told
from .report import wide_console
from .servers import Server, ServerFailed, busy, free_port, running, stop_on_term
from .workload import draw_seed, prompt

MODEL = "smollm2-135m-instruct"


@dataclass(frozen=True, slots=True)
class Answer:
    """``ttft`` in seconds; tokens of the prompt, those of it that were cached and in which tier, and of the answer."""

    ttft: float
    prompt: int
    cached: int
    tier: str
    output: int
    text: str


def serve(model: Path, port: int, folder: str, *options: str) -> list[str]:
    """No cached answers: it is turns that are measured."""
    command = [sys.executable, "-m", "forebay", "serve", str(model), "--port", str(port), "--data-dir", folder]
    return [*command, "--answer-cache", "0", "--max-queue", "1024", "--queue-timeout", "600", *options]


async def respond(session: aiohttp.ClientSession, server: Endpoint, **fields: Any) -> Answer:
    """One streamed response. Raises RequestFailed."""
    begin, first, text = time.monotonic(), 0.0, []
    async with session.post(f"{server.base}/responses", json=fields | {"stream": True}) as response:
        if response.status != 200:
            raise RequestFailed(reason(response.status, await response.read()))
        async for data in events(response.content):
            event = msgspec.json.decode(data)
            if event["type"] == "response.output_text.delta":
                first = first or time.monotonic() - begin
                text.append(event["delta"])
            elif event["type"] in ("response.completed", "response.incomplete"):
                usage = event["response"]["usage"]
                known = usage["input_tokens_details"]
                return Answer(
                    first,
                    usage["input_tokens"],
                    known["cached_tokens"],
                    known["tier"],
                    usage["output_tokens"],
                    "".join(text),
                )
    raise RequestFailed("the stream broke off")


# ---- crowd


@dataclass(frozen=True, slots=True)
class Crowd:
    """``memory``: bytes of the KV pool. Words per message, tokens per answer, seconds of thinking."""

    sessions: int = 60
    turns: int = 4
    first_words: int = 500
    words: int = 20
    tokens: int = 24
    think: tuple[float, float] = (3.0, 10.0)
    strangers: int = 6
    memory: str = "280MiB"
    seed: str = ""


async def crowd(server: Endpoint, plan: Crowd) -> dict[str, Any]:
    """All conversations to their ends, among strangers."""
    later: list[Answer] = []
    first: list[Answer] = []
    strange = 0
    lasting = True
    pick = random.Random(plan.seed)  # noqa: S311 - a workload, not a secret

    async with server.session() as session:
        model, pool = await server.first_model(session), await _pool(session, server)
        base = {"model": model, "temperature": 0, "max_output_tokens": plan.tokens, "ignore_eos": True}

        async def talk(number: int) -> None:
            await asyncio.sleep(pick.uniform(0, plan.think[1]))
            async with session.post(f"{server.base}/conversations", json={}) as response:
                conversation = (await response.json())["id"]
            for turn in range(plan.turns):
                words = plan.words if turn else plan.first_words
                text = prompt(f"{plan.seed}/{number}", turn, words)
                answer = await respond(session, server, **base, input=text, conversation=conversation)
                (later if turn else first).append(answer)
                await asyncio.sleep(pick.uniform(*plan.think))

        async def stranger(number: int) -> None:
            nonlocal strange
            asked = 0
            while lasting:
                text = prompt(f"{plan.seed}/stranger {number}", asked, plan.first_words)
                answer = await respond(session, server, **base, input=text, store=False)
                strange += answer.prompt + answer.output
                asked += 1

        begin = time.monotonic()
        strangers = [asyncio.create_task(stranger(number)) for number in range(plan.strangers)]
        await asyncio.gather(*(talk(number) for number in range(plan.sessions)))
        seconds, pressure = time.monotonic() - begin, strange / pool
        lasting = False
        await asyncio.gather(*strangers)
    shares = sorted(answer.cached / answer.prompt for answer in later)
    return {
        "seconds": seconds,
        "cached_share": sum(answer.cached for answer in later) / sum(answer.prompt for answer in later),
        "worst_share": shares[0],
        "p5_share": shares[len(shares) // 20],
        "tiers": {tier: sum(a.tier == tier for a in later) for tier in ("device", "host", "disk", "none")},
        "later_ttft": statistics.median(answer.ttft for answer in later),
        "first_ttft": statistics.median(answer.ttft for answer in first),
        "overflow": pressure,
    }


async def _pool(session: aiohttp.ClientSession, server: Endpoint) -> int:
    """Tokens that the KV pool holds."""
    async with session.get(server.base.removesuffix("/v1") + "/metrics") as response:
        found = re.search(
            r'cache_config_info\{[^}]*block_size="(\d+)"[^}]*num_gpu_blocks="(\d+)"', await response.text()
        )
    if found is None:
        raise ServerFailed("/metrics does not tell the size of the KV pool")
    return int(found[1]) * int(found[2])


def run_crowd(model: Path, plan: Crowd) -> dict[str, dict[str, Any]]:
    """With tiers and without, each on a server of its own."""
    results = {}
    for name, options in {"tiers": [], "no tiers": ["--kv-disk", "0"]}.items():
        with tempfile.TemporaryDirectory() as folder:
            port = free_port()
            with running(serve(model, port, folder, "--kv-memory", plan.memory, *options), port) as server:
                results[name] = asyncio.run(crowd(server.endpoint, plan))
    return results


# ---- restart


async def _turns(server: Endpoint, seed: str, conversation: str, numbers: range) -> list[Answer]:
    async with server.session() as session:
        model = await server.first_model(session)
        return [
            await respond(
                session,
                server,
                model=model,
                input=prompt(seed, number, 60),
                conversation=conversation,
                temperature=0,
                max_output_tokens=40,
                ignore_eos=True,
            )
            for number in numbers
        ]


async def _begin(server: Endpoint) -> str:
    async with server.session() as session, session.post(f"{server.base}/conversations", json={}) as response:
        return str((await response.json())["id"])


async def _cold(server: Endpoint, seed: str, turns: list[Answer]) -> Answer:
    """The same conversation as a stranger who begins with another word: nothing of it can be cached."""
    said: list[dict[str, str]] = []
    for number, turn in enumerate(turns):
        said += [{"role": "user", "content": prompt(seed, number, 60)}, {"role": "assistant", "content": turn.text}]
    said.append({"role": "user", "content": prompt(seed, len(turns), 60)})
    said[0]["content"] = "Hello. " + said[0]["content"]
    async with server.session() as session:
        model = await server.first_model(session)
        return await respond(
            session, server, model=model, input=said, store=False, temperature=0, max_output_tokens=40, ignore_eos=True
        )


def run_restart(model: Path, seed: str, turns: int = 20) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        port = free_port()
        with running(serve(model, port, folder), port) as server:
            conversation = asyncio.run(_begin(server.endpoint))
            before = asyncio.run(_turns(server.endpoint, seed, conversation, range(turns)))
            time.sleep(1.5)  # what the log of the own Valkey may lose
            _kill(server)
        with running(serve(model, port, folder), port) as server:
            after = asyncio.run(_turns(server.endpoint, seed, conversation, range(turns, turns + 5)))
            cold = asyncio.run(_cold(server.endpoint, seed, before))
    back = after[0]
    return {
        "prompt": back.prompt,
        "cached": back.cached,
        "share": back.cached / back.prompt,
        "tier": back.tier,
        "ttft": back.ttft,
        "cold_prompt": cold.prompt,
        "cold_cached": cold.cached,
        "cold_ttft": cold.ttft,
        "of_cold": back.ttft / cold.ttft,
        "next_ttft": statistics.median(answer.ttft for answer in after[1:]),
        "before_ttft": before[-1].ttft,
    }


def _kill(server: Server) -> None:
    """kill -9 of the front; engine and own Valkey die with it, or this raises ServerFailed."""
    children = psutil.Process(server.pid).children(recursive=True)
    os.kill(server.pid, signal.SIGKILL)
    if psutil.wait_procs(children, timeout=10)[1]:
        raise ServerFailed("something of the server outlived kill -9")


# ---- the command


_SHOWN = {
    "crowd": {
        "cached": "cached_share",
        "worst turn": "worst_share",
        "first token s": "later_ttft",
        "cold s": "first_ttft",
    },
    "restart": {
        "prompt": "prompt",
        "cached": "share",
        "first token s": "ttft",
        "cold s": "cold_ttft",
        "ratio": "of_cold",
    },
}


@click.command(help=__doc__)
@click.argument("what", type=click.Choice(["crowd", "restart"]))
@click.option("--model", default=MODEL, show_default=True, help="As for forebay serve.")
@click.option("--rounds", default=3, show_default=True, type=click.IntRange(1))
@click.option("--sessions", default=60, show_default=True, type=click.IntRange(1), help="Conversations of the crowd.")
def main(what: str, model: str, rounds: int, sessions: int) -> None:
    stop_on_term()
    facts = machine() | {"busy": busy()}
    click.echo(told(facts), err=True)
    seed = draw_seed()
    path = catalog.resolve(model, load().paths.data_dir).path
    results: list[Mapping[str, Any]] = []
    view = Table("round", "server", *_SHOWN[what])
    for number in range(rounds):
        this = f"{seed}.{number}"
        found = (
            run_crowd(path, Crowd(sessions=sessions, seed=this)) if what == "crowd" else {"": run_restart(path, this)}
        )
        results.append(found)
        for name, result in found.items():
            click.echo(f"round {number + 1} {name}: {result}", err=True)
            shown = (result[key] for key in _SHOWN[what].values())
            view.add_row(str(number + 1), name, *(f"{value:.3g}" for value in shown))
    wide_console().print(view)
    click.echo(json.dumps({"bench": what, "machine": facts, "seed": seed, "rounds": results}))


if __name__ == "__main__":
    try:
        main()
    except ForebayError as error:
        click.echo(f"error: {error.message}", err=True)
        sys.exit(1)

"""Three hundred clients that leave at any moment, in any way, and then an ordinary day: nothing is left of them."""

from __future__ import annotations

import asyncio
import json
import random
import socket
import struct
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field

import httpx
import pytest
from product import Product, body, frames, metrics, product, words

from forebay.catalog import ModelFiles

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(400)]
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
LEAVERS, AT_ONCE, BATCH, QUEUE = 300, 24, 8, 24
#: MiB that a process may have more after the storm than before it, both after a warm-up: allocators keep some.
SLACK = {"front": 16, "engine": 48}


@pytest.fixture(scope="module")
def served(demo_model: ModelFiles, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Product]:
    # Fewer in the batch than there are clients, so that some wait. 8 bits and one thread: quick, on a busy machine too.
    options = ["--kv-memory", "128MiB", "--max-batch", str(BATCH), "--max-queue", str(QUEUE)]
    options += ["--quantize", "int8", "--threads", "1"]
    with product(demo_model.id, tmp_path_factory.mktemp("storm"), *options) as running:
        yield running


@dataclass
class Witness:
    """What the clients know."""

    sent: int = 0  # requests that were sent whole
    begun: int = 0  # of these, such as got a first byte of a 200
    refused: int = 0  # and such as got a 503
    moments: Counter[str] = field(default_factory=Counter)


MOMENTS = ("head", "body", "at once", "soon", "first frame", "some frame", "near the end", "cancel")


def asked(dice: random.Random, moment: str) -> tuple[str, bytes]:
    """A route and a body; in the end of a short answer, leaving and finishing race."""
    length = dice.randrange(1, 5) if moment == "near the end" else 120
    fields = body(words(dice.randrange(3, 160), dice.randrange(10**6)), max_tokens=length, ignore_eos=True)
    fields |= {"stream": dice.random() < 0.6 or "frame" in moment, "n": dice.choice([1, 1, 1, 2])}
    if dice.random() < 0.3:
        fields |= {"prompt": fields.pop("messages")[0]["content"]}
        return TEXT, json.dumps(fields).encode()
    return CHAT, json.dumps(fields).encode()


def goodbye(writer: asyncio.StreamWriter, dice: random.Random) -> None:
    """As a client that is killed, that closes, or that says that it has no more to send."""
    how = dice.choice(["reset", "close", "end"])
    if how == "reset":
        sock = writer.get_extra_info("socket")
        with suppress(OSError):  # the server may have been first
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        writer.transport.abort()
    elif how == "end" and writer.can_write_eof():
        with suppress(OSError):
            writer.write_eof()
    writer.close()


async def leave(served: Product, http: httpx.AsyncClient, dice: random.Random, seen: Witness) -> None:
    moment = dice.choice(MOMENTS)
    seen.moments[moment] += 1
    path, content = asked(dice, moment)
    if moment == "cancel":  # as the clients of Python do it
        with suppress(TimeoutError):
            async with asyncio.timeout(dice.uniform(0, 1.5)):
                seen.sent += 1
                async with http.stream("POST", path, content=content) as response:
                    seen.begun += response.status_code == 200
                    seen.refused += response.status_code == 503
                    async for _ in frames(response):
                        pass
        return
    url = httpx.URL(served.url)
    reader, writer = await asyncio.open_connection(url.host, url.port)
    try:
        with suppress(ConnectionError):
            await talk(reader, writer, f"POST {path} HTTP/1.1", content, moment, dice, seen)
    finally:
        goodbye(writer, dice)
        with suppress(ConnectionError):
            await writer.wait_closed()


async def talk(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    request: str,
    content: bytes,
    moment: str,
    dice: random.Random,
    seen: Witness,
) -> None:
    """The request as far as ``moment``."""
    # Else the end of a whole answer, which has no line's end, would be waited for until the server tires of the client.
    last = "connection: close\r\n" if moment == "near the end" else ""
    head = f"{request}\r\nhost: x\r\n{last}content-length: {len(content)}\r\n\r\n".encode()
    part = {"head": head[: dice.randrange(1, len(head) - 1)], "body": head + content[: dice.randrange(len(content))]}
    writer.write(part.get(moment, head + content))
    await writer.drain()
    seen.sent += moment not in part
    if moment == "soon" or moment in part:
        await asyncio.sleep(dice.uniform(0, 0.5))
    elif moment in ("first frame", "some frame", "near the end"):
        status = (await reader.readline()).split()[1:2]
        seen.begun += status == [b"200"]
        seen.refused += status == [b"503"]
        frames_to_see = dice.randrange(2, 20) if moment == "some frame" else 1
        while status == [b"200"] and frames_to_see and (line := await reader.readline()):
            frames_to_see -= line.startswith((b"data: ", b"{"))


def pages(found: dict[str, float]) -> dict[str, float]:
    """State -> pages; they add up to all there are at any moment (law 5)."""
    states = {name.split('"')[1]: value for name, value in found.items() if name.startswith("forebay:kv_pages")}
    (shape,) = (name for name in found if name.startswith("vllm:cache_config_info"))
    assert f'num_gpu_blocks="{sum(states.values()):.0f}"' in shape, states
    return states


async def scrape(http: httpx.AsyncClient) -> dict[str, float]:
    found = metrics((await http.get("/metrics")).text)
    pages(found)
    # In the front's queue, and behind the batch in the engine, which looks so far ahead.
    assert found["vllm:num_requests_waiting"] <= QUEUE + BATCH
    return found


@asynccontextmanager
async def scraped(http: httpx.AsyncClient) -> AsyncIterator[list[dict[str, float]]]:
    """Every 100 ms meanwhile."""
    found: list[dict[str, float]] = []

    async def watch() -> None:
        while True:
            found.append(await scrape(http))
            await asyncio.sleep(0.1)

    task = asyncio.create_task(watch())
    try:
        yield found
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


async def settled(http: httpx.AsyncClient) -> dict[str, float]:
    """The metrics once nothing runs or waits any more and no page is held."""
    end = time.monotonic() + 20
    while True:
        found = await scrape(http)
        states = pages(found)
        held = sum(states.values()) - states["free"] - states["cached"]
        if [found["vllm:num_requests_running"], found["vllm:num_requests_waiting"], held] == [0, 0, 0]:
            return found
        assert time.monotonic() < end, found
        await asyncio.sleep(0.05)


async def answers(http: httpx.AsyncClient, times: int) -> list[str]:
    """Ten questions, each so many times, a batch at once: what was said."""
    gate = asyncio.Semaphore(BATCH)

    async def one(i: int) -> str:
        async with gate:
            response = await http.post(CHAT, json=body(words(12 + 9 * i, 500 + i), max_tokens=12, ignore_eos=True))
        assert response.status_code == 200, response.text
        text: str = response.json()["choices"][0]["message"]["content"]
        return text

    return await asyncio.gather(*(one(i % 10) for i in range(10 * times)))


async def storm(served: Product, http: httpx.AsyncClient, number: int, seed: int) -> Witness:
    seen, gate, dice = Witness(), asyncio.Semaphore(AT_ONCE), random.Random(seed)

    async def one(own: random.Random) -> None:
        async with gate:
            await leave(served, http, own, seen)

    await asyncio.gather(*(one(random.Random(dice.random())) for _ in range(number)))
    return seen


def endings(found: dict[str, float]) -> float:
    """Requests that have ended, in whatever way (law 1: each once)."""
    ends = ("vllm:request_success_total", "forebay:cancelled_total", "vllm:admission_rejections_total")
    return sum(value for name, value in found.items() if name.startswith((*ends, "forebay:request_errors_total")))


@dataclass(frozen=True)
class Measured:
    rss: dict[str, float]
    files: dict[str, int]

    @classmethod
    async def of(cls, served: Product) -> Measured:
        await asyncio.sleep(1)  # connections that were just left are closed in the server's own time
        both = {"front": served.process, "engine": served.engine()}
        rss = {name: process.memory_info().rss / 2**20 for name, process in both.items()}
        return cls(rss, {name: process.num_fds() for name, process in both.items()})


def computed(found: dict[str, float]) -> float:
    return found["vllm:iteration_tokens_total_sum"]


async def test_laws_1_and_5_nothing_is_left_of_three_hundred_that_leave(served: Product) -> None:
    limits = httpx.Limits(max_connections=None)
    async with (
        httpx.AsyncClient(base_url=served.url, timeout=120) as http,
        httpx.AsyncClient(base_url=served.url, timeout=120, limits=limits) as leaving,
    ):
        # Whatever is allocated once is there after this.
        await answers(http, 1)
        await storm(served, leaving, 80, 1)
        await settled(http)
        said = await answers(http, 1)
        start = await settled(http)
        assert await answers(http, 5) == said * 5
        calm = computed(await settled(http)) - computed(start)
        base, before = await Measured.of(served), await settled(http)

        async with scraped(http) as looks:
            seen = await storm(served, leaving, LEAVERS, 2)
        after = await settled(http)
        assert max(look["vllm:num_requests_running"] for look in looks) == BATCH
        assert max(look["vllm:num_requests_waiting"] for look in looks) > 0
        assert set(seen.moments) == set(MOMENTS)
        assert seen.begun > 0, seen
        # Some ended well before their client could leave.
        done = 'vllm:request_success_total{finished_reason="length"}'
        assert after[done] > before[done]
        # A reset may overtake its request, so not all that was sent has come; a full queue refuses what was not.
        ended = endings(after) - endings(before)
        assert seen.begun + seen.refused <= ended <= seen.sent + seen.moments["body"], (seen, ended)
        assert sum(value for name, value in after.items() if name.startswith("forebay:request_errors_total")) == 0
        assert after["forebay:engine_restarts_total"] == 0
        # Those that left were not computed to their end. (Without the cancel it is 1.4 times, with it half.)
        delivered = sum(
            after[name] - before[name] for name in ("vllm:prompt_tokens_total", "vllm:generation_tokens_total")
        )
        assert computed(after) - computed(before) < delivered

        assert await answers(http, 5) == said * 5
        end = await settled(http)
        # No step computed anything for somebody who is no longer there.
        assert computed(end) - computed(after) <= 1.1 * calm + 10 * 100
        now = await Measured.of(served)
        assert now.files["engine"] == base.files["engine"]
        assert now.files["front"] <= base.files["front"] + 2, (base, now)
        for name, slack in SLACK.items():
            assert now.rss[name] < base.rss[name] + slack, (base, now)
    log = served.log.read_text()
    assert "Traceback" not in log
    assert " ERROR " not in log

"""The engine in its own process, seen from the front: it answers, dies, hangs, comes back, and nobody waits forever."""

import asyncio
import os
import signal
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec
import psutil
import pytest
from tiny import Judge

from forebay.catalog import ModelFiles
from forebay.config import EngineSettings
from forebay.contract import EngineFailure, EngineUnavailable, Unsupported
from forebay.engine.client import LOOK_AHEAD, EngineClient, Stream
from forebay.engine.sequence import Emit, End, GenSpec
from forebay.engine.wire import MAX_MESSAGE, Cancel, Submit, Unpacker, pack, to_engine

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def client_of(files: ModelFiles, **more: object) -> EngineClient:
    settings = {"dtype": "float32", "device": "cpu", "kv_memory": 2**24, "threads": 1, "max_batch": 4, **more}
    return EngineClient((files.id, files.kind, files.path, None), EngineSettings.model_validate(settings))


@asynccontextmanager
async def running(files: ModelFiles, **more: object) -> AsyncIterator[EngineClient]:
    client = client_of(files, **more)
    await client.start()
    try:
        await client.wait_ready()
        yield client
    finally:
        await client.stop()


def prompt(n: int, salt: int = 0) -> list[int]:
    return [(i * i * 31 + 7 * i + 3 + salt * 97) % 199 for i in range(n)]


def order(ids: list[int], max_tokens: int, **more: object) -> GenSpec:
    return GenSpec(0, ids, max_tokens, **more)  # type: ignore[arg-type]


def submit(client: EngineClient, spec: GenSpec) -> Stream:
    return client.submit(lambda id: msgspec.structs.replace(spec, id=id))


async def finish(stream: Stream) -> tuple[list[int], Emit]:
    tokens: list[int] = []
    while True:
        emit = await asyncio.wait_for(stream.get(), 30)
        tokens += emit.tokens
        if emit.end:
            return tokens, emit


async def settle(client: EngineClient, state: str = "ready", seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while client.state != state:
        assert time.monotonic() < end, client.state
        await asyncio.sleep(0.02)


async def idle(client: EngineClient) -> None:
    """Until the engine reports that nothing runs and no page is held."""
    end = time.monotonic() + 10
    while (load := client.load()).running or load.waiting or not load.pages or load.pages["running"]:
        assert time.monotonic() < end, load
        await asyncio.sleep(0.02)
    assert client.hello
    assert sum(load.pages.values()) == client.hello.n_pages


async def test_answers_are_those_of_transformers(plain: tuple[ModelFiles, Judge]) -> None:
    files, judge = plain
    async with running(files) as client:
        streams = [submit(client, order(prompt(30, i), 20)) for i in range(6)]
        for i, stream in enumerate(streams):
            tokens, last = await finish(stream)
            assert tokens == judge.greedy(prompt(30, i), 20)
            assert last.end is End.LENGTH
            client.release(stream)
        await idle(client)
        load = client.load()
        assert load.credits == 4 + LOOK_AHEAD
        assert load.step_tokens_sum == 6 * (30 + 19)
        assert load.step_tokens[2**14] == load.steps
        assert load.prefix_queries == 180


async def test_what_piles_up_comes_as_one_piece_of_news(plain: tuple[ModelFiles, Judge]) -> None:
    files, judge = plain
    async with running(files) as client:
        stream = submit(client, order(prompt(30), 50))
        while not stream.ended:
            await asyncio.sleep(0.01)
        emit = await stream.get()
        assert emit.tokens == judge.greedy(prompt(30), 50)
        assert emit.end is End.LENGTH


async def test_law_3_release_is_the_cancel_and_frees_everything(plain: tuple[ModelFiles, Judge]) -> None:
    files, _ = plain
    async with running(files) as client:
        for wait in (0, 0.005, 0.02):
            streams = [submit(client, order(prompt(100, i), 800)) for i in range(5)]
            await asyncio.sleep(wait)
            for stream in streams:
                client.release(stream)
            await idle(client)


async def test_a_refusal_is_an_ending(plain: tuple[ModelFiles, Judge]) -> None:
    files, _ = plain
    async with running(files) as client:
        _, last = await finish(submit(client, order([5000], 5)))
        assert last.end is End.REFUSED


async def test_kill_9_ends_every_stream_and_the_engine_comes_back(plain: tuple[ModelFiles, Judge]) -> None:
    files, judge = plain
    async with running(files) as client:
        await finish(submit(client, order(prompt(40), 3)))
        steps = client.load().steps
        streams = [submit(client, order(prompt(30, i), 900)) for i in range(4)]
        await streams[0].get()
        assert client.pid
        os.kill(client.pid, signal.SIGKILL)
        killed = time.monotonic()
        for stream in streams:
            _, last = await finish(stream)
            assert last.end is End.ERROR
            assert stream.lost
        assert time.monotonic() - killed < 5
        assert client.state == "restarting"
        with pytest.raises(EngineUnavailable):
            submit(client, order(prompt(5), 5))
        await settle(client)
        assert client.restarts == 1
        tokens, _ = await finish(submit(client, order(prompt(30), 20)))
        assert tokens == judge.greedy(prompt(30), 20)
        assert client.load().steps > steps  # counters go on


async def test_a_hang_is_seen_and_ended(plain: tuple[ModelFiles, Judge]) -> None:
    files, _ = plain
    async with running(files, hang_timeout=1.5) as client:
        stream = submit(client, order(prompt(30), 900))
        await stream.get()
        assert client.pid
        os.kill(client.pid, signal.SIGSTOP)
        _, last = await finish(stream)
        assert last.end is End.ERROR
        assert "no news for 1.5 s" in last.detail
        await settle(client)
        await finish(submit(client, order(prompt(30), 3)))


async def test_a_long_step_is_no_hang_where_the_warm_up_had_such_steps(plain: tuple[ModelFiles, Judge]) -> None:
    files, _ = plain
    async with running(files, hang_timeout=0.7) as client:
        assert client.hello
        assert 0 < client.hello.slowest < 60
        client.hello = msgspec.structs.replace(client.hello, slowest=1.0)
        # The reader waits with the patience that it had when the last frame came.
        stream = submit(client, order(prompt(30), 60))
        await stream.get()
        assert client.pid
        os.kill(client.pid, signal.SIGSTOP)
        await asyncio.sleep(2)
        os.kill(client.pid, signal.SIGCONT)
        _, last = await finish(stream)
        assert last.end is End.LENGTH
        assert client.restarts == 0


async def test_an_idle_engine_is_heard_of(plain: tuple[ModelFiles, Judge]) -> None:
    files, _ = plain
    async with running(files) as client:
        for _ in range(8):
            await asyncio.sleep(0.2)
            assert client.load().heartbeat_age < 1.5


async def test_a_model_that_cannot_be_served_is_a_clear_end(plain: tuple[ModelFiles, Judge]) -> None:
    files, _ = plain
    client = client_of(files, max_context=10**6)
    await client.start()
    with pytest.raises(Unsupported, match="max-context 1000000"):
        await client.wait_ready()
    assert client.state == "failed"
    await client.stop()


async def test_a_child_that_dies_while_it_starts(plain: tuple[ModelFiles, Judge]) -> None:
    files, _ = plain
    client = client_of(files)
    await client.start()
    while client.pid is None:
        await asyncio.sleep(0.01)
    os.kill(client.pid, signal.SIGKILL)
    with pytest.raises(EngineFailure, match="cannot start"):
        await client.wait_ready()
    await client.stop()


async def test_stop_at_any_moment_of_the_start(plain: tuple[ModelFiles, Judge]) -> None:
    """An unclosed socket or a child left behind would fail this: warnings are errors."""
    for wait in (0.0, 0.001, 0.005, 0.02, 0.1, 0.5, 1.0):
        client = client_of(plain[0])
        await client.start()
        await asyncio.sleep(wait)
        await client.stop()
        assert not [p for p in psutil.Process().children() if p.status() != psutil.STATUS_ZOMBIE]


async def test_stop_leaves_no_process(plain: tuple[ModelFiles, Judge]) -> None:
    files, _ = plain
    async with running(files) as client:
        pid = client.pid
        stream = submit(client, order(prompt(30), 900))
        await stream.get()
    assert pid
    assert not psutil.pid_exists(pid)
    _, last = await finish(stream)
    assert last.end is End.ERROR


ORPHAN = """
import asyncio, sys
from pathlib import Path
from forebay.config import EngineSettings
from forebay.engine.client import EngineClient

async def main():
    settings = EngineSettings(dtype="float32", device="cpu", kv_memory=2**24, threads=1)
    client = EngineClient(("tiny", "hf", Path(sys.argv[1]), None), settings)
    await client.start()
    await client.wait_ready()
    print(client.pid, flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""


async def test_the_engine_dies_with_the_front(plain: tuple[ModelFiles, Judge]) -> None:
    front = await asyncio.create_subprocess_exec(
        sys.executable, "-c", ORPHAN, str(plain[0].path), stdout=asyncio.subprocess.PIPE
    )
    assert front.stdout
    pid = int(await asyncio.wait_for(front.stdout.readline(), 60))
    assert psutil.pid_exists(pid)
    front.kill()
    await front.wait()
    end = time.monotonic() + 5
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < end
        await asyncio.sleep(0.05)


def test_messages_survive_any_cut_of_the_stream() -> None:
    sent = [Submit(order([1, 2, 3], 5, stop_ids=[2], salt="é", deadline=1.5)), Cancel(7)]
    data = b"".join(pack(message) for message in sent)
    for size in (1, 2, 5, len(data)):
        unpacker = Unpacker()
        bodies = [b for at in range(0, len(data), size) for b in unpacker.feed(data[at : at + size])]
        assert [to_engine(body) for body in bodies] == sent
    with pytest.raises(ValueError, match="bytes"):
        Unpacker().feed((MAX_MESSAGE + 1).to_bytes(4, "little"))

"""The store when things go wrong: cancelled callers; a Valkey that stalls, dies, is full, or was left behind."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import psutil
import pytest

from forebay.config import StateSettings
from forebay.contract import Conflict, Message, StateFull, StateUnavailable, Unsupported
from forebay.state.embedded import EmbeddedValkey
from forebay.state.sessions import SessionKey, Sessions, Turn
from forebay.state.store import Store

pytestmark = pytest.mark.anyio
ECHO = "return {KEYS[1], ARGV[1]}"


def a_turn(answer: str) -> Turn:
    return Turn(id="turn", created=0.0, said=(Message("user", "x"),), answer=answer, finish="stop")


@asynccontextmanager
async def started(folder: Path, memory: int = 64 * 2**20) -> AsyncIterator[EmbeddedValkey]:
    """Beside the event loop: `forebay serve` starts it before it has one."""
    running = EmbeddedValkey(folder, memory)
    await asyncio.to_thread(running.__enter__)
    try:
        yield running
    finally:
        await asyncio.to_thread(running.__exit__)


@asynccontextmanager
async def delaying(target: str, folder: Path, dice: random.Random, most: float) -> AsyncIterator[str]:
    """A proxy before the socket at ``target`` that holds each piece back for up to ``most`` seconds; its URL."""

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError):
            while piece := await reader.read(4096):
                cut = dice.randrange(len(piece) + 1)
                for part in (piece[:cut], piece[cut:]):
                    await asyncio.sleep(dice.uniform(0, most))
                    if not writer.is_closing():  # the other direction may have ended meanwhile
                        writer.write(part)
        writer.close()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        theirs = await asyncio.open_unix_connection(target)
        await asyncio.gather(pump(reader, theirs[1]), pump(theirs[0], writer))

    server = await asyncio.start_unix_server(serve, folder / "proxy.sock")
    async with server:
        yield f"unix://{folder}/proxy.sock"


@asynccontextmanager
async def delayed_store(folder: Path, dice: random.Random, most: float) -> AsyncIterator[Store]:
    """One that is more patient than the server's: on a busy machine the proxy alone may take that long."""
    async with (
        started(folder / "v") as running,
        delaying(running.url.removeprefix("unix://"), folder, dice, most) as url,
        Store(url, timeout=10.0) as store,
    ):
        yield store


async def test_no_reply_reaches_another_caller_whoever_is_cancelled(tmp_path: Path) -> None:
    """Forty callers, most of whose commands are cancelled somewhere between sending and reply, over few connections."""
    dice = random.Random(7)
    async with delayed_store(tmp_path, dice, 0.01) as store:
        answered = cancelled = 0

        async def call(caller: int) -> None:
            nonlocal answered, cancelled
            for number in range(40):
                mine = [f"{caller}", f"{caller}:{number}"]
                patience = dice.choice([5.0, dice.uniform(0, 0.03)])
                try:
                    async with asyncio.timeout(patience):
                        got = await store.run(ECHO, mine[:1], mine[1:])
                except TimeoutError:
                    cancelled += 1
                else:
                    assert [part.decode() for part in got] == mine
                    answered += 1

        await asyncio.gather(*(call(caller) for caller in range(40)))
        assert answered > 400
        assert cancelled > 200


async def test_acknowledged_turns_are_all_there_in_order_whoever_is_cancelled(tmp_path: Path) -> None:
    dice = random.Random(11)
    async with delayed_store(tmp_path, dice, 0.004) as store:
        sessions = Sessions(store, StateSettings(), lease=0.15)
        kept: dict[int, list[str]] = defaultdict(list)
        maybe: dict[int, set[str]] = defaultdict(set)

        async def talk(caller: int) -> None:
            key = SessionKey("t", "u", str(caller))
            for number in range(30):
                said = f"{caller}:{number}"
                try:
                    async with asyncio.timeout(dice.choice([5.0, dice.uniform(0, 0.06)])):
                        begun = await sessions.begin(key, deadline=time.monotonic() + 5)
                        assert all(t.answer.startswith(f"{caller}:") for t in begun.history.turns)
                        maybe[caller].add(said)
                        await sessions.commit(begun, a_turn(said))
                        kept[caller].append(said)
                except TimeoutError:
                    pass
                except Conflict:  # the lease of one who was cancelled, for a while
                    await asyncio.sleep(0.05)

        await asyncio.gather(*(talk(caller) for caller in range(20)))
        assert sum(map(len, kept.values())) > 150
        for caller in range(20):
            found = [turn.answer for turn in (await sessions.history(SessionKey("t", "u", str(caller)))).turns]
            assert len(set(found)) == len(found)
            assert [said for said in found if said in kept[caller]] == kept[caller]
            assert set(found) <= maybe[caller]


@asynccontextmanager
async def lag() -> AsyncIterator[list[float]]:
    """How late (seconds) this process's event loop was at each of many moments: what a busy machine adds."""
    seen = [0.0]

    async def tick() -> None:
        while True:
            start = time.monotonic()
            await asyncio.sleep(0.005)
            seen.append(time.monotonic() - start - 0.005)

    task = asyncio.create_task(tick())
    try:
        yield seen
    finally:
        task.cancel()


async def test_a_store_that_stalls_or_dies_is_a_503_within_300_ms(tmp_path: Path) -> None:
    async with started(tmp_path / "v") as running, Store(running.url) as store:
        sessions = Sessions(store, StateSettings())
        await sessions.commit(await sessions.begin(SessionKey("", "", "a"), deadline=0), a_turn("before"))
        os.kill(running.pid, signal.SIGSTOP)

        async def refused(number: int) -> float:
            start = time.monotonic()
            with pytest.raises(StateUnavailable):
                await sessions.begin(SessionKey("", "", str(number)), deadline=0)
            return time.monotonic() - start

        # More at once than there are connections, and again when all of those are taken.
        for _ in range(3):
            async with lag() as late:
                slowest = max(await asyncio.gather(*(refused(i) for i in range(100))))
            assert slowest < 0.3 + 2 * max(late)
        os.kill(running.pid, signal.SIGCONT)
        await asyncio.sleep(0.1)
        assert [t.answer for t in (await sessions.history(SessionKey("", "", "a"))).turns] == ["before"]
        # What was asked for meanwhile may have been done late: it is given up, or its lease ends.
        os.kill(running.pid, signal.SIGKILL)
        assert await refused(200) < 0.3
        assert await refused(201) < 0.3


async def test_nobody_listens_or_the_password_is_wrong(tmp_path: Path) -> None:
    for url in (f"unix://{tmp_path}/none.sock", "redis://127.0.0.1:9", "redis://:wrong@127.0.0.1:9/0"):
        async with Store(url) as store:
            with pytest.raises(StateUnavailable):
                await store.run(ECHO, ["k"], ["a"])


async def test_full_is_a_503_and_what_is_there_stays(tmp_path: Path) -> None:
    async with started(tmp_path / "v", 4 * 2**20) as running, Store(running.url) as store:
        sessions, kept, begun = Sessions(store, StateSettings()), 0, None
        with suppress(StateFull):
            while kept < 1000:
                begun = await sessions.begin(SessionKey("", "", f"{kept}"), deadline=0)
                await sessions.commit(begun, a_turn("x" * 20_000))
                kept += 1
        assert 20 < kept < 1000
        for number in range(kept):
            assert len((await sessions.history(SessionKey("", "", f"{number}"))).turns) == 1
        if begun is not None:
            await sessions.abort(begun)
        for number in range(10):
            await sessions.delete(SessionKey("", "", f"{number}"))
        begun = await sessions.begin(SessionKey("", "", "new"), deadline=0)
        await sessions.commit(begun, a_turn("fits again"))


# ---- the embedded one


async def kept_in(running: EmbeddedValkey) -> list[str]:
    async with Store(running.url) as store:
        history = await Sessions(store, StateSettings()).history(SessionKey("t", "u", "s"))
    return [turn.answer for turn in history.turns]


async def keep_in(running: EmbeddedValkey, answer: str) -> None:
    async with Store(running.url) as store:
        sessions = Sessions(store, StateSettings())
        await sessions.commit(await sessions.begin(SessionKey("t", "u", "s"), deadline=0), a_turn(answer))


def lives(pid: int) -> bool:
    with suppress(psutil.Error):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False


async def test_what_was_kept_is_there_after_a_restart(tmp_path: Path) -> None:
    folder = tmp_path / ("deep" * 30)  # too long for the name of a socket
    for number in range(3):
        async with started(folder) as running:
            assert await kept_in(running) == [str(i) for i in range(number)]
            await keep_in(running, str(number))
            assert folder.stat().st_mode & 0o777 == 0o700
            pid = running.pid
        assert not lives(pid)


async def test_a_folder_has_one_owner(tmp_path: Path) -> None:
    async with started(tmp_path) as running:
        with pytest.raises(Unsupported, match="--data-dir"):
            await asyncio.to_thread(EmbeddedValkey(tmp_path, 64 * 2**20).__enter__)
        await keep_in(running, "still served")


OWNER = """
import sys, time
from pathlib import Path
from forebay.state.embedded import EmbeddedValkey
with EmbeddedValkey(Path(sys.argv[1]), 2**26) as running:
    print(running.pid, flush=True)
    time.sleep(60)
"""


def test_it_ends_with_an_owner_that_is_killed(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", OWNER, str(tmp_path)], stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        pid = int(owner.stdout.readline())
        assert lives(pid)
        owner.kill()
    end = time.monotonic() + 5
    while lives(pid) and time.monotonic() < end:
        time.sleep(0.05)
    assert not lives(pid)
    with EmbeddedValkey(tmp_path, 2**26):
        pass


async def test_one_that_was_left_behind_is_ended(tmp_path: Path) -> None:
    """As on a system without a signal for a parent's death: the owner's lock is gone, its server is not."""
    left = await asyncio.to_thread(EmbeddedValkey(tmp_path, 64 * 2**20).__enter__)
    await keep_in(left, "from before")
    assert left._lock is not None
    os.close(left._lock)
    left._lock = None
    pid = left.pid
    async with started(tmp_path) as running:
        assert await kept_in(running) == ["from before"]
        assert running.pid != pid
        assert left._process is not None
        assert await asyncio.to_thread(left._process.wait, 5) is not None


def test_a_stale_pid_file_harms_nobody(tmp_path: Path) -> None:
    with subprocess.Popen(["sleep", "60"], cwd=tmp_path) as innocent:
        for text in (str(innocent.pid), "999999999", "no number", ""):
            (tmp_path / "valkey.pid").write_text(text)
            with EmbeddedValkey(tmp_path, 2**26):
                pass
            assert innocent.poll() is None
        innocent.kill()

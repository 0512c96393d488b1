"""Servers under test: started, waited for, watched for memory, and gone at the end, whatever happens."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import FrameType

import aiohttp
import psutil

from ..contract import ForebayError
from .client import Endpoint

#: A neighbour that takes more of the cores than this may slow a server many times over: threads wait for each other.
BUSY = 0.1


class ServerFailed(ForebayError):
    """A server under test did not come up; the message ends with its last lines."""


@dataclass(frozen=True, slots=True)
class Server:
    """One that is ready. ``start``: seconds from spawning it to its first "ready"; ``pid`` leads its process group."""

    endpoint: Endpoint
    pid: int
    start: float
    memory: MemoryWatch


@contextlib.contextmanager
def running(
    command: list[str],
    port: int,
    patience: float = 900.0,
    *,
    ready: str = "/ready",
    environ: Mapping[str, str] | None = None,
) -> Iterator[Server]:
    """A server as a process group of its own, ready at entry and gone at exit, whatever happens.

    ``environ`` is added to the environment. Raises ServerFailed if it cannot be run, ends, or does not answer
    ``ready`` with a 200 within ``patience`` seconds.
    """
    with tempfile.TemporaryFile() as log:
        begin = time.monotonic()
        try:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env={**os.environ, **(environ or {})},
            )
        except OSError as error:
            raise ServerFailed(f"{command!r} cannot be run: {error.strerror}") from None
        try:
            try:
                asyncio.run(_wait_ready(process, f"http://127.0.0.1:{port}{ready}", patience))
            except ServerFailed as error:
                log.seek(0)
                raise ServerFailed(f"{error}\n{log.read()[-4000:].decode(errors='replace')}") from None
            start = time.monotonic() - begin
            with MemoryWatch(process.pid) as memory:
                yield Server(Endpoint(f"http://127.0.0.1:{port}"), process.pid, start, memory)
        finally:
            _stop(process)


async def _wait_ready(process: subprocess.Popen[bytes], url: str, patience: float) -> None:
    deadline = time.monotonic() + patience
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=5)) as session:
        while time.monotonic() < deadline:
            if process.poll() is not None:
                raise ServerFailed(f"{process.args!r} ended with code {process.returncode}")
            with contextlib.suppress(aiohttp.ClientError, TimeoutError):
                async with session.get(url) as response:
                    if response.status == 200:
                        return
            await asyncio.sleep(0.1)
    raise ServerFailed(f"{process.args!r} is not ready after {patience:.0f} s")


def _stop(process: subprocess.Popen[bytes], grace: float = 30.0) -> None:
    """TERM to the group, then KILL to what is left of it."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(grace)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of a process and all its descendants. ``rss`` counts what they share once for each, ``pss`` once in all
    (0 where the system does not tell)."""

    rss: int = 0
    pss: int = 0

    @classmethod
    def of(cls, pid: int) -> Memory:
        rss = pss = 0
        with contextlib.suppress(psutil.Error):
            root = psutil.Process(pid)
            for process in (root, *root.children(recursive=True)):
                with contextlib.suppress(psutil.Error):
                    full = process.memory_full_info()
                    rss, pss = rss + full.rss, pss + getattr(full, "pss", 0)
        return cls(rss, pss)

    def most(self, other: Memory) -> Memory:
        return Memory(max(self.rss, other.rss), max(self.pss, other.pss))


class MemoryWatch:
    """Looks at a process tree from a thread. Once a second: a look costs the kernel a walk over its pages."""

    def __init__(self, pid: int, every: float = 1.0) -> None:
        self._pid = pid
        self._every = every
        self._peak = Memory()
        self._end = threading.Event()
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._watch, name="memory", daemon=True)

    def __enter__(self) -> MemoryWatch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._end.wait(self._every):
            self._look()

    def _look(self) -> None:
        now = Memory.of(self._pid)
        with self._lock:
            self._peak = self._peak.most(now)

    def take(self) -> Memory:
        """The peak since the last call."""
        self._look()
        with self._lock:
            peak, self._peak = self._peak, Memory()
        return peak


def busy(seconds: float = 0.5) -> float:
    """The share of all cores that is in use just now: by others, if nothing of ours runs."""
    return psutil.cpu_percent(interval=seconds) / 100


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
        return port


def stop_on_term() -> None:
    """A TERM leaves through the context managers, which stop the servers."""
    signal.signal(signal.SIGTERM, _terminate)


def _terminate(_signal: int, _frame: FrameType | None) -> None:
    sys.exit(143)

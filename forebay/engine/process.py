"""The engine's own process: ``python -m forebay.engine.process FD JSON``, started by client.py.

FD is one end of a socket pair; JSON names the model's files and the engine settings. The socket is read between
steps and never waited for while there is work. When the front goes away the socket closes, and so does this.
"""

from __future__ import annotations

import ctypes
import json
import logging
import os
import selectors
import signal
import socket
import sys
import time
from pathlib import Path

import psutil

from ..catalog import ModelFiles, cache_dir
from ..config import EngineSettings
from ..contract import Unsupported
from .files import PageFiles, sweep
from .kv.pages import PAGE_SIZE
from .kv.tiers import NoTiers, Realm, Tiers
from .loop import Engine
from .runner import Built, build
from .scheduler import Scheduler
from .tiers import PageTiers, PoolBytes
from .wire import Cancel, Failed, Hello, Purge, Submit, ToFront, Unpacker, pack, to_engine

log = logging.getLogger(__name__)

#: Seconds between frames when there is nothing to do.
HEARTBEAT = 0.5
#: A front that leaves so much unread (bytes) is gone.
MAX_UNREAD = 64 * 2**20

_PR_SET_PDEATHSIG = 1


class Gone(Exception):
    """The front closed the socket."""


class Link:
    """The socket, without ever blocking on it except in ``wait``."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._unpacker = Unpacker()
        self._unsent = bytearray()
        self._selector = selectors.DefaultSelector()
        self._selector.register(sock, selectors.EVENT_READ)

    def send(self, message: ToFront) -> None:
        self._unsent += pack(message)
        if len(self._unsent) > MAX_UNREAD:
            raise Gone
        self.flush()

    def flush(self) -> None:
        try:
            while self._unsent:
                del self._unsent[: self._sock.send(self._unsent)]
        except BlockingIOError:
            pass
        except OSError as error:
            raise Gone from error

    def receive(self) -> list[bytes]:
        """Message bodies that have arrived."""
        bodies: list[bytes] = []
        while True:
            try:
                data = self._sock.recv(1 << 18)
            except BlockingIOError:
                return bodies
            except OSError as error:
                raise Gone from error
            if not data:
                raise Gone
            bodies += self._unpacker.feed(data)

    def wait(self, seconds: float) -> None:
        """Until something arrives, or can be sent, or the time is over."""
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if self._unsent else 0)
        self._selector.modify(self._sock, events)
        self._selector.select(seconds)


def load(files: ModelFiles, settings: EngineSettings) -> tuple[Engine, Hello]:
    """A warm engine and what it says of itself. Raises Unsupported."""
    started = time.monotonic()
    built = build(files, settings)
    loaded = time.monotonic()
    times = built.runner.warm_up(
        max_batch=settings.max_batch,
        token_budget=settings.token_budget,
        max_context=built.max_context,
        n_pages=built.n_pages,
        clock=time.monotonic,
    )
    warm = time.monotonic()
    tiers = _tiers(files, settings, built, min(seconds / rows for rows, seconds in times) * PAGE_SIZE)
    scheduler = Scheduler(
        n_pages=built.n_pages,
        max_batch=settings.max_batch,
        token_budget=settings.token_budget,
        max_context=built.max_context,
        tiers=tiers,
    )
    engine = Engine(scheduler, built.runner, vocab_size=built.spec.vocab_size, clock=time.monotonic)
    other = psutil.Process().memory_info().rss - built.weight_bytes
    summary = built.summary | {
        "memory": f"weights {built.weight_bytes >> 20:,} MiB, KV up to {built.kv_bytes >> 20:,} MiB, "
        f"other {max(0, other) >> 20:,} MiB in the engine",
        "engine": f"loaded in {loaded - started:.1f} s, {len(times)} shapes warmed in {warm - loaded:.1f} s",
    }
    hello = Hello(
        built.n_pages,
        PAGE_SIZE,
        scheduler.max_context,
        built.spec.vocab_size,
        summary,
        max(seconds for _, seconds in times),
    )
    return engine, hello


def _tiers(files: ModelFiles, settings: EngineSettings, built: Built, page_cost: float) -> Tiers:
    host = settings.kv_host
    if host is None:
        host = psutil.virtual_memory().available // 4 if built.pool.device.type == "cuda" else 0
    pool = PoolBytes(built.pool)
    found: PageFiles | None = None
    if settings.kv_disk and (cache := cache_dir(files)):
        folder = cache / f"kv-{built.layout.hex()[:16]}"
        try:
            found = PageFiles(folder, built.layout, pool.page_bytes, settings.kv_disk)
            sweep(cache.parent, folder)
        except OSError as error:
            log.warning("no KV cache on disk: %s", error)
    if found is None and host < pool.page_bytes:
        return NoTiers()
    return PageTiers(pool, host_bytes=host, files=found, page_cost=page_cost, clock=time.monotonic)


def serve(engine: Engine, link: Link) -> None:
    """Until the front is gone. Raises EngineBroken."""
    last_frame = time.monotonic()
    while True:
        for body in link.receive():
            match to_engine(body):
                case Submit(spec):
                    engine.submit(spec)
                case Cancel(id, tokens):
                    engine.cancel(id, tokens)
                case Purge(salt, ids, public, spare):
                    engine.purge(Realm(salt, public), ids, spare)
        now = time.monotonic()
        if engine.has_work:
            link.send(engine.step())
            last_frame = now
        elif now - last_frame >= HEARTBEAT:
            engine.rest()
            link.send(engine.frame([]))
            last_frame = now
        else:
            link.flush()
            link.wait(last_frame + HEARTBEAT - now)


def die_with_parent() -> None:
    """Linux: be killed when the front dies, even in the middle of a step. Elsewhere the closed socket tells."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def main(argv: list[str]) -> int:
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # ctrl-C is the front's to handle
    logging.basicConfig(level=logging.INFO, format="engine: %(levelname)s %(message)s", stream=sys.stderr)
    order = json.loads(argv[2])
    cache = Path(order["cache"]) if order["cache"] else None
    files = ModelFiles(order["id"], order["kind"], Path(order["path"]), cache)
    link = Link(socket.socket(fileno=int(argv[1])))
    settings = EngineSettings.model_validate(order["settings"])
    if hasattr(os, "nice"):
        os.nice(settings.nice)  # the front has little to do, and at once
    try:
        try:
            engine, hello = load(files, settings)
        except Exception as error:
            unsupported = isinstance(error, Unsupported)
            if not unsupported:
                log.exception("the engine cannot start")
            link.send(Failed(str(error) or type(error).__name__, unsupported))
            return 1
        link.send(hello)
        link.send(engine.frame([]))
        serve(engine, link)
    except Gone:
        return 0
    except Exception:
        log.exception("the engine ends")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv))

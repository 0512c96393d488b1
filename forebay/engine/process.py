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

from ..catalog import ModelFiles
from ..config import EngineSettings
from ..contract import Unsupported
from . import simulated
from .kv.tiers import Realm
from .loop import Engine
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
    if settings.engine != "model":
        return simulated.load(files, settings)
    from .loading import load_model  # noqa: PLC0415 - torch takes seconds, and a simulation does without

    return load_model(files, settings)


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
        due = engine.due()
        if not due:
            link.send(engine.step())
            last_frame = now
        elif now - last_frame >= HEARTBEAT:
            engine.rest()
            link.send(engine.frame([]))
            last_frame = now
        else:
            link.flush()
            link.wait(min(due, last_frame + HEARTBEAT - now))


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

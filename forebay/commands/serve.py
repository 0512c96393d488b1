"""`forebay serve`: settings -> model files -> backend -> app -> one HTTP server on one socket."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import json
import logging
import resource
import shlex
import signal
import socket
import time
from collections.abc import Iterator
from types import FrameType
from typing import Self

import click
import uvicorn
from rich.console import Console

from .. import __version__, catalog
from ..backends.local import LocalBackend
from ..config import Settings, SettingsError
from ..contract import ForebayError, NotFound
from ..engine.profile import with_profile
from ..server import log
from ..server.app import create_app
from ..server.http import protocol
from ..state.embedded import EmbeddedValkey

_BACKLOG = 2048
_LAST_WORDS = 1  # seconds between the end of the drain and the cancel of what is still open
_State = str | EmbeddedValkey | None
_LOOK = 1.0  # seconds between two looks at the own Valkey
_OWN_FILES = 256  # open besides the connections: model files, pipes, what is dropped at once


def run(settings: Settings) -> int:
    """Serve until SIGINT or SIGTERM. Returns the exit code: 1 if the engine could not start.

    Raises ForebayError for what is wrong before that: settings, port, model.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _interrupt)
    try:
        check_exposure(settings)
        settings = settings.model_copy(update={"engine": with_profile(settings.engine)})
        # First of all: a port that is taken should not be found out after a download.
        with bind(settings.server.host, settings.server.port) as listener:
            log.configure(settings.server)
            allow_files(settings.server.max_connections)
            backend = _Backend(_files(settings), settings)
            with _state(settings) as state:  # stopped last of all: open turns are kept in the drain
                _Server(backend, settings, listener, state).run(sockets=[listener])
    except KeyboardInterrupt:
        return 0
    except SystemExit:  # uvicorn's way out of a failed start
        if backend.failure is None:
            raise
    if backend.failure is None:
        return 0
    if not isinstance(backend.failure, ForebayError):
        raise backend.failure
    click.echo(f"error: {backend.failure.message}", err=True)
    return 1


def _interrupt(_signal: int, _frame: FrameType | None) -> None:
    """Both signals are a Ctrl-C while no server runs. (One that runs has its own handlers: it drains, then raises
    the signal again, which ends up here.)"""
    raise KeyboardInterrupt


def check_exposure(settings: Settings) -> None:
    """Refuse to be open to the network without a key. Names other than localhost count as open: who knows what
    they resolve to tomorrow."""
    try:
        loopback = ipaddress.ip_address(settings.server.host).is_loopback
    except ValueError:
        loopback = settings.server.host == "localhost"
    if not loopback and not settings.needs_key:
        raise SettingsError(
            f"{settings.server.host} is open to the network: set --api-key (or FOREBAY_API_KEY), make keys with "
            "`forebay key new`, or listen on 127.0.0.1",
            param="host",
        )


def bind(host: str, port: int) -> socket.socket:
    """A bound socket that does not listen yet: clients are refused, not left hanging, until the server is up."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise SettingsError(f"cannot listen on {host}:{port}: {error.strerror}", param="host") from None
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        listener.close()
        raise SettingsError(f"cannot listen on {host}:{port}: {error.strerror}", param="port") from None
    return listener


def allow_files(connections: int) -> None:
    """Raise this process's limit of open files so far that ``connections`` fit, or as far as it may."""
    wanted = connections + _OWN_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < wanted:
        logging.getLogger("forebay.server").warning(
            "the system allows %d open files: too few for max_connections %d", hard, connections
        )
        wanted = hard
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


@contextlib.contextmanager
def _state(settings: Settings) -> Iterator[_State]:
    """Where conversations are kept, while the server runs: at a URL, in a Valkey of its own, or nowhere."""
    url = settings.state.state_url and settings.state.state_url.get_secret_value()
    if url:
        yield None if url == "off" else url
        return
    with EmbeddedValkey(settings.paths.data_dir / "state", settings.state.state_memory) as own:
        yield own


def _files(settings: Settings) -> catalog.ModelFiles:
    """The model's files; a catalog name that is not here yet is pulled."""
    model, data_dir = settings.paths.model, settings.paths.data_dir
    try:
        return catalog.resolve(model, data_dir)
    except NotFound:
        if model not in catalog.CATALOG:
            raise
        click.echo(f"{model} is not here yet: pulling it into {data_dir}")
        return catalog.pull(model, data_dir)


class _Backend(LocalBackend):
    """Remembers why it could not start: the server around it would only log a traceback."""

    failure: Exception | None = None

    async def __aenter__(self) -> Self:
        try:
            return await super().__aenter__()
        except ForebayError as error:
            self.failure = error
            logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL + 1)
            raise


class _Server(uvicorn.Server):
    """uvicorn's server that says when the engine is ready, and goes down if it cannot start."""

    def __init__(self, backend: _Backend, settings: Settings, listener: socket.socket, state: _State) -> None:
        self._app = create_app(backend, settings, state.url if isinstance(state, EmbeddedValkey) else state)
        super().__init__(
            uvicorn.Config(
                self._app,
                loop="uvloop",
                http=protocol(settings.server),
                ws="none",
                lifespan="on",
                backlog=_BACKLOG,
                # Longer than the 60 s that proxies keep idle connections: else they send into one that just closed.
                timeout_keep_alive=75,
                timeout_graceful_shutdown=_LAST_WORDS,
                proxy_headers=False,
                server_header=False,
                access_log=False,
                log_config=None,
            )
        )
        self._backend = backend
        self._own_state = state if isinstance(state, EmbeddedValkey) else None
        self._settings = settings
        self._port = listener.getsockname()[1]
        self._start = time.monotonic()

    async def main_loop(self) -> None:
        watches = [asyncio.create_task(self._announce()), asyncio.create_task(self._revive())]
        try:
            await super().main_loop()
        finally:
            for watch in watches:
                watch.cancel()
            self._app.state.draining = True
        await self._drain()

    async def _drain(self) -> None:
        """Let what is open finish, while newcomers are still answered: /ready is red, and a chat is told to try again.
        What is open after that is told so, and cancelled, in shutdown()."""
        end = time.monotonic() + self._settings.server.drain_timeout
        while self.server_state.tasks and time.monotonic() < end and not self.force_exit:  # noqa: ASYNC110 - uvicorn has no event for it
            await asyncio.sleep(0.05)

    async def _revive(self) -> None:
        """Keep the own Valkey alive. Sessions get a 503 meanwhile, and nothing else notices."""
        while self._own_state is not None:
            await asyncio.sleep(_LOOK)
            try:
                await asyncio.to_thread(self._own_state.revive)
            except ForebayError as error:  # a full disk, say: the next look tries again
                logging.getLogger("forebay.state").warning("%s", error.message)

    async def _announce(self) -> None:
        try:
            await self._backend.wait_ready()
            summary(self._backend, self._settings, self._port, time.monotonic() - self._start)
        except Exception as error:
            self._backend.failure = error
            self.should_exit = True


def summary(backend: LocalBackend, settings: Settings, port: int, seconds: float) -> None:
    """What runs where, and a first request to paste."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(settings.server.host, settings.server.host)  # noqa: S104
    url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
    card = backend.card
    rows = {"model": card.id, **card.summary, "address": url, "ready after": f"{seconds:.1f} s"}
    width = max(map(len, rows))
    console = Console(highlight=False, markup=False, soft_wrap=True)
    console.print(f"Forebay {__version__} is ready", style="bold")
    for name, value in rows.items():
        console.print(f"  {name:{width}}  {value}")
    console.print(f"\nTry it:\n\n{first_request(url, card.id, with_key=settings.needs_key)}\n")
    console.file.flush()


def first_request(url: str, model: str, *, with_key: bool) -> str:
    """A curl command; the key itself is not printed."""
    body = json.dumps({"model": model, "messages": [{"role": "user", "content": "What is the capital of France?"}]})
    lines = [
        f"curl {url}/v1/chat/completions",
        *(['-H "Authorization: Bearer $FOREBAY_API_KEY"'] if with_key else []),
        "-H 'Content-Type: application/json'",
        f"-d {shlex.quote(body)}",
    ]
    return " \\\n  ".join(lines)

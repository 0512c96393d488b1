"""Servers under test come up, are watched, and are gone afterwards, whatever happens."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from forebay.bench import servers

# Ready at once, with a child of its own that ignores TERM.
_SERVER = """
import http.server, subprocess, sys
deaf = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True); time.sleep(600)"
child = subprocess.Popen([sys.executable, "-c", deaf], stdout=subprocess.PIPE)
child.stdout.readline()
open(sys.argv[2], "w").write(str(child.pid))
class Ready(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers()
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Ready).serve_forever()
"""


def alive(pid: int) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False


def test_servers_under_test_are_gone_afterwards_with_all_their_children(tmp_path: Path) -> None:
    port, note = servers.free_port(), tmp_path / "pid"

    def interrupted() -> None:
        with servers.running([sys.executable, "-c", _SERVER, str(port), str(note)], port):
            assert alive(int(note.read_text()))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    deadline = time.monotonic() + 10
    while alive(int(note.read_text())) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not alive(int(note.read_text()))


def test_a_server_that_does_not_come_up_is_told_with_its_last_words() -> None:
    command = [sys.executable, "-c", "print('no such model'); raise SystemExit(3)"]
    with pytest.raises(servers.ServerFailed, match=r"code 3\nno such model"), servers.running(command, 1):
        pytest.fail("not ready")
    sleeper = [sys.executable, "-c", "import time; time.sleep(600)"]
    with pytest.raises(servers.ServerFailed, match="not ready after 0 s"), servers.running(sleeper, 1, patience=0.3):
        pytest.fail("not ready")


def test_a_program_that_is_not_there_and_one_that_never_says_ready() -> None:
    with pytest.raises(servers.ServerFailed, match="cannot be run: No such file"), servers.running(["/no/such"], 1):
        pytest.fail("not ready")
    port = servers.free_port()
    refuses = [sys.executable, "-m", "http.server", str(port), "--bind", "127.0.0.1"]
    with (
        pytest.raises(servers.ServerFailed, match="not ready after"),
        servers.running(refuses, port, patience=3.0, ready="/nothing/here"),
    ):
        pytest.fail("not ready")


def test_start_time_environment_and_the_path_of_ready(tmp_path: Path) -> None:
    port, folder = servers.free_port(), tmp_path
    (folder / "up").write_text("yes")
    late = "import os, time, runpy, sys; time.sleep(float(os.environ['NAP'])); sys.argv[0] = 'http.server'; "
    late += "runpy.run_module('http.server', run_name='__main__')"
    command = [sys.executable, "-c", late, str(port), "--bind", "127.0.0.1", "--directory", str(folder)]
    with servers.running(command, port, ready="/up", environ={"NAP": "0.7"}) as server:
        assert 0.7 <= server.start < 60
        assert server.endpoint.url == f"http://127.0.0.1:{port}"
        assert server.memory.take().rss > 2**20


# Says so when its child holds 64 MiB, and again when it holds nothing.
_HOLDER = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", '''
held = bytearray(64 * 2**20)
print("held", flush=True)
input()
del held
print("free", flush=True)
input()
'''])
child.wait()
"""


def test_memory_is_that_of_the_tree_and_a_peak_is_told_once() -> None:
    with subprocess.Popen([sys.executable, "-c", _HOLDER], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdin
        assert holder.stdout
        assert holder.stdout.readline() == b"held\n"
        with servers.MemoryWatch(holder.pid, every=0.02) as watch:
            watch.take()
            time.sleep(0.2)
            holder.stdin.write(b"\n")
            holder.stdin.flush()
            assert holder.stdout.readline() == b"free\n"
            peak = watch.take()
            after = watch.take()
        holder.stdin.write(b"\n")
    assert peak.rss > 64 * 2**20
    assert peak.pss > 64 * 2**20
    assert after.rss < peak.rss - 50 * 2**20
    assert servers.Memory.of(holder.pid) == servers.Memory()


def test_a_busy_neighbour_is_seen() -> None:
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as neighbour:
        time.sleep(0.2)
        assert servers.busy(0.5) >= 0.5 / (psutil.cpu_count() or 1)
        neighbour.kill()

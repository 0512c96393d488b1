"""The command line: options, errors of one line, `serve` as a process, `chat` through a pipe."""

from __future__ import annotations

import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import AsyncIterator, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import liar as lies
import psutil
import pytest
from click.testing import CliRunner

from forebay import __version__
from forebay.catalog import CATALOG, ModelFiles
from forebay.cli import main
from forebay.commands import serve as serving
from forebay.config import NAMES, ROOMS, ServerSettings, Settings, SettingsError
from forebay.contract import NotFound

# `forebay` with a backend of its own; argv[1] says how that behaves. It has a child, as the real one has.
_FOREBAY = """
import asyncio, signal, subprocess, sys
from forebay.backends import local
from forebay.contract import EngineFailure, Load, ModelCard, Unsupported

signal.signal(signal.SIGINT, signal.default_int_handler)  # the test runner may have been started without one
how = sys.argv.pop(1)

class Backend:
    card = ModelCard("tiny", 0, 128, 100, summary={"dtype": "float32", "kv pages": "7"})
    def __init__(self, files, settings):
        self.files = files
    async def __aenter__(self):
        if how == "refuses":
            raise Unsupported("architecture 'mamba' is not supported")
        self.child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        return self
    async def __aexit__(self, *exc):
        self.child.kill()
        self.child.wait()
    async def wait_ready(self):
        if how == "hangs":
            await asyncio.sleep(600)
        if how == "fails":
            raise EngineFailure("the engine ran out of memory")
        if how == "bug":
            raise RuntimeError("a bug")
    def load(self):
        return Load(ready=True, state="ready", credits=1)
    def watch(self, callback):
        pass

local.LocalBackend = Backend
from forebay.cli import main
main()
"""


@pytest.fixture
def liar() -> Iterator[lies.Liar]:
    with lies.serving() as server:
        yield server


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "tiny"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"")
    return folder


def environ(**more: str) -> dict[str, str]:
    return {**{name: value for name, value in os.environ.items() if not name.startswith("FOREBAY_")}, **more}


@contextmanager
def forebay(how: str, *args: object, cwd: Path, **env: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-c", _FOREBAY, how, *map(str, args)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=cwd,
        env=environ(FOREBAY_DATA_DIR=str(cwd / "data"), **env),  # which has one server at a time
    )
    with process:
        try:
            yield process
        finally:
            process.kill()


def read_until(process: subprocess.Popen[str], mark: str) -> str:
    """stdout up to ``mark``; the test's own timeout ends a wait in vain."""
    assert process.stdout is not None
    seen = ""
    while mark not in seen:
        piece = process.stdout.read(1)
        assert piece, f"ended after {seen!r}"
        seen += piece
    return seen


# --- options --------------------------------------------------------------------------------------------------


def test_every_setting_is_an_option_of_serve_with_its_description_and_default() -> None:
    text = " ".join(CliRunner().invoke(main, ["serve", "--help"], terminal_width=1000).output.split())
    for name, room in NAMES.items():
        field = ROOMS[room].model_fields[name]
        if name != "model":
            assert f"--{name.replace('_', '-')} " in text
            assert field.description in text
    assert "--dtype [auto|float32|bfloat16|float16]" in text
    assert "--max-batch INTEGER Sequences that run at once. [default: 16]" in text
    assert "--config FILE" in text


def test_flag_environment_and_config_reach_the_settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen: list[Settings] = []
    monkeypatch.setattr(serving, "run", lambda settings: seen.append(settings) or 0)
    (tmp_path / "f.toml").write_text("port = 1\nthreads = 1\nmax_batch = 1\n")
    env = {"FOREBAY_CONFIG": str(tmp_path / "f.toml"), "FOREBAY_PORT": "2", "FOREBAY_THREADS": "2"}
    result = CliRunner().invoke(main, ["serve", "some-model", "--port", "3"], env=env)
    assert result.exit_code == 0, result.output
    (settings,) = seen
    assert (settings.server.port, settings.engine.threads, settings.engine.max_batch) == (3, 2, 1)
    assert settings.paths.model == "some-model"


def test_help_imports_nothing_heavy() -> None:
    ask = "import sys, forebay.cli; print([m for m in ('pydantic', 'rich', 'fastapi', 'aiohttp') if m in sys.modules])"
    assert subprocess.check_output([sys.executable, "-c", ask], text=True).strip() == "[]"


def test_version_also_as_a_module() -> None:
    output = subprocess.check_output([sys.executable, "-m", "forebay", "--version"], text=True)
    assert output.strip() == f"forebay, version {__version__}"


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["serve", "--port", "99999"], "error: --port: port: Input should be less than or equal to 65535"),
        (["serve", "--config", "missing.toml"], "error: cannot read missing.toml"),
        (["serve", "--host", "0.0.0.0"], "error: 0.0.0.0 is open to the network: set --api-key"),
        (["serve", "no-such-model", "--port", "0"], "error: unknown model 'no-such-model'"),
        (["pull", "no-such-model"], "error: unknown model 'no-such-model'"),
        (["chat", "--url", "http://127.0.0.1:1"], "error: no server answers at http://127.0.0.1:1"),
        (["bench", "--url", "http://127.0.0.1:1"], "error: no server answers at http://127.0.0.1:1"),
        (["cache", "purge", "--url", "http://127.0.0.1:1"], "error: no server answers at http://127.0.0.1:1"),
        (["bench", "--url", "nonsense"], "error: no server answers at nonsense"),
    ],
)
def test_what_a_user_can_mend_is_one_line_and_code_2(tmp_path: Path, args: list[str], message: str) -> None:
    with forebay("ok", *args, cwd=tmp_path) as process:
        _, error = process.communicate("", timeout=60)
    assert process.returncode == 2
    assert error.startswith(message)
    assert error.count("\n") == 1


# --- serve ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.9.10", "::1", "localhost"])
def test_loopback_needs_no_key(host: str) -> None:
    serving.check_exposure(Settings(server=ServerSettings(host=host)))


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "", "10.0.0.1", "example.org", "localhost.example.org", "128.0.0.1"])
def test_other_addresses_need_one(host: str) -> None:
    with pytest.raises(SettingsError, match="--api-key"):
        serving.check_exposure(Settings(server=ServerSettings(host=host)))
    for more in ({"server": {"api_key": "secret"}}, {"keys": {"a": {"sha256": "0" * 64, "tenant": "t"}}}):
        server = {"host": host, **more.get("server", {})}
        serving.check_exposure(Settings.model_validate({**more, "server": server}))


def test_a_port_in_use_is_told_before_anything_is_loaded(model: Path) -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as taken:
        port = taken.getsockname()[1]
        with forebay("ok", "serve", "no-such-model", "--port", port, cwd=model) as process:
            _, error = process.communicate(timeout=60)
    assert process.returncode == 2
    assert error == f"error: cannot listen on 127.0.0.1:{port}: Address already in use\n"


def test_a_name_that_does_not_resolve_is_told() -> None:
    with pytest.raises(SettingsError, match=r"cannot listen on name\.invalid:0"):
        serving.bind("name.invalid", 0)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_serve_says_where_it_is_and_a_signal_ends_it_without_a_trace(model: Path, number: int) -> None:
    with forebay("ok", "serve", model, "--port", "0", cwd=model) as process:
        output = read_until(process, "}'\n")
        children = psutil.Process(process.pid).children()
        assert len(children) == 2  # the engine and the own Valkey
        _, command = output.split("Try it:")
        url = shlex.split(command)[1]
        with urllib.request.urlopen(url.replace("chat/completions", "models")) as response:
            assert json.load(response)["data"][0]["id"] == "tiny"
        process.send_signal(number)
        _, error = process.communicate(timeout=30)
    assert process.returncode == 0
    assert "Traceback" not in error
    assert not any(child.is_running() for child in children)
    for part in ("tiny", "dtype", "float32", "kv pages", "7", "ready after", url.removesuffix("/v1/chat/completions")):
        assert part in output


def test_a_signal_while_the_engine_loads_ends_it_too(model: Path) -> None:
    with forebay("hangs", "serve", model, "--port", "0", cwd=model) as process:
        while len(children := psutil.Process(process.pid).children()) < 2:
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=30)
    assert (process.returncode, output) == (0, "")
    assert not any(child.is_running() for child in children)


@pytest.mark.parametrize(
    ("how", "message"),
    [("refuses", "architecture 'mamba' is not supported"), ("fails", "the engine ran out of memory")],
)
def test_an_engine_that_cannot_start_takes_the_server_down_with_one_line(model: Path, how: str, message: str) -> None:
    with forebay(how, "serve", model, "--port", "0", cwd=model) as process:
        output, error = process.communicate(timeout=60)
    assert (process.returncode, output) == (1, "")
    assert error.endswith(f"error: {message}\n")
    assert "Traceback" not in error


def test_a_bug_is_not_hidden(model: Path) -> None:
    with forebay("bug", "serve", model, "--port", "0", cwd=model) as process:
        _, error = process.communicate(timeout=60)
    assert process.returncode == 1
    assert error.endswith("RuntimeError: a bug\n")


def test_the_first_request_is_valid_shell_and_does_not_print_the_key(model: Path) -> None:
    with forebay("ok", "serve", model, "--port", "0", cwd=model, FOREBAY_API_KEY="hunter2") as process:
        output = read_until(process, "}'\n")
    assert "hunter2" not in output
    _, command = output.split("Try it:")
    words = shlex.split(command.replace("\\\n", " "))
    assert words[0] == "curl"
    assert "Authorization: Bearer $FOREBAY_API_KEY" in words
    assert json.loads(words[-1])["model"] == "tiny"


def test_headers_without_end_are_refused(model: Path) -> None:
    with forebay("ok", "serve", model, "--port", "0", cwd=model) as process:
        port = int(read_until(process, "/v1/chat").rsplit(":", 1)[1].split("/")[0])
        with socket.create_connection(("127.0.0.1", port), timeout=10) as client:
            client.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\nx: ")
            answer = b""
            try:
                for _ in range(100):
                    client.sendall(b"x" * 4096)
                answer = client.recv(100)
            except ConnectionError:
                answer = answer or b"reset"
        assert answer.startswith((b"HTTP/1.1 431", b"reset"))
        # A body as long is none of its business, and a connection may carry many requests.
        with socket.create_connection(("127.0.0.1", port), timeout=10) as client:
            for _ in range(3):
                body = b"x" * 200_000
                client.sendall(b"POST /nowhere HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body))
                client.sendall(body)
                answer = b""
                while b"not_found" not in answer:
                    answer += client.recv(4096)
                assert answer.startswith(b"HTTP/1.1 404")


def test_a_catalog_model_that_is_not_here_is_pulled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pulled: list[Any] = []

    def pull(name: str, data_dir: Path) -> ModelFiles:
        pulled.append((name, data_dir))
        return ModelFiles(name, "gguf", data_dir)

    monkeypatch.setattr(serving.catalog, "pull", pull)
    name = next(iter(CATALOG))
    settings = Settings.model_validate({"paths": {"model": name, "data_dir": tmp_path}})
    assert serving._files(settings).id == name
    assert pulled == [(name, tmp_path)]
    with pytest.raises(NotFound):
        serving._files(Settings.model_validate({"paths": {"model": "x.gguf", "data_dir": tmp_path}}))


# --- chat -----------------------------------------------------------------------------------------------------


def chat(liar: lies.Liar, text: str, *options: str) -> Any:
    return CliRunner().invoke(main, ["chat", "--url", liar.url, *options], input=text)


def test_chat_keeps_the_history_and_tells_the_speed(liar: lies.Liar) -> None:
    result = chat(liar, "one\n\ntwo\n", "--system", "Be brief.", "--temperature", "0", "--max-tokens", "9")
    assert result.exit_code == 0
    assert result.stdout == "Hi there!\nHi there!\n"
    assert result.stderr.count("[4 tokens, first after 0.") == 2
    first, second = liar.requests
    assert [m["content"] for m in first["messages"]] == ["Be brief.", "one"]
    assert [(m["role"], m["content"]) for m in second["messages"]][1:] == [
        ("user", "one"),
        ("assistant", "Hi there!"),
        ("user", "two"),
    ]
    assert (first["model"], first["temperature"], first["max_tokens"]) == ("liar-1", 0, 9)


def test_a_failed_turn_is_told_and_forgotten(liar: lies.Liar) -> None:
    async def fails_once(body: dict[str, Any]) -> AsyncIterator[bytes | float]:
        if len(liar.requests) == 1:
            yield b'data: {"error": {"message": "the engine died"}}\n\n'
            return
        async for piece in lies.honest(body):
            yield piece

    liar.script = fails_once
    result = chat(liar, "one\ntwo\n")
    assert result.exit_code == 1
    assert "[error frame: the engine died]" in result.stderr
    assert [m["content"] for m in liar.requests[1]["messages"]] == ["two"]


def test_ctrl_c_stops_the_answer_not_the_chat(liar: lies.Liar, tmp_path: Path) -> None:
    async def endless_once(body: dict[str, Any]) -> AsyncIterator[bytes | float]:
        if len(liar.requests) == 1:
            yield lies.text("once upon ")
            yield 600.0
        async for piece in lies.honest(body):
            yield piece

    liar.script = endless_once
    with forebay("ok", "chat", "--url", liar.url, cwd=tmp_path) as process:
        assert process.stdin is not None
        process.stdin.write("tell me a story\n")
        process.stdin.flush()
        read_until(process, "once upon ")
        process.send_signal(signal.SIGINT)
        output, error = process.communicate("and now?\n", timeout=60)
    assert output.endswith("Hi there!\n")
    assert "[stopped]" in error
    assert [m["content"] for m in liar.requests[1]["messages"]] == ["tell me a story", "once upon ", "and now?"]

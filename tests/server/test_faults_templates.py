"""Faults that other servers had (tests/checks.toml), section B. Templates, grammars, JSON: what no other test shows.

Where the server decides, the backend is a scripted one; where text or engine decide, it is the product, with a tiny
model of random weights or with the demo model.
"""

from __future__ import annotations

import ast
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from faults import (
    CHAT,
    TOKENIZE,
    Asker,
    copied,
    every_body,
    generating,
    raw,
    refused,
)

import forebay

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize("path", [CHAT, TOKENIZE])
async def test_the_template_comes_from_the_model_only(small: Asker, path: str) -> None:
    for fields, param in (
        ({"chat_template": "{{ 1 }}"}, "chat_template"),
        ({"chat_template": ""}, "chat_template"),
        ({"chat_template": "default"}, "chat_template"),
        ({"chat_template_kwargs": {"enable_thinking": [1]}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"enable_thinking": "x" * 65}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": "x"}, "chat_template_kwargs"),
    ):
        await refused(small.http, path, raw(path, small.model, **fields), param)


RESERVED = ("messages", "tools", "add_generation_prompt", "bos_token", "raise_exception", "range", "self", "__class__")


@pytest.mark.parametrize("path", [CHAT, TOKENIZE])
async def test_variables_that_the_template_does_not_know_are_refused(small: Asker, path: str) -> None:
    for name in (*RESERVED, "no_such_switch", "m", "", "x" * 1000):
        sent = raw(path, small.model, chat_template_kwargs={name: True})
        await refused(small.http, path, sent, "chat_template_kwargs")


GRAMMARS: list[tuple[str, Any]] = [
    *(
        ("response_format", value)
        for value in (
            "json",
            [],
            {},
            {"type": "json"},
            {"type": None},
            {"type": "json_object"},
            {"type": "json_schema"},
            {"type": "json_schema", "json_schema": {"name": "x", "schema": {"$ref": "#"}}},
            {"type": "json_schema", "json_schema": {"schema": {"pattern": "(a+)+$"}}},
            {"type": "text", "extra": 1},
            {"type": "regex", "pattern": "("},
        )
    ),
    *(("guided_regex", value) for value in ("(a+)+$", "(", "[", "a{1,99999}{1,99999}", "x" * 100_000, 5, [])),
    *(("guided_grammar", value) for value in ("root ::= root", "::=", {}, 5)),
    *(("guided_json", value) for value in ("{", {"$ref": "#"}, {"type": "nothing"}, [1])),
    ("guided_choice", ["a", 5]),
    ("structured_outputs", {"regex": "(a+)+$"}),
    ("structured_outputs", {"grammar": "("}),
]
TOOLS: list[tuple[str, Any]] = [
    *(
        ("tools", value)
        for value in (
            [{}],
            [None],
            "x",
            {"a": 1},
            [{"type": "function", "function": {"name": "\0", "parameters": {"pattern": "(a+)+$"}}}],
            [{"type": "function"}] * 10_000,
        )
    ),
    *(("tool_choice", value) for value in ("required", "no_such", {}, 5, {"type": "function", "function": {}})),
    ("functions", [{"name": 5}]),
    ("function_call", {"name": "f"}),
    ("parallel_tool_calls", "yes"),
]


@generating
async def test_grammars_and_tools_are_refused_whatever_is_in_them(client: httpx.AsyncClient, path: str) -> None:
    for field, value in [*GRAMMARS, *(TOOLS if path == CHAT else [])]:
        begun = time.monotonic()
        await refused(client, path, raw(path, **{field: value}), field)
        assert time.monotonic() - begun < 1
    assert (await client.post(path, content=raw(path))).status_code == 200


def test_no_pattern_is_compiled_that_is_not_written_in_the_source() -> None:
    """A client's regular expression could take forever. (Special tokens are escaped text of the model's.)"""
    root = Path(forebay.__file__).parent
    takers = {"compile", "match", "fullmatch", "search", "sub", "subn", "split", "findall", "finditer"}
    found = []
    for room in ("server", "backends", "admission", "text"):
        for file in (root / room).rglob("*.py"):
            for node in ast.walk(ast.parse(file.read_text())):
                if (
                    isinstance(node, ast.Call)
                    and isinstance(node.func, ast.Attribute)
                    and ast.unparse(node.func.value) == "re"
                    and node.func.attr in takers
                    and not isinstance(node.args[0], ast.Constant)
                ):
                    found.append(file.name)
    assert set(found) <= {"specials.py"}


@every_body
async def test_bodies_nested_a_hundred_thousand_deep(client: httpx.AsyncClient, path: str) -> None:
    fields = (
        "messages",
        "prompt",
        "tokens",
        "stop",
        "metadata",
        "logit_bias",
        "stream_options",
        "chat_template_kwargs",
    )
    for field in (*fields, "unknown", "model"):
        # Deep enough to break the parser, or only what comes after it.
        for depth in (50, 500, *range(900, 1000, 9), 100_000):
            for left, right in (("[", "]"), ('{"a":', "}")):
                for close in (right * depth, ""):
                    value = left * depth + "1" * bool(close) + close
                    sent = raw(path)[:-1] + f',"{field}":{value}'.encode() + b"}" * bool(close)
                    response = await client.post(path, content=sent)
                    assert response.status_code == 400, (field, depth, response.text[:200])
                    assert len(response.content) < 1000
    assert (await client.post(path, content=raw(path))).status_code == 200


def start(folder: Path, log: Path, seconds: float) -> tuple[int | None, str]:
    """(exit code, output) of `forebay serve` on a model that should not get that far; None: it did, or hangs."""
    argv = [sys.executable, "-m", "forebay", "serve", str(folder), "--port", "0", "--kv-memory", "32MiB"]
    argv += ["--state-url", "off"]
    with log.open("wb") as out, subprocess.Popen(argv, stdout=out, stderr=subprocess.STDOUT) as process:
        end = time.monotonic() + seconds
        while process.poll() is None and time.monotonic() < end and "is ready" not in log.read_text():
            time.sleep(0.1)
        code = process.poll()
        children = psutil.Process(process.pid).children(recursive=True) if code is None else []
        for left in (*children, process):
            with suppress(psutil.NoSuchProcess):
                left.kill()
    return code, log.read_text()


@pytest.mark.parametrize(
    "template",
    [
        "{% if %}",
        "{{ lipsum.__globals__['os'].popen('id').read() }}",
        # No access to anything, but time without end.
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    ],
)
def test_a_model_with_a_hostile_template_is_not_loaded(tiny_folder: Path, tmp_path: Path, template: str) -> None:
    code, output = start(copied(tiny_folder, tmp_path / "hostile", template), tmp_path / "log", 60)
    assert code == 1, output[-500:]
    last = output.strip().splitlines()[-1]
    assert last.startswith("error: ")
    assert "chat template" in last
    assert "Traceback" not in output

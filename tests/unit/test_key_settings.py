"""The table [keys], `forebay key new`, `forebay config`, and the mode of the data folder."""

from __future__ import annotations

import hashlib
import json
import tomllib
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from forebay.catalog import cache_dir, fetch, resolve
from forebay.cli import main
from forebay.config import NAMES, SettingsError, load, load_with_origins

HASH = "ab" * 32


@pytest.fixture(autouse=True)
def _empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def run(*args: str, **env: str) -> str:
    result = CliRunner(env={"COLUMNS": "160", **env}).invoke(main, args)
    assert result.exit_code == 0, result.output
    return result.output


def test_a_new_key_is_shown_once_and_its_line_makes_it_known(tmp_path: Path) -> None:
    output = run("key", "new", "--tenant", "acme", "--name", "alice", "--class", "batch")
    (key,) = [line for line in output.splitlines() if line.startswith("fb-")]
    (line,) = [line for line in output.splitlines() if line.startswith("alice = ")]
    assert len(key) >= 40
    assert output.count(key) == 1
    assert key not in line
    (tmp_path / "forebay.toml").write_text(f"port = 1\n[keys]\n{line}\n")
    settings = load({}, {})
    alice = settings.keys["alice"]
    assert (alice.tenant, alice.service_class) == ("acme", "batch")
    assert alice.sha256 == hashlib.sha256(key.encode()).hexdigest()
    assert settings.needs_key
    assert key not in run("key", "new", "--tenant", "acme")


def test_the_name_and_the_class_have_defaults() -> None:
    line = next(line for line in run("key", "new", "--tenant", "acme").splitlines() if line.startswith("acme = "))
    assert tomllib.loads(line)["acme"].items() >= {"tenant": "acme", "class": "interactive"}.items()


@pytest.mark.parametrize("args", [["--tenant", "a b"], ["--tenant", "a", "--name", 'a"'], ["--tenant", ""]])
def test_a_name_that_no_file_could_hold_is_refused(args: list[str]) -> None:
    result = CliRunner().invoke(main, ["key", "new", *args])
    assert result.exit_code == 2
    assert "names and tenants are" in result.output
    assert "fb-" not in result.output


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (f'a = {{ sha256 = "{HASH}" }}', r"keys\.a\.tenant: Field required"),
        ('a = { tenant = "t" }', r"keys\.a\.sha256: Field required"),
        ('a = { sha256 = "my-secret", tenant = "t" }', r"keys\.a\.sha256: String should match"),
        (f'a = {{ sha256 = "{HASH.upper()}", tenant = "t" }}', "sha256: String should match"),
        (f'a = {{ sha256 = "{HASH}", tenant = "" }}', "tenant: String should match"),
        (f'a = {{ sha256 = "{HASH}", tenant = "t", class = "best" }}', "'interactive' or 'batch'"),
        (f'a = {{ sha256 = "{HASH}", tenant = "t", key = "my-secret" }}', "Extra inputs"),
        (f'"a b" = {{ sha256 = "{HASH}", tenant = "t" }}', "String should match"),
        ('a = "my-secret"', r"keys\.a: "),
        (f'a = {{ sha256 = "{HASH}", tenant = "t" }}\nb = {{ sha256 = "{HASH}", tenant = "u" }}', "same sha256"),
    ],
)
def test_a_table_that_is_wrong_is_told_with_its_place(tmp_path: Path, table: str, message: str) -> None:
    (tmp_path / "forebay.toml").write_text(f"[keys]\n{table}\n")
    with pytest.raises(SettingsError, match=message) as caught:
        load({}, {})
    assert str(caught.value).startswith("forebay.toml: keys")
    assert "my-secret" not in str(caught.value)


def test_keys_are_no_flag_and_no_variable() -> None:
    assert load({}, {}).keys == {}
    assert not load({}, {}).needs_key
    with pytest.raises(SettingsError, match="unknown setting"):
        load({}, {"FOREBAY_KEYS": "x"})


@pytest.mark.parametrize("key", [" secret", "secret\n", "\tsecret \r\n"])
def test_white_space_around_the_api_key_is_not_part_of_it(key: str) -> None:
    found = load({}, {"FOREBAY_API_KEY": key}).server.api_key
    assert found is not None
    assert found.get_secret_value() == "secret"


def test_an_api_key_of_white_space_is_none() -> None:
    with pytest.raises(SettingsError, match="api_key"):
        load({"api_key": " \n"}, {})


def test_config_tells_values_and_origins_and_hides_secrets(tmp_path: Path) -> None:
    (tmp_path / "forebay.toml").write_text(
        f'port = 1\nmax-batch = 7\nthreads = 3\n[keys]\nalice = {{ sha256 = "{HASH}", tenant = "acme" }}\n'
    )
    env = {"FOREBAY_API_KEY": "hunter2", "FOREBAY_THREADS": "4"}
    output = run("config", "some-model", "--port", "2", "--json", **env)
    told: dict[str, dict[str, Any]] = json.loads(output)
    assert told["port"] == {"value": 2, "origin": "flag --port"}
    assert told["model"] == {"value": "some-model", "origin": "flag --model"}
    assert told["threads"] == {"value": 4, "origin": "environment FOREBAY_THREADS"}
    assert told["max_batch"] == {"value": 7, "origin": "file forebay.toml"}
    assert told["max_queue"] == {"value": 0, "origin": "default"}
    assert told["api_key"] == {"value": "********", "origin": "environment FOREBAY_API_KEY"}
    assert told["keys.alice"]["value"] == {"tenant": "acme", "class": "interactive"}
    assert told["keys.alice"]["origin"] == "file forebay.toml"
    assert told.keys() == {*NAMES, "keys.alice"}

    table = run("config", "some-model", "--port", "2", **env)
    for line in (("port", "2", "flag --port"), ("threads", "4", "environment FOREBAY_THREADS"), ("host", "127.0.0.1")):
        assert any(all(word in row for word in line) for row in table.splitlines()), line
    for text in (output, table):
        assert "hunter2" not in text
        assert HASH not in text
    assert json.loads(run("config", "--json"))["api_key"] == {"value": None, "origin": "default"}


def test_the_named_file_is_the_origin(tmp_path: Path) -> None:
    file = tmp_path / "other.toml"
    file.write_text("port = 1\n")
    assert load_with_origins({}, {}, file)[1] == {"port": f"file {file}"}


def test_config_refuses_what_serve_would_refuse() -> None:
    result = CliRunner().invoke(main, ["config", "--port", "99999"])
    assert result.exit_code == 2
    assert "--port: port: " in result.output


def test_the_data_folder_is_for_its_owner_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> Any:
        raise OSError("no network here")

    monkeypatch.setattr(fetch, "_download", fails)
    data = tmp_path / "above" / "data"
    with pytest.raises(Exception, match="no network here"):
        fetch.pull("smollm2-135m-instruct", data)
    assert data.stat().st_mode & 0o777 == 0o700

    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"")
    kept = tmp_path / "kept"
    assert cache_dir(resolve(str(folder), kept)) is not None
    assert kept.stat().st_mode & 0o777 == 0o700

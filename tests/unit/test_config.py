"""Settings: where they come from, and what is said when one is wrong."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pydantic
import pytest

from forebay.config import NAMES, ROOMS, Settings, SettingsError, load, parse_size


@pytest.fixture(autouse=True)
def _empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def test_a_budget_under_the_batch_is_refused_with_both_numbers() -> None:
    with pytest.raises(SettingsError, match=r"token_budget \(512\) must be at least max_batch \(600\)"):
        load({"max_batch": "600"}, {})


def test_flag_beats_environment_beats_file_beats_default(tmp_path: Path) -> None:
    file = write(tmp_path / "f.toml", "port = 1\nmax_batch = 1\nthreads = 1\n")
    environ = {"FOREBAY_PORT": "2", "FOREBAY_MAX_BATCH": "2"}
    settings = load({"port": "3", "max_batch": None}, environ, file)
    assert (settings.server.port, settings.engine.max_batch, settings.engine.threads) == (3, 2, 1)
    assert settings.engine.token_budget == Settings().engine.token_budget


def test_forebay_toml_of_the_current_folder_is_read(tmp_path: Path) -> None:
    write(tmp_path / "forebay.toml", "port = 1234")
    assert load({}, {}).server.port == 1234
    assert load({}, {}, write(tmp_path / "other.toml", "")).server.port == 8000


@pytest.mark.parametrize("key", ["max_batch", "max-batch"])
def test_a_key_may_be_spelled_as_the_flag_is(tmp_path: Path, key: str) -> None:
    assert load({}, {}, write(tmp_path / "f.toml", f"{key} = 3")).engine.max_batch == 3


@pytest.mark.parametrize("origin", ["file", "environment", "flag"])
def test_an_unknown_key_is_an_error_that_suggests_the_nearest(tmp_path: Path, origin: str) -> None:
    file = write(tmp_path / "f.toml", "max_bach = 3" if origin == "file" else "")
    environ = {"FOREBAY_MAX_BACH": "3"} if origin == "environment" else {}
    flags = {"max_bach": "3"} if origin == "flag" else {}
    with pytest.raises(SettingsError, match="did you mean 'max-batch'") as caught:
        load(flags, environ, file)
    assert caught.value.param == "max_bach"


def test_a_key_that_resembles_nothing_gets_no_suggestion() -> None:
    with pytest.raises(SettingsError) as caught:
        load({}, {"FOREBAY_XYZZY": "1"})
    assert str(caught.value) == "unknown setting 'xyzzy' in the environment"


def test_other_variables_and_reserved_ones_are_left_alone() -> None:
    assert load({}, {"PORT": "1", "FOREBAY_CONFIG": "x"}) == Settings()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"port": "70000"}, "--port: port: Input should be less than or equal to 65535"),
        ({"max_batch": "0"}, "--max-batch: max_batch: .* greater than or equal to 1"),
        ({"max_batch": "many"}, "valid integer"),
        ({"dtype": "int3"}, "'auto', 'float32', 'bfloat16' or 'float16'"),
        ({"queue_timeout": "nan"}, "finite number"),
        ({"queue_timeout": "inf"}, "finite number"),
        ({"kv_memory": "lots"}, "bytes like 2GiB or a fraction like 0.25"),
        ({"max_body": "25%"}, "valid integer"),
        ({"api_key": ""}, "at least 1"),
    ],
)
def test_a_value_out_of_range_says_where_it_came_from_and_what_is_right(flags: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingsError, match=message) as caught:
        load(flags, {})
    assert caught.value.param == next(iter(flags))


def test_the_variable_at_fault_is_named() -> None:
    with pytest.raises(SettingsError, match=r"^FOREBAY_PORT: port: "):
        load({}, {"FOREBAY_PORT": "tcp://10.0.0.1:80"})


def test_an_error_never_repeats_the_api_key(tmp_path: Path) -> None:
    with pytest.raises(SettingsError) as caught:
        load({}, {}, write(tmp_path / "f.toml", "api_key = 987654321"))
    assert "987654321" not in str(caught.value)
    assert "hunter2" not in repr(load({"api_key": "hunter2"}, {}))


@pytest.mark.parametrize("content", [None, b"port =", b"\xff\xfe", b"[server]\nport = 1"])
def test_a_file_that_cannot_be_read_is_an_error(tmp_path: Path, content: bytes | None) -> None:
    file = tmp_path / "f.toml"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(SettingsError, match=r"f\.toml"):
        load({}, {}, file)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        (1, 1),
        ("1", 1),
        ("2147483648", 2**31),
        ("2GiB", 2**31),
        ("2 gib", 2**31),
        ("1.5Gi", 3 * 2**29),
        ("500MB", 500_000_000),
        ("4k", 4000),
        ("7B", 7),
        (0.25, 0.25),
        ("0.25", 0.25),
        (".5", 0.5),
        ("25%", 0.25),
        ("12.5 %", 0.125),
        ("100%", 1.0),
    ],
)
def test_sizes(text: object, size: float) -> None:
    parsed = parse_size(text)
    assert parsed == size
    assert type(parsed) is type(size)


@pytest.mark.parametrize("text", [True, "", "GiB", "-1", "1.5", 2.5, "101%", "2 gallons", "0x10", "1e9"])
def test_what_is_no_size(text: object) -> None:
    with pytest.raises(ValueError, match="fraction like"):
        parse_size(text)


@pytest.mark.parametrize("text", ["0", "0%", "0.0"])
def test_no_memory_at_all_is_refused(text: str) -> None:
    with pytest.raises(SettingsError, match="greater than 0"):
        load({"kv_memory": text}, {})


def test_settings_cannot_be_changed() -> None:
    with pytest.raises(pydantic.ValidationError, match="frozen"):
        Settings().server.port = 1  # type: ignore[misc]


def test_names_are_unique_over_all_rooms_and_described() -> None:
    fields = [(name, field) for room in ROOMS.values() for name, field in room.model_fields.items()]
    assert len(fields) == len(NAMES)
    assert all(field.description for _, field in fields)


def test_the_queue_follows_the_batch_unless_set() -> None:
    assert load({"max_batch": "8"}, {}).max_queue == 40
    assert load({"max_batch": "8", "max_queue": "7"}, {}).max_queue == 7


def test_the_data_folder_follows_the_environment(tmp_path: Path) -> None:
    ask = "from forebay.config import load; print(load({}, {}).paths.data_dir)"
    environ = {**os.environ, "HOME": str(tmp_path)}
    environ.pop("XDG_CACHE_HOME", None)
    for extra, folder in (({}, ".cache/forebay"), ({"XDG_CACHE_HOME": str(tmp_path / "x")}, "x/forebay")):
        answer = subprocess.check_output([sys.executable, "-c", ask], env={**environ, **extra}, text=True)
        assert answer.strip() == str(tmp_path / folder)
    assert load({"data_dir": "~/models"}, {}).paths.data_dir == Path.home() / "models"

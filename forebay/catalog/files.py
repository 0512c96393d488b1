"""Where a model's files are, how a GGUF file is opened, and a fingerprint of them."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from ..contract import NotFound, Unsupported
from .names import CATALOG, unknown_model

if TYPE_CHECKING:
    from gguf import GGUFReader

# Bytes of a weight file that are hashed: at its start, at its end, and in blocks evenly spaced over it.
_GGUF_HEAD = 16 << 20  # room for all metadata: that of 49k tokens with their merges takes 1.8 MB
_HEAD = _TAIL = 1 << 20
_BLOCKS, _BLOCK = 256, 4096


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """A model on disk: ``path`` is the .gguf file or the Hugging Face directory; ``id`` is what clients call it.

    ``cache`` is this model's folder for derived things (``cache.py``), named after the fingerprint that the files had
    when they were found; it need not exist. None: nothing is kept.
    """

    id: str
    kind: Literal["gguf", "hf"]
    path: Path
    cache: Path | None = field(default=None, compare=False)


def resolve(model: str, data_dir: Path) -> ModelFiles:
    """Find a catalog name (already pulled), a ``.gguf`` file, or a directory with config.json and *.safetensors.

    Reads as much as ``fingerprint`` does, which names the model's folder in the cache of ``data_dir``. Raises NotFound
    when it is not there, Unsupported when it is of a kind that is refused or cannot be read.
    """
    files = _find(model, data_dir)
    return replace(files, cache=data_dir / "cache" / fingerprint(files))


def _find(model: str, data_dir: Path) -> ModelFiles:
    if entry := CATALOG.get(model):
        path = entry.path(model, data_dir)
        if not path.is_file() or path.stat().st_size != entry.size:
            raise NotFound(f"model {model!r} is not on this machine yet; fetch it with: forebay pull {model}")
        return ModelFiles(model, "gguf", path)
    path = Path(model).expanduser()
    if path.is_dir():
        _check_directory(path)
        return ModelFiles(path.resolve().name, "hf", path)
    if path.suffix.lower() == ".gguf":
        if not path.is_file():
            raise NotFound(f"there is no file {model}", param="model")
        return ModelFiles(path.stem, "gguf", path)
    if path.is_file():
        raise Unsupported(f"{model} is neither a .gguf file nor a Hugging Face directory", param="model")
    raise unknown_model(model)


def _check_directory(path: Path) -> None:
    if not (path / "config.json").is_file():
        raise Unsupported(f"{path} has no config.json: not a Hugging Face model directory", param="model")
    if any(path.glob("*.safetensors")):
        return
    pickles = sorted(file.name for file in path.iterdir() if file.suffix in {".bin", ".pt", ".pth", ".pkl", ".ckpt"})
    if pickles:
        raise Unsupported(
            f"{path} has its weights as {pickles[0]}: pickled weights can run code and are refused; "
            "convert them to safetensors",
            param="model",
        )
    raise Unsupported(f"{path} has no *.safetensors weights", param="model")


@lru_cache(maxsize=1)
def open_gguf(path: Path) -> GGUFReader:
    """Parse a GGUF file. Cached, because a vocabulary of 49k tokens takes seconds. Raises Unsupported."""
    from gguf import GGUFReader  # noqa: PLC0415 - only when it is used: it costs start-up time

    try:
        return GGUFReader(path)
    except OSError as error:
        raise Unsupported(f"cannot read {path}: {error}") from error
    except (ValueError, KeyError, IndexError, TypeError, OverflowError, MemoryError) as error:
        raise Unsupported(f"{path} is not a whole GGUF file: {error}") from error


def fingerprint(files: ModelFiles) -> str:
    """SHA-256 (hex) over a model's metadata and samples of its weights; tens of milliseconds, whatever its size.

    Whole: the .json and .jinja files of a directory, the size of each weight file, and of a GGUF file the first 16
    MiB, where its metadata is. Of the weights: the first MiB (or what those 16 hold of them), the last, and 256 blocks
    of 4 KiB in between, because tunes of one model can have equal sizes, embeddings and ends. It tells models apart.
    It is no proof of integrity: a change between the blocks that keeps the size goes unseen.
    """
    digest = hashlib.sha256()

    def add(data: bytes) -> None:
        digest.update(len(data).to_bytes(8, "little"))
        digest.update(data)

    try:
        if files.kind == "gguf":
            weights, head = [files.path], _GGUF_HEAD
        else:
            weights, head = sorted(files.path.glob("*.safetensors")), _HEAD
            for path in sorted([*files.path.glob("*.json"), *files.path.glob("*.jinja")]):
                add(path.name.encode())
                add(path.read_bytes())
        for path in weights:
            with path.open("rb") as file:
                size = file.seek(0, os.SEEK_END)
                add(size.to_bytes(8, "little"))
                blocks = [(size * n // _BLOCKS, _BLOCK) for n in range(1, _BLOCKS)]
                for start, length in [(0, head), *blocks, (max(0, size - _TAIL), _TAIL)]:
                    file.seek(start)
                    add(file.read(length))
    except OSError as error:
        raise Unsupported(f"cannot read {files.path}: {error}") from error
    return digest.hexdigest()

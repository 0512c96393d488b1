"""Where a model's files are, how a GGUF file is opened, and a fingerprint of them."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from ..contract import NotFound, Unsupported
from .names import CATALOG, unknown_model

if TYPE_CHECKING:
    from gguf import GGUFReader

_EDGE = 1 << 20  # bytes hashed at each end of a weight file


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """A model on disk: ``path`` is the .gguf file or the Hugging Face directory; ``id`` is what clients call it."""

    id: str
    kind: Literal["gguf", "hf"]
    path: Path


def resolve(model: str, data_dir: Path) -> ModelFiles:
    """Find a catalog name (already pulled), a ``.gguf`` file, or a directory with config.json and *.safetensors.

    Reads no weights. Raises NotFound when it is not there, Unsupported when it is of a kind that is refused.
    """
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
    """SHA-256 (hex) over the sizes and the first and last MiB of each weight file, and all metadata bytes.

    It tells models apart without reading gigabytes. It is no proof of integrity: a change in the middle of a weight
    file that keeps its size goes unseen.
    """
    digest = hashlib.sha256()

    def add(data: bytes) -> None:
        digest.update(len(data).to_bytes(8, "little") + data)

    try:
        if files.kind == "gguf":
            weights, head = [files.path], max(_EDGE, open_gguf(files.path).data_offset)  # metadata comes first
        else:
            weights, head = sorted(files.path.glob("*.safetensors")), _EDGE
            for path in sorted([*files.path.glob("*.json"), *files.path.glob("*.jinja")]):
                add(path.name.encode())
                add(path.read_bytes())
        for path in weights:
            size = path.stat().st_size
            with path.open("rb") as file:
                add(size.to_bytes(8, "little"))
                add(file.read(int(head)))
                file.seek(max(0, size - _EDGE))
                add(file.read(_EDGE))
    except OSError as error:
        raise Unsupported(f"cannot read {files.path}: {error}") from error
    return digest.hexdigest()

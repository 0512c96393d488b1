"""Things derived from a model's files, kept on disk so that the next start need not derive them again.

``<data_dir>/cache/<fingerprint>/`` belongs to one model, under whatever name; a changed file has another folder. What
is in it is data and is read as data. An entry that is damaged, foreign or of other code counts as not there and is
made anew; a folder that cannot be written costs time, never a start.
"""

from __future__ import annotations

import hashlib
import logging
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TypeVar

from .. import __version__
from ..contract import Unsupported
from .files import ModelFiles, fingerprint

log = logging.getLogger(__name__)

T = TypeVar("T")


def code_version(*sources: str, also: str = "") -> str:
    """The version of what the modules at ``sources`` (their ``__file__``) derive, with a library's in ``also``: it
    changes with their text, because a number to count up would be forgotten, and old entries then be served."""
    digest = hashlib.sha256(also.encode())
    for source in sources:
        if Path(source).is_file():  # a build without sources has its release's version alone
            digest.update(Path(source).read_bytes())
    return f"{__version__}+{digest.hexdigest()[:16]}"


def cached(
    files: ModelFiles,
    name: str,
    version: str,
    make: Callable[[], T],
    *,
    write: Callable[[T], bytes],
    read: Callable[[bytes], T],
) -> T:
    """What ``make`` gives for ``files``, from the entry ``name`` where that is whole and of this ``version``.

    Else it is made, and kept as ``write`` spells it if that is possible. ``read`` may raise for bytes it does not
    like. Raises what ``make`` raises.
    """
    if files.cache is None:
        return make()
    try:
        data = (files.cache / name).read_bytes()
        head, _, payload = data.partition(b"\n")
        if head == _head(version, payload):
            return read(payload)
        log.debug("%s is damaged or of another version", files.cache / name)
    except FileNotFoundError:
        pass
    except Exception as error:  # whatever is wrong with it, the model's files are there
        log.debug("%s is of no use: %s", files.cache / name, error)
    value = make()
    if folder := cache_dir(files):
        try:
            payload = write(value)
            with replacing(folder / name) as file:
                file.write(_head(version, payload) + b"\n" + payload)
        except (OSError, ValueError, RecursionError) as error:
            log.info("cannot keep %s: %s", folder / name, error)
    return value


def cache_dir(files: ModelFiles) -> Path | None:
    """The model's folder in the cache, made (mode 0700) to write into; to look for an entry, ``files.cache`` is enough.

    None if there is none: no data folder is known, it cannot be made, or the files are no longer the ones that it is
    named after, because they were replaced while the server ran. Hashes as much as ``fingerprint`` does.
    """
    if files.cache is None:
        return None
    try:
        if fingerprint(files) != files.cache.name:
            log.info("%s has changed since the start: nothing of it is kept", files.path)
            return None
        root = files.cache.parent
        root.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        for folder in (root, files.cache):
            folder.mkdir(mode=0o700, exist_ok=True)
    except (OSError, Unsupported) as error:
        log.info("cannot keep anything in %s: %s", files.cache, error)
        return None
    return files.cache


@contextmanager
def replacing(path: Path) -> Iterator[IO[bytes]]:
    """A file to write that appears under ``path``, synced, when the block ends, and not at all if it raises.

    Raises OSError. What was there stays whole for those who have it open or mapped.
    """
    handle, part = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())  # else a power cut may leave the name on a file of zeros
        os.replace(part, path)  # noqa: PTH105  (the name says that it is the atomic one)
    except BaseException:
        Path(part).unlink(missing_ok=True)
        raise


def _head(version: str, payload: bytes) -> bytes:
    return f"forebay-cache {version} {hashlib.sha256(payload).hexdigest()}".encode()

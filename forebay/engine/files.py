"""The disk tier: one file per page of K and V, found again after a restart.

A file has a head (what it is, of which model and in which layout, its key, the key of the page before, its tokens), the
SHA-256 of all the rest, and the page's bytes. Nothing of it is believed before that hash and all of the head were
compared; what is wrong is a miss, and goes. Its time of modification is when it expires.
"""

from __future__ import annotations

import hashlib
import logging
import os
import struct
import threading
import time
from array import array
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from .kv.tiers import Block, loose_end

log = logging.getLogger(__name__)

Bytes = npt.NDArray[np.uint8]

_MAGIC = b"forebay kv 1\0\0\0\0"
# magic, fingerprint, key, parent, number of tokens
_HEAD = struct.Struct("<16s32s32s32sI")
_SUFFIX = ".kv"


class _Entry(NamedTuple):
    expires: float
    size: int
    parent: bytes


class PageFiles:
    """Pages in ``folder``, of ``page_bytes`` each, no more than ``quota`` bytes of files. ``fingerprint`` (32 bytes) is
    that of everything the bytes of a page depend on; ``clock`` gives seconds since 1970. Several threads may use it."""

    def __init__(
        self,
        folder: Path,
        fingerprint: bytes,
        page_bytes: int,
        quota: int,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Looks for what an earlier process left. Raises OSError if the folder cannot be used."""
        self._folder = folder
        self._fingerprint = fingerprint
        self._page_bytes = page_bytes
        self._quota = quota
        self._clock = clock
        self._lock = threading.Lock()
        self._writes = True  # the last write went well; the first of many that do not is logged
        self._entries: dict[bytes, _Entry] = {}  # what expires first comes first, as far as that is known
        self.bytes = 0
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = []
        for path in folder.iterdir():
            seen = self._look(path)
            if seen is not None:
                found.append(seen)
            elif not self._being_written(path):
                _unlink(path)
        for key, entry in sorted(found, key=lambda item: item[1].expires):
            self._add(key, entry)

    def __contains__(self, key: bytes) -> bool:
        return key in self._entries

    def extend(self, key: bytes, ttl: float) -> bool:
        """Whether it is here; then it stays for ``ttl`` more seconds, or longer. Touches no disk: see ``stamp``."""
        with self._lock:
            entry = self._entries.pop(key, None)
            if entry is None:
                return False
            self._entries[key] = entry._replace(expires=max(entry.expires, self._clock() + ttl))
        return True

    def stamp(self, keys: Iterable[bytes]) -> None:
        """Have the files tell what ``extend`` has said of them."""
        for key in keys:
            if (entry := self._entries.get(key)) is not None:
                try:
                    os.utime(self._path(key), (entry.expires, entry.expires))
                except OSError:
                    self.remove([key])

    def read(self, block: Block) -> Bytes | None:
        """The page's bytes. None if they are not here, or are not what was written for these tokens."""
        try:
            data = np.fromfile(self._path(block.key), dtype=np.uint8)
        except OSError:
            self.remove([block.key])
            return None
        head = self._head(block)
        body = len(head) + 32
        if (
            len(data) != body + self._page_bytes
            or data[: len(head)].tobytes() != head
            or data[len(head) : body].tobytes() != _digest(head, data[body:])
        ):
            log.warning("%s is damaged or of something else; it goes", self._path(block.key))
            self.remove([block.key])
            return None
        return data[body:]

    def write(self, block: Block, page: Bytes, ttl: float) -> bool:
        """Whether it was written. The oldest files make room for it."""
        head = self._head(block)
        size = len(head) + 32 + len(page)
        expires = self._clock() + ttl
        path = self._path(block.key)
        fresh = path.with_suffix(f".{os.getpid()}.{threading.get_ident()}.new")
        try:
            self._make_room(size)
            with fresh.open("xb", buffering=0) as file:
                file.write(head + _digest(head, page))
                file.write(page.data)
            os.utime(fresh, (expires, expires))
            fresh.replace(path)
        except OSError as error:
            if self._writes:
                log.warning("the KV cache on disk cannot be written: %s", error)
            self._writes = False
            _unlink(fresh)
            return False
        self._writes = True
        with self._lock:
            self._drop(block.key)
            self._add(block.key, _Entry(expires, size, block.parent))
        return True

    def remove(self, keys: Iterable[bytes]) -> None:
        for key in keys:
            with self._lock:
                self._drop(key)
            _unlink(self._path(key))

    def remove_chain(self, blocks: Sequence[Block]) -> None:
        """From the end of these pages on, up to the first that another page stands behind."""
        with self._lock:
            parents = {key: entry.parent for key, entry in self._entries.items()}
        self.remove(loose_end(blocks, parents))

    def expire(self) -> None:
        """Remove what nobody may ask for any more."""
        now = self._clock()
        with self._lock:
            over = [(key, entry) for key, entry in self._entries.items() if entry.expires <= now]
        for key, entry in over:
            try:
                expires = self._path(key).stat().st_mtime
            except OSError:
                expires = 0.0
            if expires > now:  # another server has use for it
                self._entries[key] = entry._replace(expires=expires)
            else:
                self.remove([key])

    def _make_room(self, size: int) -> None:
        while self.bytes + size > self._quota and self._entries:
            with self._lock:
                oldest = next(iter(self._entries), None)
            if oldest is not None:
                self.remove([oldest])

    def _add(self, key: bytes, entry: _Entry) -> None:
        self._entries[key] = entry
        self.bytes += entry.size

    def _drop(self, key: bytes) -> None:
        entry = self._entries.pop(key, None)
        if entry is not None:
            self.bytes -= entry.size

    def _path(self, key: bytes) -> Path:
        return self._folder / (key.hex() + _SUFFIX)

    def _head(self, block: Block) -> bytes:
        head = _HEAD.pack(_MAGIC, self._fingerprint, block.key, block.parent, len(block.ids))
        return head + array("q", block.ids).tobytes()

    def _look(self, path: Path) -> tuple[bytes, _Entry] | None:
        """What a file of an earlier process seems to be. Its bytes are looked at when they are read."""
        try:
            info = path.stat()
            with path.open("rb") as file:
                magic, fingerprint, key, parent, _ = _HEAD.unpack(file.read(_HEAD.size))
        except (OSError, struct.error):
            return None
        own = magic == _MAGIC and fingerprint == self._fingerprint and path == self._path(key)
        if not own or info.st_mtime <= self._clock():
            return None
        return key, _Entry(info.st_mtime, info.st_size, parent)

    def _being_written(self, path: Path) -> bool:
        """By another server on the folder."""
        try:
            return path.suffix == ".new" and path.stat().st_mtime > self._clock() - 60
        except OSError:
            return False


def _unlink(path: Path) -> None:
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        log.debug("%s stays: %s", path, error)


def _digest(head: bytes, page: Bytes) -> bytes:
    digest = hashlib.sha256(head)
    digest.update(page.data)
    return digest.digest()


def sweep(cache: Path, keep: Path) -> None:
    """Remove what has expired of other models and layouts: of ``<model>/kv-*`` in ``cache``, all but ``keep``."""
    for folder in cache.glob("*/kv-*"):
        if folder == keep or not folder.is_dir():
            continue
        for path in folder.glob("*" + _SUFFIX):
            try:
                if path.stat().st_mtime <= time.time():
                    path.unlink()
            except OSError:  # another server was faster
                continue

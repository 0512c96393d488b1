"""A secret of this server's own, the same after a restart."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
from pathlib import Path

log = logging.getLogger(__name__)

_SIZE = 32


def server_secret(data_dir: Path) -> bytes:
    """From ``secret`` in the data folder, made where there is none. Where that cannot be, one for this process: then
    nothing that was kept under another is found again."""
    path = data_dir / "secret"
    try:
        if not path.exists():
            _make(path)
        known = path.read_bytes()
        if len(known) == _SIZE:
            return known
        log.warning("%s is damaged: nothing that was kept on disk is found", path)
    except OSError as error:
        log.warning("no secret can be kept in %s: %s", data_dir, error)
    return secrets.token_bytes(_SIZE)


def _make(path: Path) -> None:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    fresh = path.with_suffix(f".{secrets.token_hex(8)}.new")
    try:
        with open(fresh, "xb", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
            file.write(secrets.token_bytes(_SIZE))
        with contextlib.suppress(FileExistsError):
            os.link(fresh, path)  # unlike a rename, this never replaces what another process has just made
    finally:
        fresh.unlink(missing_ok=True)

"""Converted weights on disk: one safetensors file, mapped when it is read, so that a second start converts nothing."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from ...catalog import code_version
from . import quant, sources
from .quant import Packed

log = logging.getLogger(__name__)

#: Of what the file holds: one that other code has written is not read.
VERSION = code_version(__file__, quant.__file__, sources.__file__, str(Path(__file__).with_name("weights.py")))

Kept = tuple[dict[str, Packed], dict[str, torch.Tensor]]


def save(path: Path, packed: dict[str, Packed], norms: dict[str, torch.Tensor]) -> bool:
    """Write both under ``path``, synced, whole or not at all. False where that is not possible."""
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    tensors = {f"packed.{name}": weight.data for name, weight in packed.items()}
    tensors |= {f"norm.{name}": value.contiguous() for name, value in norms.items()}
    about = {f"packed.{name}": f"{weight.bits} {weight.n} {weight.k}" for name, weight in packed.items()}
    try:
        save_file(tensors, part, metadata={**about, "version": VERSION})
        with part.open("rb") as file:
            os.fsync(file.fileno())  # else a power cut may leave the name on a file of zeros
        part.replace(path)
    except (OSError, SafetensorError) as error:
        log.info("converted weights are not kept: %s", error)
        part.unlink(missing_ok=True)
        return False
    return True


def load(path: Path) -> Kept | None:
    """What ``save`` wrote, mapped; None where there is nothing, or nothing that can be used."""
    try:
        with safe_open(path, framework="pt") as file:
            about = file.metadata() or {}
            if about.get("version") != VERSION:
                return None
            packed, norms = {}, {}
            for key in file.keys():  # noqa: SIM118 - it is no dict
                kind, name = key.split(".", 1)
                if kind == "packed":
                    bits, n, k = map(int, about[key].split())
                    packed[name] = Packed(file.get_tensor(key), bits, n, k)
                else:
                    norms[name] = file.get_tensor(key)
    except (OSError, SafetensorError, KeyError, ValueError):
        return None
    return packed, norms

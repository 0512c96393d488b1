"""The compiled kernels (kernels.c), where there are any: an install without a compiler has none, and torch serves.

They are called through ctypes with raw pointers and run on the OpenMP team that torch has loaded: a second pool of
threads would spin against it.
"""

from __future__ import annotations

import ctypes
import importlib.util
from ctypes import POINTER, c_float, c_int32, c_int64, c_longlong, c_uint, c_void_p
from functools import cache
from pathlib import Path

import torch

#: What kernels.c calls the dtypes.
TYPES = {torch.float32: 0, torch.bfloat16: 1}
MAX_DIM = 256
MAX_ROWS = 64


class AttendJob(ctypes.Structure):
    """attend_job of kernels.c, field by field."""

    _fields_ = (
        ("q", c_void_p),
        ("out", c_void_p),
        ("pool", c_void_p),
        ("tables", c_void_p),
        ("positions", c_void_p),
        ("units", c_void_p),
        ("n_units", c_int64),
        ("table_width", c_int64),
        ("q_stride", c_int64),
        ("layer", c_int32),
        ("n_layers", c_int32),
        ("heads", c_int32),
        ("kv_heads", c_int32),
        ("dim", c_int32),
        ("type", c_int32),
        ("scale", c_float),
        ("next", c_longlong),
    )


class WriteJob(ctypes.Structure):
    """write_job of kernels.c, field by field."""

    _fields_ = (
        ("kv", c_void_p),
        ("pool", c_void_p),
        ("page", c_void_p),
        ("offset", c_void_p),
        ("rows", c_int64),
        ("kv_stride", c_int64),
        ("layer", c_int32),
        ("n_layers", c_int32),
        ("kv_heads", c_int32),
        ("dim", c_int32),
        ("type", c_int32),
    )


@cache
def library() -> ctypes.CDLL | None:
    """The loaded kernels, or None where they were not built."""
    spec = importlib.util.find_spec("forebay.engine.kernels._native")
    if spec is None or spec.origin is None:
        return None
    try:
        lib = ctypes.CDLL(spec.origin)
    except OSError:
        return None
    lib.forebay_attend.argtypes = [POINTER(AttendJob)]
    lib.forebay_attend.restype = None
    lib.forebay_write.argtypes = [POINTER(WriteJob)]
    lib.forebay_write.restype = None
    lib.forebay_init.argtypes = [c_void_p, c_uint]
    lib.forebay_init.restype = None
    return lib


def use_threads(n: int) -> None:
    """Let the kernels run on ``n`` threads of torch's team; on one where its runtime cannot be found."""
    if lib := library():
        lib.forebay_init(_gomp_parallel(), n)


def _gomp_parallel() -> int | None:
    """Address of GOMP_parallel in the OpenMP runtime that this process has loaded (libgomp, or LLVM's, which has
    the same entry)."""
    try:
        maps = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return None
    for path in {line.split(maxsplit=5)[-1] for line in maps if "/" in line}:
        if Path(path).name.startswith(("libgomp", "libomp", "libiomp")):
            entry = getattr(ctypes.CDLL(path), "GOMP_parallel", None)
            if entry is not None:
                return ctypes.cast(entry, c_void_p).value
    return None

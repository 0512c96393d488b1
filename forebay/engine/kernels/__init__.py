"""The compiled kernels (*.c), where there are any: an install without a compiler has none, and torch serves.

They are called through ctypes with raw pointers and run on the OpenMP team that torch has loaded: a second pool of
threads would spin against it.
"""

from __future__ import annotations

import ctypes
import importlib.util
from ctypes import POINTER, c_float, c_int, c_int32, c_int64, c_longlong, c_uint, c_void_p
from functools import cache
from pathlib import Path

import torch

#: What the kernels call the dtypes of a KV pool; of what goes in and out, the first two.
TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.int8: 2}
MAX_DIM = 256
MAX_ROWS = 64
#: Tokens of a page chain that are attended as one; a row's splits can be computed apart.
SPLIT = 256
#: Widest row that an operation of a program takes.
MAX_WIDTH = 1 << 16

#: Instruction sets of the linear layers.
LEVELS = {0: "portable", 1: "avx2", 2: "vnni"}

_NAMES = ("embed", "norm", "quantize", "silu", "gelu_tanh", "add_norm", "linear", "heads", "attend", "merge")
#: Operations of a program, by name.
OPS = {name: i for i, name in enumerate(_NAMES)}


class AttendJob(ctypes.Structure):
    """attend_job of common.h, field by field."""

    _fields_ = (
        ("q", c_void_p),
        ("out", c_void_p),
        ("pool", c_void_p),
        ("tables", c_void_p),
        ("positions", c_void_p),
        ("units", c_void_p),
        ("merges", c_void_p),
        ("windows", c_void_p),
        ("parts", c_void_p),
        ("n_units", c_int64),
        ("n_merges", c_int64),
        ("table_width", c_int64),
        ("q_stride", c_int64),
        ("layer", c_int32),
        ("n_layers", c_int32),
        ("heads", c_int32),
        ("kv_heads", c_int32),
        ("dim", c_int32),
        ("type", c_int32),
        ("io", c_int32),
        ("scale", c_float),
        ("next", c_longlong),
    )


class WriteJob(ctypes.Structure):
    """write_job of common.h, field by field."""

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
        ("io", c_int32),
    )


class Acts(ctypes.Structure):
    """acts of common.h: activations in 8 bits."""

    _fields_ = (("q", c_void_p), ("scale", c_void_p), ("sum", c_void_p), ("zero", c_void_p))


class Op(ctypes.Structure):
    """op of program.c, field by field."""

    _fields_ = (
        ("kind", c_int32),
        ("layer", c_int32),
        ("bits", c_int32),
        ("add", c_int32),
        ("sampled", c_int32),
        ("factor", c_float),
        ("n", c_int64),
        ("k", c_int64),
        ("weight", c_void_p),
        ("input", c_void_p),
        ("out", c_void_p),
        ("in_width", c_int64),
        ("out_width", c_int64),
        ("bias", c_void_p),
        ("q_norm", c_void_p),
        ("k_norm", c_void_p),
        ("cos", c_void_p),
        ("sin", c_void_p),
    )


class Program(ctypes.Structure):
    """program of program.c, field by field."""

    _fields_ = (
        ("ops", c_void_p),
        ("next", c_void_p),
        ("done", c_void_p),
        ("attend", POINTER(AttendJob)),
        ("write", POINTER(WriteJob)),
        ("x", Acts),
        ("ids", c_void_p),
        ("positions", c_void_p),
        ("sample_rows", c_void_p),
        ("n_ops", c_int64),
        ("rows", c_int64),
        ("n_samples", c_int64),
        ("eps", c_float),
    )


class SampleJob(ctypes.Structure):
    """sample_job of sample.c, field by field."""

    _fields_ = (
        ("logits", c_void_p),
        ("temperature", c_void_p),
        ("top_p", c_void_p),
        ("min_p", c_void_p),
        ("top_k", c_void_p),
        ("draw", c_void_p),
        ("banned", c_void_p),
        ("banned_from", c_void_p),
        ("tokens", c_void_p),
        ("order", c_void_p),
        ("rows", c_int64),
        ("vocab", c_int64),
        ("width", c_int64),
        ("next", c_longlong),
    )


class LinearJob(ctypes.Structure):
    """linear_job of program.c, field by field."""

    _fields_ = (
        ("weight", c_void_p),
        ("x", Acts),
        ("input", c_void_p),
        ("out", c_void_p),
        ("rows", c_int64),
        ("n", c_int64),
        ("k", c_int64),
        ("outputs", c_int64),
        ("bits", c_int32),
        ("add", c_int32),
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
    lib.forebay_run.argtypes = [POINTER(Program)]
    lib.forebay_run.restype = None
    lib.forebay_sample.argtypes = [POINTER(SampleJob)]
    lib.forebay_sample.restype = None
    lib.forebay_linear.argtypes = [POINTER(LinearJob)]
    lib.forebay_linear.restype = None
    lib.forebay_level.argtypes = [c_int]
    lib.forebay_level.restype = c_int
    lib.forebay_level(max(LEVELS))
    return lib


def level() -> str:
    """What the linear layers run on here: ``"vnni"``, ``"avx2"``, ``"portable"``, or ``"none"`` without kernels."""
    lib = library()
    return LEVELS[lib.forebay_level(max(LEVELS))] if lib else "none"


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

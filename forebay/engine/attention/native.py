"""Attention with the compiled kernels: pages are read where they lie, and nothing is gathered or padded."""

from __future__ import annotations

import ctypes

import numpy as np
import torch

from .. import kernels
from ..batch import Batch
from .base import KVShape

#: Query rows of one head group that are computed together: enough to reuse each K and V that was read.
_TILE = 24


class NativeAttention:
    """float32 and bfloat16 on CPU. See ``usable``."""

    def __init__(self, pool: torch.Tensor, shape: KVShape, n_heads: int) -> None:
        lib = kernels.library()
        if lib is None:
            raise RuntimeError("the kernels were not built")
        self._lib = lib
        self._group = n_heads // shape.n_kv_heads
        common = {
            "pool": pool.data_ptr(),
            "n_layers": shape.n_layers,
            "kv_heads": shape.n_kv_heads,
            "dim": shape.head_dim,
            "type": kernels.TYPES[pool.dtype],
        }
        self._attend = kernels.AttendJob(heads=n_heads, scale=shape.head_dim**-0.5, **common)
        self._write = kernels.WriteJob(**common)
        self._pool = pool  # keeps the memory that the jobs point to
        self._held: tuple[np.ndarray, ...] = ()

    @staticmethod
    def usable(shape: KVShape, n_heads: int, dtype: torch.dtype, device: torch.device) -> bool:
        """Whether there are kernels for this."""
        return (
            device.type == "cpu"
            and dtype in kernels.TYPES
            and shape.head_dim % 16 == 0
            and shape.head_dim <= kernels.MAX_DIM
            and n_heads // shape.n_kv_heads <= kernels.MAX_ROWS
            and kernels.library() is not None
        )

    def begin(self, batch: Batch) -> None:
        tile = max(1, _TILE // self._group)
        units = [
            (b, row, min(tile, last - row))
            for b, (first, last) in enumerate(zip(batch.q_start[:-1], batch.q_start[1:], strict=True))
            for row in range(first, last, tile)
        ]
        arrays = [batch.tables, batch.positions, np.array(units, dtype=np.int64), batch.page, batch.offset]
        self._held = tables, positions, unit, page, offset = tuple(np.ascontiguousarray(a) for a in arrays)
        self._attend.tables, self._attend.table_width = tables.ctypes.data, tables.shape[1]
        self._attend.positions = positions.ctypes.data
        self._attend.units, self._attend.n_units = unit.ctypes.data, len(unit)
        self._write.page, self._write.offset, self._write.rows = page.ctypes.data, offset.ctypes.data, len(page)

    def attend(self, layer: int, q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
        out = torch.empty(q.shape, dtype=q.dtype)
        self._write.layer = self._attend.layer = layer
        self._write.kv, self._write.kv_stride = kv.data_ptr(), kv.stride(0)
        self._attend.q, self._attend.q_stride = q.data_ptr(), q.stride(0)
        self._attend.out = out.data_ptr()
        self._lib.forebay_write(ctypes.byref(self._write))
        self._lib.forebay_attend(ctypes.byref(self._attend))
        return out.flatten(1)

"""Attention with the compiled kernels: pages are read where they lie, and nothing is gathered or padded."""

from __future__ import annotations

import ctypes

import numpy as np
import torch

from .. import kernels
from ..batch import Batch, Ints
from .base import WHOLE, KVShape, Reach

#: Query rows of one head group that are computed together: enough to reuse each K and V that was read.
_TILE = 24
#: Fewer units than this per thread, and long decodes are cut into their splits.
_UNITS_PER_THREAD = 8


class NativeAttention:
    """K and V in float32, bfloat16 or int8; queries in ``dtype`` float32 or bfloat16. CPU. See ``usable``."""

    def __init__(
        self, pool: torch.Tensor, shape: KVShape, n_heads: int, dtype: torch.dtype, reach: Reach = WHOLE
    ) -> None:
        lib = kernels.library()
        if lib is None:
            raise RuntimeError("the kernels were not built")
        self._lib = lib
        self._tile = max(1, _TILE // (n_heads // shape.n_kv_heads))
        self._kv_heads = shape.n_kv_heads
        self._part = n_heads * (shape.head_dim + 2)
        common = {
            "pool": pool.data_ptr(),
            "n_layers": shape.n_layers,
            "kv_heads": shape.n_kv_heads,
            "dim": shape.head_dim,
            "type": kernels.TYPES[shape.dtype],
            "io": kernels.TYPES[dtype],
        }
        self._windows = np.array([reach.window(layer) for layer in range(shape.n_layers)], dtype=np.int64)
        self.attend_job = kernels.AttendJob(
            heads=n_heads, scale=reach.scale_of(shape.head_dim), windows=self._windows.ctypes.data, **common
        )
        self.write_job = kernels.WriteJob(**common)
        self._pool = pool  # keeps the memory that the jobs point to
        self._held: tuple[np.ndarray, ...] = ()
        self._parts = np.empty(0, dtype=np.float32)

    @staticmethod
    def usable(shape: KVShape, n_heads: int, dtype: torch.dtype, device: torch.device) -> bool:
        """Whether there are kernels for this."""
        return (
            device.type == "cpu"
            and dtype in (torch.float32, torch.bfloat16)
            and shape.dtype in kernels.TYPES
            and shape.head_dim % 16 == 0
            and shape.head_dim <= kernels.MAX_DIM
            and n_heads // shape.n_kv_heads <= kernels.MAX_ROWS
            and kernels.library() is not None
        )

    def begin(self, batch: Batch) -> None:
        units, merges = self._units(batch)
        arrays = [batch.tables, batch.positions, units, merges, batch.page, batch.offset]
        self._held = tables, positions, units, merges, page, offset = tuple(np.ascontiguousarray(a) for a in arrays)
        slots = int(merges[:, 2].sum())
        if self._parts.size < slots * self._part:
            self._parts = np.empty(slots * self._part, dtype=np.float32)
        attend, write = self.attend_job, self.write_job
        attend.tables, attend.table_width = tables.ctypes.data, tables.shape[1]
        attend.positions = positions.ctypes.data
        attend.units, attend.n_units = units.ctypes.data, len(units)
        attend.merges, attend.n_merges = merges.ctypes.data, len(merges)
        attend.parts = self._parts.ctypes.data
        write.page, write.offset, write.rows = page.ctypes.data, offset.ctypes.data, len(page)

    def attend(self, layer: int, q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
        out = torch.empty(q.shape, dtype=q.dtype)
        attend, write = self.attend_job, self.write_job
        write.layer = attend.layer = layer
        write.kv, write.kv_stride = kv.data_ptr(), kv.stride(0)
        attend.q, attend.q_stride = q.data_ptr(), q.stride(0)
        attend.out = out.data_ptr()
        self._lib.forebay_write(ctypes.byref(write))
        self._lib.forebay_attend(ctypes.byref(attend))
        return out.flatten(1)

    def _units(self, batch: Batch) -> tuple[Ints, Ints]:
        """Units [n, 5] and merges [m, 3] of common.h: tiles of rows; where that makes too few for all threads, the
        decodes that are longer than one split in parts."""
        counts = np.diff(batch.q_start)
        tiles = -(-counts // self._tile)
        splits = np.zeros_like(counts)
        if tiles.sum() * self._kv_heads < _UNITS_PER_THREAD * torch.get_num_threads():
            parts = -(-batch.kv_len // kernels.SPLIT)
            splits = np.where((counts == 1) & (parts > 1), parts, 0)
        each = np.maximum(tiles, splits)
        seq = np.repeat(np.arange(len(counts)), each)
        within = np.arange(len(seq)) - np.repeat(np.cumsum(each) - each, each)
        apart = splits[seq] > 0
        first = batch.q_start[seq] + np.where(apart, 0, within * self._tile)
        rows = np.minimum(self._tile, batch.q_start[seq + 1] - first)
        slot = np.cumsum(apart) - 1
        units = np.stack([seq, first, rows, np.where(apart, within, -1), slot], axis=1)
        begins = np.cumsum(splits) - splits
        merges = np.stack([batch.q_start[:-1], begins, splits], axis=1)[splits > 0]
        return units, merges

"""The oracle: attention as it is written in a textbook, one sequence and one head at a time, in float64."""

from __future__ import annotations

import torch

from ..batch import Batch
from ..kv.pages import PAGE_SIZE
from .base import WHOLE, KVShape, Reach, k_view, scale_view, spread_keys, spread_queries, to_int8, v_view


class NaiveAttention:
    def __init__(self, pool: torch.Tensor, shape: KVShape, reach: Reach = WHOLE) -> None:
        self._k, self._v = k_view(pool, shape.head_dim), v_view(pool, shape.head_dim)
        self._scales = scale_view(pool) if shape.dtype == torch.int8 else None
        self._shape, self._reach = shape, reach

    def begin(self, batch: Batch) -> None:
        self._batch = batch

    def attend(self, layer: int, q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
        batch, heads = self._batch, self._shape.n_kv_heads
        for row in range(len(batch.ids)):
            page, offset = int(batch.page[row]), int(batch.offset[row])
            values = kv[row]
            if self._scales is not None:
                values, scales = to_int8(spread_keys(values))
                self._scales[page, layer, :, :, offset] = scales.view(2, heads)
            self._k[page, layer, :, :, offset] = values[:heads]
            self._v[page, layer, :, offset] = values[heads:]
        out = torch.empty_like(q)
        if self._scales is not None:
            q = spread_queries(q)
        group = q.shape[1] // heads
        for b in range(len(batch.kv_len)):
            length = int(batch.kv_len[b])
            pages = batch.tables[b, : -(-length // PAGE_SIZE)]
            # [kv heads, tokens, dim]
            keys = self._k[pages, layer].permute(1, 0, 3, 2).flatten(1, 2).double()
            values = self._v[pages, layer].permute(1, 0, 2, 3).flatten(1, 2).double()
            if self._scales is not None:
                k_scale, v_scale = self._scales[pages, layer].permute(1, 2, 0, 3).flatten(2)[..., None].double()
                keys, values = keys * k_scale, values * v_scale
            for row in range(int(batch.q_start[b]), int(batch.q_start[b + 1])):
                seen = int(batch.positions[row]) + 1
                window = self._reach.window(layer)
                first = max(0, seen - window) if window else 0
                for head in range(q.shape[1]):
                    k, v = keys[head // group, first:seen], values[head // group, first:seen]
                    scores = k @ q[row, head].double() * self._reach.scale_of(self._shape.head_dim)
                    out[row, head] = (torch.softmax(scores, dim=0) @ v).to(out.dtype)
        return out.flatten(1)

"""Attention over pages with torch operators: gather the pages of a sequence, then scaled-dot-product attention.

Decodes are gathered in groups of similar length and attend together, the query heads of one KV head standing as
one query block. Chunks attend one sequence at a time. Gathering copies what it reads, so it costs about three times
the memory traffic of a fused kernel.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from ..batch import Batch, Ints
from ..kv.pages import PAGE_SIZE
from .base import WHOLE, KVShape, Reach, k_view, scale_view, spread_keys, spread_queries, to_int8, v_view


@dataclass(slots=True)
class _Group:
    """Decodes of similar length. ``rows`` [R] of the batch; ``span`` [2 * R * kv heads * pages]: which spans of 16
    tokens to gather at layer 0; ``masks`` window -> [R, 1, 1, tokens]: 0 or -inf; ``out``: the buffer they are gathered
    to."""

    rows: torch.Tensor
    span: torch.Tensor
    masks: dict[int, torch.Tensor]
    out: torch.Tensor


@dataclass(slots=True)
class _Chunk:
    """Rows ``first`` to ``last`` of one sequence. ``masks`` window -> [rows, length]; None: plain causal, from 0 on."""

    first: int
    last: int
    length: int
    span: torch.Tensor
    masks: dict[int, torch.Tensor | None]
    out: torch.Tensor


class PagedAttention:
    def __init__(self, pool: torch.Tensor, shape: KVShape, dtype: torch.dtype, reach: Reach = WHOLE) -> None:
        self._shape, self._reach = shape, reach
        self._scale = reach.scale_of(shape.head_dim)
        self._windows = {reach.window(layer) for layer in range(shape.n_layers)}
        self._device, self._dtype = pool.device, dtype
        self._pool, self._k, self._v = pool, k_view(pool, shape.head_dim), v_view(pool, shape.head_dim)
        self._scales = scale_view(pool) if shape.dtype == torch.int8 else None
        self._spans = pool.view(-1, shape.block_elements())
        self._groups: list[_Group] = []
        self._chunks: list[_Chunk] = []
        self._buffer = torch.empty(0, dtype=shape.dtype, device=pool.device)

    def begin(self, batch: Batch) -> None:
        # What a page held before may be NaN, and a masked NaN is still one when it is multiplied by 0.
        self._pool[self._to(batch.page[batch.offset == 0])] = 0
        self._page, self._offset = self._to(batch.page), self._to(batch.offset)
        self._groups = [self._group(batch, rows) for rows in _similar(batch.kv_len[: batch.n_decodes])]
        self._chunks = [self._chunk(batch, b) for b in range(batch.n_decodes, len(batch.kv_len))]
        # One buffer serves all groups and chunks: they attend one after the other.
        parts: list[_Group | _Chunk] = [*self._groups, *self._chunks]
        size = max(part.span.numel() for part in parts)
        block = self._shape.block_elements()
        if self._buffer.numel() < size * block:
            self._buffer = self._buffer.new_empty(size * block)
        for part in parts:
            n = part.span.numel()
            part.out = self._buffer[: n * block].view(n, -1)

    def attend(self, layer: int, q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
        heads, dim = self._shape.n_kv_heads, self._shape.head_dim
        jump, window = layer * 2 * heads, self._reach.window(layer)
        if self._scales is not None:
            q = spread_queries(q).to(q.dtype)
            kv, scales = to_int8(spread_keys(kv))
            self._scales[self._page, layer, :, :, self._offset] = scales.view(-1, 2, heads)
        self._k[self._page, layer, :, :, self._offset] = kv[:, :heads]
        self._v[self._page, layer, :, self._offset] = kv[:, heads:]
        out = torch.empty_like(q)
        for group in self._groups:
            n = len(group.rows)
            k, v = self._gather(group, jump, n)
            grouped = q[group.rows].view(n, heads, -1, dim)
            attended = F.scaled_dot_product_attention(grouped, k, v, attn_mask=group.masks[window], scale=self._scale)
            out[group.rows] = attended.reshape(n, -1, dim)
        for chunk in self._chunks:
            k, v = (part[:, :, : chunk.length] for part in self._gather(chunk, jump, 1))
            rows = q[chunk.first : chunk.last].transpose(0, 1)[None]
            mask = chunk.masks[window]
            attended = F.scaled_dot_product_attention(
                rows, k, v, attn_mask=mask, is_causal=mask is None, scale=self._scale, enable_gqa=True
            )
            out[chunk.first : chunk.last] = attended[0].transpose(0, 1)
        return out.flatten(1)

    def _gather(self, part: _Group | _Chunk, jump: int, n: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V [n, kv heads, tokens, dim] of ``n`` sequences at the layer that begins at span ``jump``."""
        torch.index_select(self._spans, 0, part.span + jump, out=part.out)
        size = PAGE_SIZE * self._shape.head_dim
        k, v = part.out[:, :size].view(2, n, self._shape.n_kv_heads, -1, size)
        k, v = k.unflatten(-1, (-1, PAGE_SIZE)).transpose(-1, -2), v.unflatten(-1, (PAGE_SIZE, -1))
        if self._scales is not None:
            scales = scale_view(part.out).view(2, n, self._shape.n_kv_heads, -1, PAGE_SIZE, 1).to(self._dtype)
            k, v = k * scales[0], v * scales[1]
        return k.flatten(2, 3), v.flatten(2, 3)

    def _group(self, batch: Batch, rows: Ints) -> _Group:
        pages = -(-int(batch.kv_len[rows].max()) // PAGE_SIZE)
        last = batch.kv_len[rows][:, None] - 1
        masks = {w: self._mask(np.arange(pages * PAGE_SIZE), last, w)[:, None, None] for w in self._windows}
        span = self._to(self._span(batch.tables[rows, :pages]))
        return _Group(self._to(rows), span, masks, self._buffer)

    def _chunk(self, batch: Batch, b: int) -> _Chunk:
        first, last, length = int(batch.q_start[b]), int(batch.q_start[b + 1]), int(batch.kv_len[b])
        span = self._to(self._span(batch.tables[b : b + 1, : -(-length // PAGE_SIZE)]))
        rows = batch.positions[first:last, None]
        masks = {
            w: None if last - first == length <= (w or length) else self._mask(np.arange(length), rows, w)
            for w in self._windows
        }
        return _Chunk(first, last, length, span, masks, self._buffer)

    def _mask(self, tokens: Ints, rows: Ints, window: int) -> torch.Tensor:
        """[R, tokens]: 0 where a row of the positions ``rows`` [R, 1] sees a token, else -inf."""
        dead = tokens > rows
        if window:
            dead |= tokens <= rows - window
        mask = torch.zeros(dead.shape, dtype=self._dtype, device=self._device)
        return mask.masked_fill_(self._to(dead), -torch.inf)

    def _span(self, tables: Ints) -> Ints:
        """Pages [R, P] -> indices of 16-token spans at layer 0, ordered [K|V, R, kv head, P]."""
        heads = self._shape.n_kv_heads
        base = tables * self._shape.n_layers * 2 * heads
        head = np.arange(2 * heads).reshape(2, 1, heads, 1)
        return (base[None, :, None, :] + head).ravel()

    def _to(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(self._device)


def _similar(lengths: Ints) -> list[Ints]:
    """Group indices so that padding to the longest of a group at most doubles the work: by powers of two."""
    if not len(lengths):
        return []
    size = np.ceil(np.log2(np.maximum(lengths, PAGE_SIZE))).astype(np.int64)
    return [np.flatnonzero(size == s) for s in np.unique(size)]

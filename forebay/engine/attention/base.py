"""The KV pool and the protocol of attention."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from ..batch import Batch
from ..kv.pages import PAGE_SIZE


@dataclass(frozen=True, slots=True)
class KVShape:
    """What one page holds: [layer][K|V][head], and inside a head K as [dim][16 tokens] and V as [16 tokens][dim].

    A page is one contiguous span. K stands transposed because scores of 16 tokens at once are then one multiply-add
    per dim, with no sum across a register.
    """

    n_layers: int
    n_kv_heads: int
    head_dim: int

    def page_elements(self) -> int:
        return self.n_layers * 2 * self.n_kv_heads * PAGE_SIZE * self.head_dim


def empty_pool(shape: KVShape, n_pages: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A pool [pages, layers, 2, kv heads, 16 * head dim] of zeros.

    On CPU its memory is asked for but not touched: the system gives a page of it when it is first written.
    Zeros, because attention with torch multiplies what it masks by 0, and garbage may be NaN.
    """
    dims = (n_pages, shape.n_layers, 2, shape.n_kv_heads, PAGE_SIZE * shape.head_dim)
    if device.type != "cpu":
        return torch.zeros(dims, dtype=dtype, device=device)
    raw = np.zeros(n_pages * shape.page_elements() * dtype.itemsize, dtype=np.uint8)
    return torch.from_numpy(raw).view(dtype).view(dims)


def k_view(pool: torch.Tensor) -> torch.Tensor:
    """K of the pool as [pages, layers, kv heads, dim, 16]."""
    return pool[:, :, 0].view(*pool.shape[:2], pool.shape[3], -1, PAGE_SIZE)


def v_view(pool: torch.Tensor) -> torch.Tensor:
    """V of the pool as [pages, layers, kv heads, 16, dim]."""
    return pool[:, :, 1].view(*pool.shape[:2], pool.shape[3], PAGE_SIZE, -1)


class Attention(Protocol):
    """Bound to one pool. ``begin`` once per step, then ``attend`` once per layer, in order."""

    def begin(self, batch: Batch) -> None: ...

    def attend(self, layer: int, q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
        """Write the rows' K and V into their pages, then attend.

        ``q`` [N, heads, dim]; ``kv`` [N, 2 * kv heads, dim], K heads first; both rotated already. Returns
        [N, heads * dim].
        """
        ...

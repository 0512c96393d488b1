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
    """What one page holds: [layer][K|V][head][token][dim], contiguous, so that a page is one span."""

    n_layers: int
    n_kv_heads: int
    head_dim: int

    def page_elements(self) -> int:
        return self.n_layers * 2 * self.n_kv_heads * PAGE_SIZE * self.head_dim


def empty_pool(shape: KVShape, n_pages: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A pool [pages, layers, 2, kv heads, 16, head dim] of zeros.

    On CPU its memory is asked for but not touched: the system gives a page of it when it is first written.
    Zeros, because attention multiplies what it masks by 0, and garbage may be NaN.
    """
    dims = (n_pages, shape.n_layers, 2, shape.n_kv_heads, PAGE_SIZE, shape.head_dim)
    if device.type != "cpu":
        return torch.zeros(dims, dtype=dtype, device=device)
    raw = np.zeros(n_pages * shape.page_elements() * dtype.itemsize, dtype=np.uint8)
    return torch.from_numpy(raw).view(dtype).view(dims)


class Attention(Protocol):
    """Bound to one pool. ``begin`` once per step, then ``attend`` once per layer, in order."""

    def begin(self, batch: Batch) -> None: ...

    def attend(self, layer: int, q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
        """Write the rows' K and V into their pages, then attend.

        ``q`` [N, heads, dim]; ``kv`` [N, 2 * kv heads, dim], K heads first; both rotated already. Returns
        [N, heads * dim].
        """
        ...

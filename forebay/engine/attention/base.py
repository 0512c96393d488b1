"""The KV pool and the protocol of attention."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from ..batch import Batch
from ..kernels.hadamard import spread
from ..kv.pages import PAGE_SIZE


@dataclass(frozen=True, slots=True)
class Reach:
    """How a model attends: ``scale`` on scores (0: head_dim ** -0.5), and the window of each layer: so many tokens back
    it looks, the row itself included (0, and layers that are not listed: all)."""

    scale: float = 0.0
    windows: tuple[int, ...] = ()

    def window(self, layer: int) -> int:
        return self.windows[layer] if layer < len(self.windows) else 0

    def scale_of(self, head_dim: int) -> float:
        return self.scale or head_dim**-0.5


#: What most models do.
WHOLE = Reach()


@dataclass(frozen=True, slots=True)
class KVShape:
    """What one page holds: [layer][K|V][head], and inside a head K as [dim][16 tokens] and V as [16 tokens][dim].

    A page is one contiguous span. K stands transposed because scores of 16 tokens at once are then one multiply-add
    per dim, with no sum across a register. In ``dtype`` int8 each head's values are followed by 16 float32 scales,
    one per token, and K is spread (``spread_keys``).
    """

    n_layers: int
    n_kv_heads: int
    head_dim: int
    dtype: torch.dtype

    def block_elements(self) -> int:
        """Elements of one head's K or V."""
        return PAGE_SIZE * self.head_dim + (4 * PAGE_SIZE if self.dtype == torch.int8 else 0)

    def page_bytes(self) -> int:
        return self.n_layers * 2 * self.n_kv_heads * self.block_elements() * self.dtype.itemsize


def empty_pool(shape: KVShape, n_pages: int, device: torch.device) -> torch.Tensor:
    """A pool [pages, layers, 2, kv heads, block elements] of zeros.

    On CPU its memory is asked for but not touched: the system gives a page of it when it is first written.
    Zeros, because attention with torch multiplies what it masks by 0, and garbage may be NaN.
    """
    dims = (n_pages, shape.n_layers, 2, shape.n_kv_heads, shape.block_elements())
    if device.type != "cpu":
        return torch.zeros(dims, dtype=shape.dtype, device=device)
    raw = np.zeros(n_pages * shape.page_bytes(), dtype=np.uint8)
    return torch.from_numpy(raw).view(shape.dtype).view(dims)


def k_view(pool: torch.Tensor, head_dim: int) -> torch.Tensor:
    """K of the pool as [pages, layers, kv heads, dim, 16]."""
    k = pool[:, :, 0, :, : PAGE_SIZE * head_dim]
    return k.view(*k.shape[:-1], head_dim, PAGE_SIZE)


def v_view(pool: torch.Tensor, head_dim: int) -> torch.Tensor:
    """V of the pool as [pages, layers, kv heads, 16, dim]."""
    v = pool[:, :, 1, :, : PAGE_SIZE * head_dim]
    return v.view(*v.shape[:-1], PAGE_SIZE, head_dim)


def scale_view(pool: torch.Tensor) -> torch.Tensor:
    """Scales of an int8 pool as float32 [pages, layers, K|V, kv heads, 16]."""
    return pool[..., -4 * PAGE_SIZE :].view(torch.float32)


def spread_keys(kv: torch.Tensor) -> torch.Tensor:
    """K and V [..., 2 * kv heads, dim], K heads first, as an int8 pool takes them: float32, K spread in the largest
    blocks that divide dim. A few dims of K are much larger than the rest and would leave it few of the 8 bits."""
    k, v = kv.chunk(2, -2)
    return torch.cat([spread(k, _block(k)), v.float()], dim=-2)


def spread_queries(q: torch.Tensor) -> torch.Tensor:
    """Queries [..., dim] that meet such keys, in float32."""
    return spread(q, _block(q)) / _block(q)


def _block(x: torch.Tensor) -> int:
    dim = x.shape[-1]
    return dim & -dim


def to_int8(kv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Values [..., dim] -> (int8 [..., dim], float32 scales [...]), rounded to nearest, ties to even. What is not
    finite gets the scale NaN, so that it stays broken."""
    kv = kv.float()
    top = kv.abs().amax(-1)
    by = torch.full_like(top, 127) / top  # (127 / top would be 127 * (1 / top), rounded twice)
    codes = (kv * torch.where(top > 0, by, 0)[..., None]).nan_to_num(1, 1, 1).round().to(torch.int8)
    return codes, torch.where(top.isfinite(), top / 127, torch.nan)


class Attention(Protocol):
    """Bound to one pool. ``begin`` once per step, then ``attend`` once per layer, in order."""

    def begin(self, batch: Batch) -> None: ...

    def attend(self, layer: int, q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
        """Write the rows' K and V into their pages, then attend.

        ``q`` [N, heads, dim]; ``kv`` [N, 2 * kv heads, dim], K heads first; both rotated already. Returns
        [N, heads * dim].
        """
        ...

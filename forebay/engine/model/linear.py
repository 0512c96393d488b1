"""x @ W.T, in the form that is fastest where it runs.

On CPU oneDNN multiplies by a weight that was laid out for it beforehand: at 1 to 64 rows, which is decoding, about
twice as fast as torch's own path, and equal beyond (docs/log.md). Torch has the operators for its compiler and does
not document them, so what lacks them falls back to the plain form; both are tested.
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F

#: The rows that oneDNN is told to expect. Its layout for 16 serves 1 to 512 as well as one made for each.
_EXPECTED_ROWS = 16


class Linear(Protocol):
    n_bytes: int

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[rows, in] -> [rows, out], in the dtype of the weight."""
        ...


class Plain:
    """torch's own: any device, any dtype. ``weight`` [out, in]."""

    def __init__(self, weight: torch.Tensor) -> None:
        self._weight = weight
        self.n_bytes = weight.numel() * weight.element_size()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self._weight)


class Packed:
    """oneDNN with a prepacked weight. CPU only. Raises RuntimeError where the CPU or this torch cannot."""

    def __init__(self, weight: torch.Tensor) -> None:
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight, _EXPECTED_ROWS)
        self.n_bytes = weight.numel() * weight.element_size()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self._weight, None, "none", [], "")
        return result


def make_linear(weight: torch.Tensor) -> Linear:
    """``weight`` [out, in] is not needed any more after this, unless somebody else holds it."""
    if weight.device.type == "cpu":
        try:
            return Packed(weight)
        except (RuntimeError, AttributeError):
            pass
    return Plain(weight)

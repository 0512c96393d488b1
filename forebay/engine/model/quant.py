"""All of quantization: weights in 4 or 8 bits, activations in 8, and the form in which the kernels read them.

Weights and activations share a scale in groups of 32 inputs. Groups of activations cost one multiply-add per group
and lose 0.3 % of perplexity where one scale per row loses 5 % (docs/decisions/0005); groups of 4-bit weights are those
of GGUF's Q4_0 and Q4_1, which are taken as they are.

Both sides are spread (kernels/hadamard.py) in blocks of 8. So the few large activations no longer take the bits of all
that share their scale, and what is left of the loss is a quarter. Weights in 8 bits are rounded when they are spread;
those in 4 are spread by the kernels as they are read, which is exact (docs/decisions/0007).
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from .. import kernels
from ..kernels.hadamard import spread

#: Values that share a scale; of them, values that are spread together: each fourth one; channels of one block; bytes
#: of scales in a group of it.
GROUP = 32
SPREAD = 8
LANES = 16
_HEAD = 64
_LINE = 64  # bytes of a cache line

Bits = Literal[4, 8]


@dataclass(frozen=True, slots=True)
class Codes:
    """A quantized weight [n, k], k a multiple of 32: ``codes`` 0..15 (4 bits) or -128..127 (8 bits), with float16
    ``scale`` and ``offset`` [n, k / 32]. In 4 bits weight = scale * code + offset, in 8 bits
    scale * spread(code) / 8 + offset."""

    codes: npt.NDArray[np.int8]
    scale: npt.NDArray[np.float16]
    offset: npt.NDArray[np.float16]
    bits: Bits

    def rows(self, order: npt.NDArray[np.int64]) -> Codes:
        """The same rows in another order."""
        return Codes(self.codes[order], self.scale[order], self.offset[order], self.bits)

    def widened(self) -> Codes:
        """4 bits in 8, exactly but for the rounding of the offset to float16."""
        if self.bits == 8:
            return self
        groups = (self.codes - 8).reshape(len(self.codes), -1, GROUP)
        codes = _spread(torch.from_numpy(groups)).to(torch.int8).numpy()
        offset = self.offset.astype(np.float32) + 8 * self.scale.astype(np.float32)
        return Codes(codes.reshape(self.codes.shape), self.scale, offset.astype(np.float16), 8)


def _spread(groups: torch.Tensor) -> torch.Tensor:
    """Groups [..., 32] spread in float32, not scaled. Twice gives 8 times the same."""
    blocks = groups.reshape(*groups.shape[:-1], SPREAD, GROUP // SPREAD).transpose(-1, -2)
    return spread(blocks, SPREAD).transpose(-1, -2).flatten(-2)


def quantize(weight: npt.NDArray[np.float32], bits: Bits) -> Codes:
    """``weight`` [n, k], rounded to nearest. 8 bits: spread, scale = largest / 127. 4 bits: scale and offset span the
    group."""
    n, k = weight.shape
    groups = np.pad(weight, ((0, 0), (0, -k % GROUP))).reshape(n, -1, GROUP)
    if bits == 8:
        groups = _spread(torch.from_numpy(groups)).numpy()
        scale = (np.abs(groups).max(-1) / 127).astype(np.float16)
        offset = np.zeros_like(scale)
    else:
        low, high = groups.min(-1), groups.max(-1)
        scale, offset = ((high - low) / 15).astype(np.float16), low.astype(np.float16)
        groups = groups - offset[..., None].astype(np.float32)
    by = np.divide(1, scale, out=np.zeros(scale.shape, np.float32), where=scale > 0, dtype=np.float32)
    codes = np.rint(groups * by[..., None]).clip(-127 if bits == 8 else 0, 127 if bits == 8 else 15)
    return Codes(codes.astype(np.int8).reshape(n, -1), scale, offset, bits)


def from_gguf(blocks: npt.NDArray[np.uint8], kind: str) -> Codes | None:
    """The codes of a GGUF tensor as they are in the file, or None where ``kind`` has other groups than ours.
    ``blocks`` [n, bytes]."""
    size = {"Q4_0": 18, "Q4_1": 20}.get(kind)
    if size is None:
        return None
    parts = blocks.reshape(len(blocks), -1, size)
    scale = parts[..., :2].copy().view(np.float16)[..., 0]
    offset = parts[..., 2:4].copy().view(np.float16)[..., 0] if kind == "Q4_1" else scale * np.float16(-8)
    packed = parts[..., size - 16 :]
    codes = np.concatenate([packed & 15, packed >> 4], axis=-1)  # a byte holds values i and i + 16
    return Codes(codes.view(np.int8).reshape(len(blocks), -1), scale, offset, 4)


def join(parts: list[Codes]) -> Codes:
    """Rows below each other. All of the same bits."""
    return Codes(
        np.concatenate([part.codes for part in parts]),
        np.concatenate([part.scale for part in parts]),
        np.concatenate([part.offset for part in parts]),
        parts[0].bits,
    )


@dataclass(frozen=True, slots=True)
class Packed:
    """A weight [n, k] as the kernels read it (linear.c): ``data`` uint8 [blocks of 16 channels, groups, bytes]."""

    data: torch.Tensor
    bits: int
    n: int
    k: int

    @classmethod
    def of(cls, codes: Codes, k: int) -> Packed:
        n, padded = codes.codes.shape
        blocks, groups = -(-n // LANES), padded // GROUP
        extra = ((0, blocks * LANES - n), (0, 0))

        def halves(values: npt.NDArray[np.float16]) -> npt.NDArray[np.uint8]:
            lanes = np.pad(values, extra).reshape(blocks, LANES, groups).transpose(0, 2, 1)
            return np.ascontiguousarray(lanes).view(np.uint8)

        # [blocks, 2, 8 channels, groups, 8 quads, 4 inputs] -> [blocks, groups, quads, 2, 8 channels, 4 inputs]
        quads = np.pad(codes.codes, extra).reshape(blocks, 2, 8, groups, 8, 4).transpose(0, 3, 4, 1, 2, 5)
        values: npt.NDArray[Any] = quads.view(np.uint8)
        if codes.bits == 4:
            pairs = values.reshape(blocks, groups, 4, 2, 64)
            values = pairs[:, :, :, 0] | pairs[:, :, :, 1] << 4
        parts = [halves(codes.scale), halves(codes.offset), values.reshape(blocks, groups, -1)]
        return cls(torch.from_numpy(np.concatenate(parts, axis=-1)), codes.bits, n, k)

    @property
    def n_bytes(self) -> int:
        return self.data.numel()

    def to(self, device: torch.device) -> Packed:
        return Packed(self.data.to(device), self.bits, self.n, self.k)

    def dequantize(self) -> torch.Tensor:
        """float32 [n, k]."""
        return self._unpack(self.data)[: self.n, : self.k]

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """float32 [len(ids), k]: the rows ``ids``."""
        blocks = self._unpack(self.data[ids // LANES]).view(len(ids), LANES, -1)
        return blocks[torch.arange(len(ids), device=ids.device), ids % LANES, : self.k]

    def _unpack(self, data: torch.Tensor) -> torch.Tensor:
        """Blocks -> float32 [blocks * 16, padded k]."""
        blocks, groups = data.shape[:2]
        scales = data[..., :_HEAD].contiguous().view(torch.float16).float()  # [blocks, groups, 32]
        codes = data[..., _HEAD:]
        if self.bits == 4:
            codes = codes.reshape(blocks, groups, 4, 1, 64)
            codes = torch.cat([codes & 15, codes >> 4], dim=-2).float()
        else:
            codes = codes.contiguous().view(torch.int8).float()
        values = codes.reshape(blocks, groups, 8, LANES, 4).permute(0, 3, 1, 2, 4).flatten(3)  # [.., 16, groups, 32]
        if self.bits == 8:
            values = _spread(values) / SPREAD
        lanes = scales.transpose(1, 2)[..., None]
        return (values * lanes[:, :LANES] + lanes[:, LANES:]).reshape(blocks * LANES, -1)


def side_by_side(packed: Mapping[str, Packed]) -> dict[str, Packed]:
    """The same weights in one new array. numpy asks the system for huge pages for it, which it does not give for a
    mapped file: a core here then reads 21 GB/s instead of 16."""
    sizes = [-(-weight.n_bytes // _LINE) * _LINE for weight in packed.values()]
    room = torch.from_numpy(np.empty(sum(sizes) + _LINE, dtype=np.uint8))
    at = -room.data_ptr() % _LINE
    moved = {}
    for (name, weight), size in zip(packed.items(), sizes, strict=True):
        data = room[at : at + weight.n_bytes].view(weight.data.shape)
        moved[name] = Packed(data.copy_(weight.data), weight.bits, weight.n, weight.k)
        at += size
    return moved


def fake_quantize(x: torch.Tensor) -> torch.Tensor:
    """Activations [rows, k] as 8 bits hold them, in float32: per group of 32, spread, the largest is 127; to nearest,
    ties to even. A group with a value that is not finite becomes NaN."""
    x = x.float()
    groups = _spread(F.pad(x, (0, -x.shape[-1] % GROUP)).view(len(x), -1, GROUP))
    top = groups.abs().amax(-1, keepdim=True)
    by = torch.full_like(top, 127) / top  # (127 / top would be 127 * (1 / top), rounded twice)
    codes = (groups * torch.where(top > 0, by, 0)).round()
    values = _spread(codes * (top / 127)) / SPREAD
    return values.flatten(1)[:, : x.shape[-1]]


class QuantLinear:
    """x @ W.T with torch's operators: the twin of the kernels, and what serves where they are not (CUDA)."""

    def __init__(self, packed: Packed, dtype: torch.dtype) -> None:
        self.packed = packed
        self._dtype = dtype
        self.n_bytes = packed.n_bytes

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[rows, in] -> [rows, out] in the dtype given."""
        return F.linear(fake_quantize(x).to(self._dtype), self.packed.dequantize().to(self._dtype))


def linear(packed: Packed, x: torch.Tensor) -> torch.Tensor:
    """x @ W.T with the kernels, in one thread: float32 [rows, k] -> [rows, n]. For tests and measurements; a decoder
    runs them as a program. Raises RuntimeError where they were not built."""
    lib = kernels.library()
    if lib is None:
        raise RuntimeError("the kernels were not built")
    rows, k = len(x), packed.data.shape[1] * GROUP
    x = x.contiguous()
    codes = torch.empty(rows, k, dtype=torch.int8)
    scale, total = torch.empty(rows, k // GROUP), torch.empty(rows, k // GROUP)
    zero = torch.empty(rows, k // GROUP, dtype=torch.int32)
    out = torch.empty(rows, packed.data.shape[0] * LANES)
    acts = kernels.Acts(codes.data_ptr(), scale.data_ptr(), total.data_ptr(), zero.data_ptr())
    job = kernels.LinearJob(
        packed.data.data_ptr(), acts, x.data_ptr(), out.data_ptr(), rows, packed.k, k, packed.n, packed.bits, 0
    )
    lib.forebay_linear(ctypes.byref(job))
    return out[:, : packed.n]

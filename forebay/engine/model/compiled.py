"""The same decoder as one program of compiled operations: a whole step is one call, with no Python in between.

For quantized weights on CPU. Activations are float32 between the operations and 8 bits inside the linear layers;
the workspace is made once. Every row is computed by itself, in one fixed order, so its logits are the same bits alone,
in a crowd, in chunks or from the prefix cache (law 9).
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from .. import kernels
from ..attention.base import Attention
from ..attention.native import NativeAttention
from ..batch import Batch
from .layers import rope_frequencies
from .quant import GROUP, LANES, Packed, QuantLinear
from .spec import LayerSpec, ModelSpec, RopeSpec
from .weights import LayerWeights, QuantEmbedding, Weights


@dataclass(frozen=True, slots=True)
class _Space:
    """Buffers for so many rows and sampling rows, and the program over them."""

    rows: int
    samples: int
    logits: torch.Tensor
    qkv: torch.Tensor
    attended: torch.Tensor
    program: kernels.Program
    held: list[Any]


class CompiledDecoder:
    def __init__(self, spec: ModelSpec, weights: Weights, attention: NativeAttention) -> None:
        """``weights`` are quantized and on CPU; ``attention`` takes float32. Raises RuntimeError without kernels."""
        lib = kernels.library()
        if lib is None:
            raise RuntimeError("the kernels were not built")
        self.spec, self.weights = spec, weights
        self._lib, self._attention = lib, attention
        self._tables = {rope: self._table(rope) for rope in {layer.rope for layer in spec.layers} if rope}
        self._space = self._make(1, 1)

    def _table(self, rope: RopeSpec) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin [positions, dim / 2]."""
        freqs = rope_frequencies(rope, self.spec.head_dim, self.weights.rope_factors)
        angles = torch.arange(self.spec.max_context, dtype=torch.float32)[:, None] * freqs
        return angles.cos().contiguous(), angles.sin().contiguous()

    @staticmethod
    def usable(spec: ModelSpec) -> bool:
        """Whether there are operations for this shape."""
        widest = max(spec.hidden, spec.ffn, spec.n_heads * spec.head_dim) + GROUP
        return spec.hidden % 8 == 0 and spec.ffn % 8 == 0 and spec.head_dim % 16 == 0 and widest <= kernels.MAX_WIDTH

    def forward(self, batch: Batch, attention: Attention) -> torch.Tensor:
        """Logits [S, vocab] in float32 of the rows that sample, valid until the next call. K and V of all rows are in
        their pages after it."""
        if attention is not self._attention:
            raise RuntimeError("a compiled decoder runs with the attention that it was made for")
        rows, samples = len(batch.ids), len(batch.sample_rows)
        if rows > self._space.rows or samples > self._space.samples:
            self._space = self._make(max(rows, self._space.rows), max(samples, self._space.samples))
        space = self._space
        self._attention.begin(batch)
        arrays = [np.ascontiguousarray(a) for a in (batch.ids, batch.positions, batch.sample_rows)]
        program = space.program
        program.ids, program.positions, program.sample_rows = (a.ctypes.data for a in arrays)
        program.rows, program.n_samples = rows, samples
        attend, write = self._attention.attend_job, self._attention.write_job
        attend.q, attend.q_stride = space.qkv.data_ptr(), space.qkv.shape[1]
        attend.out = space.attended.data_ptr()
        write.kv = space.qkv.data_ptr() + 4 * self.spec.n_heads * self.spec.head_dim
        write.kv_stride = space.qkv.shape[1]
        self._lib.forebay_run(ctypes.byref(program))
        return space.logits[:samples, : self.spec.vocab_size]

    def _make(self, rows: int, samples: int) -> _Space:
        spec, weights = self.spec, self.weights
        q_width = spec.n_heads * spec.head_dim
        first = weights.layers[0]
        x = torch.zeros(rows, _width(first.out))
        qkv = torch.zeros(rows, _width(first.qkv))
        attended = torch.zeros(rows, q_width)
        gate_up = torch.zeros(rows, _width(first.gate_up))
        logits = torch.zeros(samples, _width(weights.head))
        added = torch.zeros(rows if spec.sandwich else 0, x.shape[1])
        most = max(_packed(p).data.shape[1] for p in (first.qkv, first.out, first.down)) * GROUP
        count = max(rows, samples)
        codes = torch.zeros(count * most, dtype=torch.int8)
        scale, total = torch.zeros(count * most // GROUP), torch.zeros(count * most // GROUP)
        zero = torch.zeros(count * most // GROUP, dtype=torch.int32)
        held: list[Any] = [x, gate_up, added, codes, scale, total, zero]

        def op(kind: str, layer: int = 0, **fields: Any) -> kernels.Op:
            return kernels.Op(kind=kernels.OPS[kind], layer=layer, **fields)

        def vector(values: torch.Tensor | None) -> int:
            """A pointer to them in float32."""
            if values is None:
                return 0
            held.append(values.float().contiguous())
            return int(held[-1].data_ptr())

        def norm(weight: torch.Tensor, then: Any, *, sampled: bool = False) -> kernels.Op:
            pointers = {"weight": vector(weight), "input": x.data_ptr()}
            sizes = {"n": spec.hidden, "k": _k(then), "in_width": x.shape[1]}
            return op("norm", sampled=int(sampled), **sizes, **pointers)

        def residual(weight: Any, post_norm: torch.Tensor | None) -> list[kernels.Op]:
            """A linear whose result is added to x, normed before where the model does that."""
            if post_norm is None:
                return [linear(weight, x, add=True)]
            pointers = {"weight": vector(post_norm), "input": added.data_ptr(), "out": x.data_ptr()}
            sizes = {"n": spec.hidden, "in_width": added.shape[1], "out_width": x.shape[1]}
            return [linear(weight, added), op("add_norm", **sizes, **pointers)]

        def heads(i: int, layer: LayerSpec, w: LayerWeights) -> kernels.Op:
            pointers = {"bias": vector(w.qkv_bias), "q_norm": vector(w.q_norm), "k_norm": vector(w.k_norm)}
            if layer.rope:
                cos, sin = self._tables[layer.rope]
                pointers |= {"cos": cos.data_ptr(), "sin": sin.data_ptr()}
            return op("heads", i, out=qkv.data_ptr(), out_width=qkv.shape[1], **pointers)

        def linear(weight: Any, out: torch.Tensor, *, add: bool = False, sampled: bool = False) -> kernels.Op:
            packed = _packed(weight)
            pointers = {"weight": packed.data.data_ptr(), "out": out.data_ptr()}
            sizes = {"n": packed.n, "k": _k(weight), "out_width": out.shape[1]}
            return op("linear", bits=packed.bits, add=int(add), sampled=int(sampled), **sizes, **pointers)

        if not isinstance(weights.embed, QuantEmbedding):
            raise TypeError("the embedding is not quantized")
        table = weights.embed.packed
        embed = {"weight": table.data.data_ptr(), "out": x.data_ptr(), "out_width": x.shape[1]}
        sizes = {"bits": table.bits, "n": spec.hidden, "k": table.data.shape[1] * GROUP}
        ops = [op("embed", factor=spec.embed_scale, **sizes, **embed)]
        for i, (layer, w) in enumerate(zip(spec.layers, weights.layers, strict=True)):
            ops += [
                norm(w.attn_norm, w.qkv),
                linear(w.qkv, qkv),
                heads(i, layer, w),
                op("attend", i),
                op("merge", i),
                op("quantize", n=q_width, k=_k(w.out), input=attended.data_ptr(), in_width=q_width),
                *residual(w.out, w.attn_post_norm),
                norm(w.ffn_norm, w.gate_up),
                linear(w.gate_up, gate_up),
                op(spec.activation, n=spec.ffn, k=_k(w.down), input=gate_up.data_ptr(), in_width=gate_up.shape[1]),
                *residual(w.down, w.ffn_post_norm),
            ]
        ops += [norm(weights.norm, weights.head, sampled=True), linear(weights.head, logits, sampled=True)]
        array = (kernels.Op * len(ops))(*ops)
        counters = np.zeros((2, len(ops)), dtype=np.int64)
        held += [array, counters]
        program = kernels.Program(
            ops=ctypes.addressof(array),
            next=counters[0].ctypes.data,
            done=counters[1].ctypes.data,
            attend=ctypes.pointer(self._attention.attend_job),
            write=ctypes.pointer(self._attention.write_job),
            x=kernels.Acts(codes.data_ptr(), scale.data_ptr(), total.data_ptr(), zero.data_ptr()),
            n_ops=len(ops),
            eps=spec.norm_eps,
        )
        return _Space(rows, samples, logits, qkv, attended, program, held)


def _packed(linear: Any) -> Packed:
    if not isinstance(linear, QuantLinear):
        raise TypeError("the linear layers are not quantized")
    return linear.packed


def _k(linear: Any) -> int:
    """Inputs, padded to whole groups."""
    return _packed(linear).data.shape[1] * GROUP


def _width(linear: Any) -> int:
    """Outputs, padded to whole blocks."""
    return _packed(linear).data.shape[0] * LANES

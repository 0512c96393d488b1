"""Owner of the model and the KV tensors: execute(step) -> token ids."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import numpy as np
import psutil
import torch

from ..catalog import ModelFiles, code_version, fingerprint, read_meta
from ..config import EngineSettings
from ..contract import Unsupported
from . import kernels
from .attention import base
from .attention.base import Attention, KVShape, Reach, empty_pool
from .attention.native import NativeAttention
from .attention.paged import PagedAttention
from .batch import Batch
from .kv.capacity import pages_of, pool_pages
from .kv.pages import PAGE_SIZE
from .model import verdict
from .model.compiled import CompiledDecoder
from .model.decoder import Decoder
from .model.families import read_spec
from .model.spec import ModelSpec
from .model.weights import load_weights
from .pace import Timed
from .sample import logprobs, sample
from .sequence import GenSpec, Sequence
from .step import Drawn, Step, Work


@dataclass(frozen=True, slots=True)
class Built:
    """A loaded model with its pool. ``weight_bytes`` and ``kv_bytes`` in all, ``kv_token_bytes`` per token;
    ``layout`` is SHA-256 over all that the bytes of a page depend on; ``summary``: label -> line for people."""

    runner: ModelRunner
    spec: ModelSpec
    pool: torch.Tensor
    n_pages: int
    max_context: int
    weight_bytes: int
    kv_bytes: int
    kv_token_bytes: int
    layout: bytes
    summary: dict[str, str]


class Model(Protocol):
    """A decoder: torch's or the compiled one."""

    def forward(self, batch: Batch, attention: Attention) -> torch.Tensor: ...


class ModelRunner:
    def __init__(self, decoder: Model, attention: Attention, *, compiled: bool) -> None:
        """``compiled``: sample with the kernel."""
        self._decoder = decoder
        self._attention = attention
        self._compiled = compiled

    @torch.inference_mode()
    def execute(self, step: Step) -> Drawn:
        batch = Batch.of(step)
        logits = self._decoder.forward(batch, self._attention)
        tokens = [0] * len(step.works)
        if not batch.works:
            return Drawn(tokens)
        curious = list(batch.sampling.logprobs)
        untouched = logits[curious] if curious else None  # a copy, before biases and penalties
        drawn = sample(logits, batch.sampling, compiled=self._compiled)
        for i, token in zip(batch.works, drawn, strict=True):
            tokens[i] = token
        if untouched is None:
            return Drawn(tokens)
        known = logprobs(untouched, [drawn[row] for row in curious], list(batch.sampling.logprobs.values()))
        return Drawn(tokens, {batch.works[row]: entry for row, entry in zip(curious, known, strict=True)})

    def logits(self, step: Step, *, every_row: bool = False) -> torch.Tensor:
        """Logits [S, vocab] of the step's sampling rows or of all, for judges and reports. Valid until the next."""
        batch = Batch.of(step)
        if every_row:
            batch = replace(batch, sample_rows=np.arange(len(batch.ids)))
        with torch.inference_mode():
            return self._decoder.forward(batch, self._attention)

    def warm_up(
        self, *, max_batch: int, token_budget: int, max_context: int, n_pages: int, clock: Callable[[], float]
    ) -> list[Timed]:
        """Run every planned shape once, so that the first user does not pay for it. Returns each with its seconds, by
        ``clock``.

        Decodes at each power of two up to ``max_batch``, a full chunk from the start and one that continues, and
        both together. Writes to pages that nobody holds yet.
        """
        sizes = [n for n in (1, 2, 4, 8, 16, 32, 64, 128, 256, 512) if n < max_batch] + [max_batch]
        chunk = min(token_budget, max_context // 2, n_pages * PAGE_SIZE // 2)
        plans: list[list[tuple[int, int]]] = [[(min(32, max_context - 1), 1)] * n for n in sizes]
        plans += [[(0, chunk)], [(chunk, chunk)]]
        plans.append([(1, 1)] * (sizes[-1] - 1) + [(0, max(2, chunk - max_batch))])
        times = []
        for plan in plans:
            begin = clock()
            step = Step(tuple(dummy_work(start, count, n_pages) for start, count in plan))
            self.execute(step)
            times.append(Timed(step.n_decodes, step.n_tokens - step.n_decodes, clock() - begin))
        return times


def dummy_work(start: int, count: int, n_pages: int, first_page: int = 0) -> Work:
    """``count`` rows after ``start`` that are taken for computed, in pages from ``first_page`` on: for warm-up and
    measurements, while nobody holds a page."""
    ids = [0] * (start + count)
    table = [(first_page + page) % n_pages for page in range(pages_of(len(ids)))]
    seq = Sequence(GenSpec(id=0, ids=ids, max_tokens=1), arrival=0, ids=ids, table=table)
    return Work(seq, start, count, samples=True)


def build(files: ModelFiles, settings: EngineSettings) -> Built:
    """Load the model and make its pool. Raises Unsupported for what cannot be served, before weights load."""
    device = _device(settings.device)
    torch.set_num_threads(settings.threads or usable_cores())
    spec = read_spec(read_meta(files))
    dtype = _dtype(settings.dtype, device)
    if settings.max_context > spec.max_context:
        raise Unsupported(f"max-context {settings.max_context} is more than the model's {spec.max_context}")
    max_context = settings.max_context or spec.max_context
    level = kernels.level() if settings.kernels == "auto" and device.type == "cpu" else "none"
    quantize, kv = verdict.choose(settings, files.cache, level)
    shape = KVShape(spec.n_layers, spec.n_kv_heads, spec.head_dim, torch.int8 if kv == "int8" else dtype)
    native = level != "none" and NativeAttention.usable(shape, spec.n_heads, dtype, device)
    compiled = native and quantize != "none" and CompiledDecoder.usable(spec)
    # Between the compiled operations activations are float32, whatever the dtype.
    inner = torch.float32 if compiled else dtype
    weights = load_weights(files, spec, inner, device, quantize)
    page_bytes = shape.page_bytes()
    useful = 4 * settings.max_batch * pages_of(max_context)
    n_pages = pool_pages(settings.kv_memory, _free_bytes(device), page_bytes, useful)
    if n_pages < settings.max_batch:
        raise Unsupported(
            f"kv-memory {settings.kv_memory} holds {n_pages} pages of {page_bytes} bytes; "
            f"max-batch {settings.max_batch} needs at least one each"
        )
    pool = empty_pool(shape, n_pages, device)
    reach = Reach(spec.attn_scale, spec.windows)
    attention: Attention = PagedAttention(pool, shape, inner, reach)
    decoder: Model = Decoder(spec, weights)
    if native:
        kernels.use_threads(torch.get_num_threads())
        attention = NativeAttention(pool, shape, spec.n_heads, inner, reach)
        if compiled:
            decoder = CompiledDecoder(spec, weights, attention)
    runner = ModelRunner(decoder, attention, compiled=level != "none")
    name = str(dtype).removeprefix("torch.")
    origin = "converted from the model's file" if weights.converted else "as converted by an earlier start"
    summary = {
        "weights": f"{weights.n_bytes() / 2**20:,.0f} MiB in {name if quantize == 'none' else quantize}, {origin}",
        "device": str(device) + (f", {torch.get_num_threads()} threads" if device.type == "cpu" else ""),
        "kernels": f"compiled{'' if compiled else ' attention'} ({level})" if native else "torch",
        "kv cache": f"{n_pages:,} pages of {PAGE_SIZE} tokens, {n_pages * page_bytes / 2**30:.2f} GiB "
        f"in {name if kv == 'model' else kv}, {page_bytes // PAGE_SIZE:,} bytes a token",
    }
    max_context = min(max_context, n_pages * PAGE_SIZE)
    kv_bytes = n_pages * page_bytes
    return Built(
        runner=runner,
        spec=spec,
        pool=pool,
        n_pages=n_pages,
        max_context=max_context,
        weight_bytes=weights.n_bytes(),
        kv_bytes=kv_bytes,
        kv_token_bytes=page_bytes // PAGE_SIZE,
        layout=_layout(files, shape, (name, quantize, level if native else "none", str(compiled))),
        summary=summary,
    )


def _layout(files: ModelFiles, shape: KVShape, arithmetic: tuple[str, ...]) -> bytes:
    folders = (Path(kernels.__file__).parent, Path(base.__file__).parent, Path(verdict.__file__).parent)
    code = code_version(*(str(path) for folder in folders for path in sorted(folder.iterdir())))
    return hashlib.sha256(repr((fingerprint(files), code, shape, PAGE_SIZE, arithmetic)).encode()).digest()


def _device(name: str) -> torch.device:
    if name == "cuda" and not torch.cuda.is_available():
        raise Unsupported("device cuda is not there: torch sees no GPU")
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return torch.device(name)


def usable_cores(cgroup: Path = Path("/sys/fs/cgroup/cpu.max")) -> int:
    """Cores that this process may use: its affinity, and in a container with a quota no more than that pays for. One
    thread too many, and each step waits for the system to wake it."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = cgroup.read_text().split()
        cores = min(cores, max(1, int(quota) // int(period)))
    except (OSError, ValueError):  # no quota is spelled "max"
        pass
    return cores


def _dtype(name: str, device: torch.device) -> torch.dtype:
    """``auto``: bfloat16 where the hardware multiplies in it. Elsewhere it is emulated and five times slower than
    float32, so there float32."""
    if name != "auto":
        chosen: torch.dtype = getattr(torch, name)
        return chosen
    native = torch.cuda.is_bf16_supported() if device.type == "cuda" else _cpu_has_bf16()
    return torch.bfloat16 if native else torch.float32


def _cpu_has_bf16() -> bool:
    has = torch.cpu.get_capabilities() if hasattr(torch.cpu, "get_capabilities") else {}
    return bool(has.get("avx512_bf16") or has.get("amx_bf16") or has.get("arm_bf16") or has.get("bf16"))


def _free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        free: int = torch.cuda.mem_get_info(device)[0]
        return free
    available: int = psutil.virtual_memory().available
    return available

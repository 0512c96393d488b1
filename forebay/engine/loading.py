"""A warm engine around a real model: weights, pool, lower tiers, scheduler, loop."""

from __future__ import annotations

import logging
import time

import psutil

from ..catalog import ModelFiles, cache_dir
from ..config import EngineSettings
from .files import PageFiles, sweep
from .join import policy
from .kv.pages import PAGE_SIZE
from .kv.tiers import NoTiers, Tiers
from .loop import Engine
from .pace import Pace
from .runner import Built, build
from .scheduler import Scheduler
from .tiers import PageTiers, PoolBytes
from .wire import Hello

log = logging.getLogger(__name__)


def load_model(files: ModelFiles, settings: EngineSettings) -> tuple[Engine, Hello]:
    """A warm engine around the model, and what it says of itself. Raises Unsupported."""
    started = time.monotonic()
    built = build(files, settings)
    loaded = time.monotonic()
    times = built.runner.warm_up(
        max_batch=settings.max_batch,
        token_budget=settings.token_budget,
        max_context=built.max_context,
        n_pages=built.n_pages,
        clock=time.monotonic,
    )
    warm = time.monotonic()
    tiers = _tiers(files, settings, built, min(t.seconds / (t.decodes + t.prefill) for t in times) * PAGE_SIZE)
    scheduler = Scheduler(
        n_pages=built.n_pages,
        max_batch=settings.max_batch,
        token_budget=settings.token_budget,
        max_context=built.max_context,
        tiers=tiers,
        policy=policy(settings.batching, settings.max_batch),
    )
    engine = Engine(
        scheduler,
        built.runner,
        vocab_size=built.spec.vocab_size,
        clock=time.monotonic,
        pace=Pace(times),
        max_gap=settings.max_gap,
    )
    other = psutil.Process().memory_info().rss - built.weight_bytes
    summary = built.summary | {
        "memory": f"weights {built.weight_bytes >> 20:,} MiB, KV up to {built.kv_bytes >> 20:,} MiB, "
        f"other {max(0, other) >> 20:,} MiB in the engine",
        "engine": f"loaded in {loaded - started:.1f} s, {len(times)} shapes warmed in {warm - loaded:.1f} s",
    }
    hello = Hello(
        built.n_pages,
        PAGE_SIZE,
        scheduler.max_context,
        built.spec.vocab_size,
        summary,
        max(t.seconds for t in times),
    )
    return engine, hello


def _tiers(files: ModelFiles, settings: EngineSettings, built: Built, page_cost: float) -> Tiers:
    host = settings.kv_host
    if host is None:
        host = psutil.virtual_memory().available // 4 if built.pool.device.type == "cuda" else 0
    pool = PoolBytes(built.pool)
    found: PageFiles | None = None
    if settings.kv_disk and (cache := cache_dir(files)):
        folder = cache / f"kv-{built.layout.hex()[:16]}"
        try:
            found = PageFiles(folder, built.layout, pool.page_bytes, settings.kv_disk)
            sweep(cache.parent, folder)
        except OSError as error:
            log.warning("no KV cache on disk: %s", error)
    if found is None and host < pool.page_bytes:
        return NoTiers()
    return PageTiers(pool, host_bytes=host, files=found, page_cost=page_cost, clock=time.monotonic)

"""The tiers below the device: copies of pages in the host's memory, and files written behind.

Two threads of its own: one reads and fills pages of the pool, one writes. A page that is copied out belongs to nobody
else, so nothing in the pool is held for it, and no step waits for a disk.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

from .files import Bytes, PageFiles
from .kv.tiers import Arrival, Block, Offer, loose_end

log = logging.getLogger(__name__)

#: Bytes that may wait to be written. What comes beyond is not kept on disk.
MOST_UNWRITTEN = 64 * 2**20
#: Weight of the newest fetch in what a page costs.
_SMOOTHING = 0.3
#: A tier that seemed too slow is tried again at last: each time it is passed over, it counts as so much faster.
_DOUBT = 0.98


class PoolBytes:
    """The pages of a pool [pages, ...] as bytes."""

    def __init__(self, pool: torch.Tensor) -> None:
        self._flat = pool.flatten(1).view(torch.uint8)
        # Not torch's own copy: it would start a team of threads for each page.
        self._array = self._flat.numpy() if pool.device.type == "cpu" else None
        self.page_bytes = self._flat.shape[1]

    def read(self, page: int) -> Bytes:
        if self._array is not None:
            own: Bytes = self._array[page].copy()
            return own
        copied: Bytes = self._flat[page].cpu().numpy()
        return copied

    def write(self, page: int, data: Bytes) -> None:
        if self._array is not None:
            self._array[page] = data
        else:
            self._flat[page].copy_(torch.from_numpy(data))


class PageTiers:
    """``host_bytes`` of copies in memory (0: none), and ``files`` on disk (None: none). ``page_cost``: seconds that
    computing a page takes. ``clock`` gives seconds."""

    def __init__(
        self,
        pool: PoolBytes,
        *,
        host_bytes: int,
        files: PageFiles | None,
        page_cost: float,
        clock: Callable[[], float],
    ) -> None:
        self._pool = pool
        self._files = files
        self._page_cost = page_cost
        self._clock = clock
        self._most_host = host_bytes // pool.page_bytes
        self._host: OrderedDict[bytes, Bytes] = OrderedDict()
        self._parents: dict[bytes, bytes] = {}  # of those in the host's memory: the key of the page before
        self._unwritten: dict[bytes, Bytes] = {}
        self._unstamped: list[bytes] = []
        self._most_unwritten = max(1, MOST_UNWRITTEN // pool.page_bytes)
        self._costs = {"host": 0.0, "disk": 0.0}
        self._counts = Counter(dict.fromkeys(("host_hit", "disk_hit", "saved", "skipped", "damaged"), 0))
        self._reader = ThreadPoolExecutor(1, "kv-read")
        self._writer = ThreadPoolExecutor(1, "kv-write")
        self._came = threading.Condition()

    def find(self, blocks: Iterable[Block]) -> Offer | None:
        found: list[Block] = []
        tier = "host"
        for block in blocks:
            if self._copy_of(block.key) is None:
                if self._files is None or block.key not in self._files:
                    break
                tier = "disk"
            found.append(block)
        if not found:
            return None
        if self._costs[tier] > self._page_cost:
            self._costs[tier] *= _DOUBT
            return None
        return Offer(tuple(found), tier)

    def fetch(self, offer: Offer, pages: Sequence[int]) -> Arrival:
        arrival = Arrival()
        self._reader.submit(self._fill, offer, pages, arrival)
        return arrival

    def _fill(self, offer: Offer, pages: Sequence[int], arrival: Arrival) -> None:
        begin = self._clock()
        came = 0
        try:
            for block, page in zip(offer.blocks, pages, strict=True):
                data, tier = self._copy_of(block.key), "host"
                if data is None and self._files is not None:
                    data, tier = self._files.read(block), "disk"
                if data is None:
                    self._counts["damaged"] += 1
                    break
                self._pool.write(page, data)
                self._counts[tier + "_hit"] += 1
                came += 1
            cost = (self._clock() - begin) / len(offer.blocks)
            self._costs[offer.tier] += _SMOOTHING * (cost - self._costs[offer.tier])
        except Exception:
            log.exception("pages could not be fetched from %s", offer.tier)
        finally:  # whatever happens, somebody waits for it
            with self._came:
                arrival.pages = came
                self._came.notify_all()

    def extend(self, key: bytes, ttl: float) -> bool:
        if key in self._host:
            self._host.move_to_end(key)
        if self._files is None:
            return key in self._host
        if key in self._unwritten:
            return True
        if not self._files.extend(key, ttl):
            return False
        if not self._unstamped:
            self._write_later(self._stamp, self._files)
        self._unstamped.append(key)
        return True

    def _stamp(self, files: PageFiles) -> None:
        keys, self._unstamped = self._unstamped, []
        files.stamp(keys)

    def save(self, block: Block, page: int, ttl: float) -> None:
        data: Bytes | None = None
        if self._most_host:
            data = self._host[block.key] = self._pool.read(page)
            self._parents[block.key] = block.parent
            while len(self._host) > self._most_host:
                del self._parents[self._host.popitem(last=False)[0]]
        if self._files is None:
            return
        if len(self._unwritten) >= self._most_unwritten:
            self._counts["skipped"] += 1
            return
        self._unwritten[block.key] = self._pool.read(page) if data is None else data
        self._write_later(self._write, self._files, block, ttl)

    def _write(self, files: PageFiles, block: Block, ttl: float) -> None:
        written = False
        try:
            written = files.write(block, self._unwritten[block.key], ttl)
        finally:
            del self._unwritten[block.key]
            self._counts["saved" if written else "skipped"] += 1

    def _write_later(self, job: Callable[..., None], *args: object) -> None:
        def run() -> None:
            try:
                job(*args)
            except Exception:  # nobody looks at what became of it
                log.exception("the KV cache on disk")

        self._writer.submit(run)

    def forget(self, blocks: Sequence[Block]) -> None:
        for key in loose_end(blocks, self._parents):
            del self._host[key], self._parents[key]
        if self._files is not None:
            # Behind what is being written, so that a page that goes on from one of these is seen.
            self._write_later(self._files.remove_chain, blocks)

    def tidy(self) -> None:
        if self._files is not None:
            self._write_later(self._files.expire)

    def wait(self, seconds: float) -> None:
        with self._came:
            self._came.wait(seconds)

    def settle(self) -> None:
        """Until all that was begun is done."""
        for executor in (self._reader, self._writer):
            executor.submit(lambda: None).result()

    def counts(self) -> dict[str, int]:
        return {**self._counts, "disk_bytes": self._files.bytes if self._files is not None else 0}

    def _copy_of(self, key: bytes) -> Bytes | None:
        return self._host.get(key, self._unwritten.get(key))

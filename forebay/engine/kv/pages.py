"""Page ids, who holds them, and the conservation law (law 5).

A page is in exactly one state, first match wins::

    running   a sequence's table holds it (refs > 0)
    pinned    no table holds it; the prefix tree keeps it and it may not be evicted
    cached    no table holds it; the prefix tree keeps it until somebody needs the room
    free      nobody knows it

    who                          may                      when
    Scheduler (admit, grow)      take / share             plan()
    Scheduler (end, preempt)     drop                     commit() of the last step that used the page, or plan()
    PrefixTree                   keep / forget / pin      insert, evict
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

#: Tokens in one page.
PAGE_SIZE = 16


class Pages:
    """``total`` page ids 0..total-1. All operations are O(pages touched)."""

    def __init__(self, total: int) -> None:
        self.total = total
        self._free = list(range(total - 1, -1, -1))
        self._refs = [0] * total
        self._kept = bytearray(total)
        self._pins = [0] * total
        self.running = 0
        self.pinned = 0
        self.cached = 0

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def available(self) -> int:
        """Pages that a sequence could get: free ones and those that eviction would free."""
        return len(self._free) + self.cached

    def counts(self) -> dict[str, int]:
        return {"free": self.free, "cached": self.cached, "pinned": self.pinned, "running": self.running}

    def refs(self, page: int) -> int:
        return self._refs[page]

    def evictable(self, page: int) -> bool:
        return bool(self._kept[page]) and not self._refs[page] and not self._pins[page]

    def take(self, n: int) -> list[int] | None:
        """``n`` free pages for one table, or None (then nothing changed)."""
        if n > len(self._free):
            return None
        taken = [self._free.pop() for _ in range(n)]
        for page in taken:
            self._refs[page] = 1
        self.running += n
        return taken

    def share(self, pages: Iterable[int]) -> None:
        """One more table holds these pages of the prefix tree."""
        for page in pages:
            if not self._refs[page]:
                self._leave_idle(page)
                self.running += 1
            self._refs[page] += 1

    def drop(self, pages: Iterable[int]) -> list[int]:
        """A table lets go. Returns those that became evictable."""
        idle = []
        for page in pages:
            if self._refs[page] <= 0:
                raise RuntimeError(f"page {page} dropped more often than held")
            self._refs[page] -= 1
            if self._refs[page]:
                continue
            self.running -= 1
            if not self._kept[page]:
                self._free.append(page)
                continue
            self._enter_idle(page)
            if not self._pins[page]:
                idle.append(page)
        return idle

    def keep(self, page: int) -> None:
        """The prefix tree takes a page that a table holds."""
        if self._kept[page] or not self._refs[page]:
            raise RuntimeError(f"page {page} cannot enter the tree")
        self._kept[page] = 1

    def forget(self, page: int) -> None:
        """The prefix tree lets an evictable page go; it is free then."""
        if not self.evictable(page):
            raise RuntimeError(f"page {page} cannot leave the tree")
        self.cached -= 1
        self._kept[page] = 0
        self._free.append(page)

    def pin(self, page: int) -> None:
        if not self._kept[page]:
            raise RuntimeError(f"page {page} is not in the tree")
        if not self._refs[page]:
            self._leave_idle(page)
        self._pins[page] += 1
        if not self._refs[page]:
            self._enter_idle(page)

    def unpin(self, page: int) -> None:
        if not self._pins[page]:
            raise RuntimeError(f"page {page} is not pinned")
        if not self._refs[page]:
            self._leave_idle(page)
        self._pins[page] -= 1
        if not self._refs[page]:
            self._enter_idle(page)

    def _enter_idle(self, page: int) -> None:
        if self._pins[page]:
            self.pinned += 1
        else:
            self.cached += 1

    def _leave_idle(self, page: int) -> None:
        if not self._kept[page]:
            raise RuntimeError(f"page {page} is free")
        if self._pins[page]:
            self.pinned -= 1
        else:
            self.cached -= 1

    def check(self, tables: Iterable[Sequence[int]], tree: Iterable[int]) -> None:
        """Recount everything from scratch. Raises RuntimeError naming the first page or count that is wrong.

        ``tables``: the page tables of all living sequences. ``tree``: the page of every node of the prefix tree.
        """
        held: Counter[int] = Counter(page for table in tables for page in table)
        kept = list(tree)
        if len(set(kept)) != len(kept):
            raise RuntimeError("a page stands twice in the prefix tree")
        if set(kept) != {p for p in range(self.total) if self._kept[p]}:
            raise RuntimeError("the prefix tree and the pages disagree about what is kept")
        for page in range(self.total):
            if held[page] != self._refs[page]:
                raise RuntimeError(f"page {page}: {held[page]} tables hold it, {self._refs[page]} are counted")
        free = set(self._free)
        if len(free) != len(self._free):
            raise RuntimeError("a page is free twice")
        if bad := free & (held.keys() | set(kept)):
            raise RuntimeError(f"pages {sorted(bad)} are free and in use")
        idle = [p for p in kept if not held[p]]
        truth = {
            "free": len(free),
            "cached": sum(not self._pins[p] for p in idle),
            "pinned": sum(bool(self._pins[p]) for p in idle),
            "running": len(held),
        }
        if truth != self.counts() or sum(truth.values()) != self.total:
            raise RuntimeError(f"pages are counted as {self.counts()}, but are {truth} of {self.total}")

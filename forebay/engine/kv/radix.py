"""The prefix tree: which token prefixes have their K and V in which pages.

One node is one whole page under one parent, so the path to a node spells its whole prefix; children are found by
the page's tokens themselves, compared in full (never by a hash alone). One root per salt: no sharing across.
Where SGLang's RadixAttention compresses runs of tokens into edges, whole pages make every edge one page and no
node ever splits.

Eviction takes the least recently used leaf that no table holds and nobody pinned. A table that holds a page holds
all its ancestors too, so an idle page's descendants are idle, and every cached page can be evicted in the end.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence

from .pages import PAGE_SIZE, Pages

Key = tuple[int, ...]


class Node:
    """One page of a prefix. ``used`` is a logical time: the tree's tick at the last hit."""

    __slots__ = ("children", "key", "page", "parent", "used")

    def __init__(self, key: Key, page: int, parent: Node | Root, used: int) -> None:
        self.key = key
        self.page = page
        self.parent = parent
        self.children: dict[Key, Node] = {}
        self.used = used


class Root:
    """The empty prefix under one salt."""

    __slots__ = ("children", "salt")

    def __init__(self, salt: str) -> None:
        self.salt = salt
        self.children: dict[Key, Node] = {}


class PrefixTree:
    def __init__(self, pages: Pages) -> None:
        self._pages = pages
        self._roots: dict[str, Root] = {}
        self._tick = 0
        self._nodes: dict[int, Node] = {}
        # Lazy heap of (used, page): an entry counts only while the node is an evictable leaf and `used` still holds.
        self._leaves: list[tuple[int, int]] = []

    def __len__(self) -> int:
        return len(self._nodes)

    def match(self, salt: str, ids: Sequence[int], limit: int) -> list[Node]:
        """The longest known prefix of ``ids``, at most ``limit`` pages, as the path of its nodes."""
        path: list[Node] = []
        parent: Node | Root | None = self._roots.get(salt)
        if parent is None:
            return path
        for i in range(min(limit, len(ids) // PAGE_SIZE)):
            node = parent.children.get(tuple(ids[i * PAGE_SIZE : (i + 1) * PAGE_SIZE]))
            if node is None:
                break
            path.append(node)
            parent = node
        return path

    def touch(self, path: Sequence[Node]) -> None:
        """The path was used now."""
        self._tick += 1
        for node in path:
            node.used = self._tick
        if path:
            self._offer(path[-1])

    def insert(self, salt: str, parent: Node | None, key: Key, page: int) -> Node:
        """Add one page (held by the caller's table) under ``parent`` (None: the salt's root).

        Returns the canonical node. Where it has another page than the one given, that prefix was known already:
        the caller must put the canonical page into its table before it drops its own (law 4).
        """
        above = parent if parent is not None else self._roots.setdefault(salt, Root(salt))
        node = above.children.get(key)
        self._tick += 1
        if node is None:
            self._pages.keep(page)
            node = above.children[key] = self._nodes[page] = Node(key, page, above, self._tick)
        node.used = self._tick
        return node

    def idle(self, pages: Sequence[int]) -> None:
        """These pages have just become evictable (Pages.drop said so)."""
        for page in pages:
            self._offer(self._nodes[page])

    def evict(self, n: int) -> int:
        """Free at least ``n`` pages if there are as many evictable ones. Returns how many were freed."""
        freed = 0
        while freed < n and self._leaves:
            used, page = heapq.heappop(self._leaves)
            node = self._nodes.get(page)
            if node is None or node.used != used or node.children or not self._pages.evictable(page):
                continue
            self._remove(node)
            freed += 1
        return freed

    def pin(self, path: Sequence[Node]) -> None:
        """Keep a whole path (from the root down) out of eviction until unpin."""
        for node in path:
            self._pages.pin(node.page)

    def unpin(self, path: Sequence[Node]) -> None:
        for node in path:
            self._pages.unpin(node.page)
        for node in path:
            self._offer(node)

    def all_pages(self) -> Iterator[int]:
        """The page of every node that can be reached from a root."""
        stack: list[Node | Root] = list(self._roots.values())
        while stack:
            at = stack.pop()
            if isinstance(at, Node):
                yield at.page
            stack.extend(at.children.values())

    def _remove(self, node: Node) -> None:
        del node.parent.children[node.key]
        del self._nodes[node.page]
        self._pages.forget(node.page)
        if isinstance(node.parent, Node):
            self._offer(node.parent)
        elif not node.parent.children:
            del self._roots[node.parent.salt]

    def _offer(self, node: Node) -> None:
        """Put a node up for eviction if it is a leaf that nobody needs."""
        if node.children or not self._pages.evictable(node.page):
            return
        heapq.heappush(self._leaves, (node.used, node.page))
        if len(self._leaves) > 64 + 2 * len(self._nodes):
            live = {(n.used, n.page) for n in self._nodes.values() if not n.children}
            self._leaves = [entry for entry in live if self._pages.evictable(entry[1])]
            heapq.heapify(self._leaves)

"""The prefix tree: which token prefixes have their K and V in which pages.

One node is one whole page under one parent, so the path to a node spells its whole prefix; children are found by
the page's tokens themselves, compared in full (never by a hash alone). One root per salt, and one for what all tenants
share (``Realm``): no sharing across.
Where SGLang's RadixAttention compresses runs of tokens into edges, whole pages make every edge one page and no
node ever splits.

Eviction takes the leaf that is worth least, of those that no table holds and nobody pinned. What a page is worth is a
time: when it was last used, and for a page of a conversation so much more as its next turn may take to come. Among
equals the least recently used goes. A table that holds a page holds all its ancestors too, so an idle page's
descendants are idle, and every cached page can be evicted in the end.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence

from .pages import PAGE_SIZE, Pages
from .tiers import Block, Key, Realm, block_of, root_key

#: The page of a node that is no longer in the tree.
GONE = -1


class Node:
    """One page of a prefix. ``used`` is a logical time: the tree's tick at the last hit. ``worth`` and ``until`` are
    seconds of the scheduler's clock: the conversation that the page belongs to may go on until then (0: to none)."""

    __slots__ = ("_block", "children", "key", "page", "parent", "until", "used", "worth")

    def __init__(self, key: Key, page: int, parent: Node | Root, used: int) -> None:
        self.key = key
        self.page = page
        self.parent = parent
        self.children: dict[Key, Node] = {}
        self.used = used
        self.worth = 0.0
        self.until = 0.0
        self._block: Block | None = None

    @property
    def block(self) -> Block:
        """What lower tiers know it by. Hashed when first asked for: most pages never are."""
        if self._block is None:
            lacking: list[Node] = []
            at: Node | Root = self
            while isinstance(at, Node) and at._block is None:
                lacking.append(at)
                at = at.parent
            above = root_key(at.name) if isinstance(at, Root) else at.block.key
            for node in reversed(lacking):
                node._block = block_of(above, node.key)
                above = node._block.key
        return self._block  # type: ignore[return-value]  # set above


class Root:
    """The empty prefix."""

    __slots__ = ("children", "name")

    def __init__(self, name: str) -> None:
        self.name = name
        self.children: dict[Key, Node] = {}


class PrefixTree:
    """``evicted`` is told of each page that is about to go."""

    def __init__(self, pages: Pages, evicted: Callable[[Node], None] = lambda node: None) -> None:
        self._pages = pages
        self._evicted = evicted
        self._roots: dict[str, Root] = {}
        self._tick = 0
        self._nodes: dict[int, Node] = {}
        # Lazy heap of (worth, used, page): an entry counts while the node is an evictable leaf and both still hold.
        self._leaves: list[tuple[float, int, int]] = []

    def __len__(self) -> int:
        return len(self._nodes)

    def match(self, realm: Realm, ids: Sequence[int], limit: int) -> list[Node]:
        """The longest known prefix of ``ids``, at most ``limit`` pages, as the path of its nodes."""
        path: list[Node] = []
        parent: Node | Root | None = self._roots.get(realm.root)
        if parent is None:
            return path
        for i in range(min(limit, len(ids) // PAGE_SIZE)):
            node = parent.children.get(realm.key(ids, i))
            if node is None:
                break
            path.append(node)
            parent = node
        return path

    def touch(self, path: Sequence[Node], worth: float = 0.0, until: float = 0.0) -> None:
        """The path was used now."""
        self._tick += 1
        for node in path:
            self._use(node, worth, until)
        if path:
            self._offer(path[-1])

    def insert(
        self, realm: Realm, parent: Node | None, key: Key, page: int, worth: float = 0.0, until: float = 0.0
    ) -> Node:
        """Add one page (held by the caller's table) under ``parent`` (None: the realm's root).

        Returns the canonical node. Where it has another page than the one given, that prefix was known already:
        the caller must put the canonical page into its table before it drops its own (law 4).
        """
        above = parent if parent is not None else self._roots.setdefault(realm.root, Root(realm.root))
        node = above.children.get(key)
        self._tick += 1
        if node is None:
            self._pages.keep(page)
            node = above.children[key] = self._nodes[page] = Node(key, page, above, self._tick)
        self._use(node, worth, until)
        return node

    def _use(self, node: Node, worth: float, until: float) -> None:
        node.used = self._tick
        node.worth = max(node.worth, worth)
        node.until = max(node.until, until)

    def idle(self, pages: Sequence[int]) -> None:
        """These pages have just become evictable (Pages.drop said so)."""
        for page in pages:
            self._offer(self._nodes[page])

    def evict(self, n: int) -> int:
        """Free at least ``n`` pages if there are as many evictable ones. Returns how many were freed."""
        freed = 0
        while freed < n and self._leaves:
            worth, used, page = heapq.heappop(self._leaves)
            node = self._nodes.get(page)
            if node is None or (node.worth, node.used) != (worth, used) or not self._removable(node):
                continue
            self._evicted(node)
            self._remove(node)
            freed += 1
        return freed

    def prune(self, path: Sequence[Node]) -> None:
        """Free what only this path has, from its end on, and tell nobody, also of what can only go later because a
        sequence holds it."""
        below: Node | None = None
        for node in reversed(path):
            shared = any(child is not below for child in node.children.values())
            if shared or self._pages.refs(node.page) > 1:
                return
            node.worth = node.until = 0.0
            below = node
            if self._removable(node):
                self._remove(node)

    def _removable(self, node: Node) -> bool:
        return not node.children and self._pages.evictable(node.page)

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
        node.page = GONE
        if isinstance(node.parent, Node):
            self._offer(node.parent)
        elif not node.parent.children:
            del self._roots[node.parent.name]

    def _offer(self, node: Node) -> None:
        """Put a node up for eviction if it is a leaf that nobody needs."""
        if not self._removable(node):
            return
        heapq.heappush(self._leaves, (node.worth, node.used, node.page))
        if len(self._leaves) > 64 + 2 * len(self._nodes):
            self._leaves = [(n.worth, n.used, n.page) for n in self._nodes.values() if self._removable(n)]
            heapq.heapify(self._leaves)

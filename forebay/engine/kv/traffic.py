"""Pages between the pool and the lower tiers: what is fetched before a sequence starts, and what is saved of a
conversation when its turn ends, or when it must leave the pool. No torch, no clock, no I/O.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from .pages import PAGE_SIZE, Pages
from .radix import GONE, Node, PrefixTree
from .tiers import Arrival, Offer, Realm, Tiers, blocks_of, root_key

#: Pages copied out of the pool between two steps, so that no step waits for long.
SAVES_PER_STEP = 16
LOOK = 1 / 32  # of that, for a page that is there already
#: Pages that may wait to be copied. Those beyond are not, unless they are evicted.
MOST_UNSAVED = 1 << 14
#: A conversation's page is kept before a stranger's that was used so much later: this part of its time to live. Next
#: turns come early or never, so the whole of it would keep the dead at the cost of those who are here.
CREDIT = 0.25
#: Seconds between two looks for what has expired.
TIDY = 60.0


class Fetch:
    """Pages on their way to the pool, behind ``path``. ``table`` holds both until they are there or have failed."""

    def __init__(
        self, realm: Realm, ids: Sequence[int], ttl: float, path: list[Node], pages: list[int], offer: Offer
    ) -> None:
        self.realm = realm
        self.ids = ids
        self.ttl = ttl
        self.path = path
        self.pages = pages
        self.blocks = offer.blocks
        self.tier = offer.tier
        self.arrival = Arrival()
        self.table = [*(node.page for node in path), *pages]
        self.underway = True


class Traffic:
    def __init__(self, pages: Pages, tiers: Tiers) -> None:
        self.tree = PrefixTree(pages, self._evicted)
        self.tiers = tiers
        self.fetches: list[Fetch] = []
        self._pages = pages
        self._unsaved: deque[Node] = deque()
        self._now = 0.0
        self._tidied = 0.0

    @property
    def busy(self) -> bool:
        return bool(self.fetches or self._unsaved)

    def fetch(self, realm: Realm, ids: Sequence[int], path: list[Node], most: int, ttl: float) -> Fetch | None:
        """Begin to fetch what lower tiers have of the pages behind ``path``, up to ``most`` in all; or the fetch that
        is at it already. None: there is none, or no room."""
        if len(path) >= most:
            return None
        parent = path[-1].block.key if path else root_key(realm.root)
        offer = self.tiers.find(blocks_of(realm, parent, ids, len(path), most))
        if offer is None:
            return None
        for other in self.fetches:
            if other.blocks[0] == offer.blocks[0]:
                return other
        self._pages.share(node.page for node in path)  # before something is evicted
        need = len(offer.blocks)
        if need > self._pages.free:
            self.tree.evict(need - self._pages.free)
        pages = self._pages.take(need)
        if pages is None:
            self.tree.idle(self._pages.drop(node.page for node in path))
            return None
        fetch = Fetch(realm, ids, ttl, path, pages, offer)
        fetch.arrival = self.tiers.fetch(offer, pages)
        self.fetches.append(fetch)
        return fetch

    def work(self, now: float) -> None:
        """What there is to do between two steps."""
        self._now = now
        for fetch in self.fetches:
            if fetch.arrival.pages is not None:
                self._insert(fetch, fetch.arrival.pages)
        self.fetches = [fetch for fetch in self.fetches if fetch.underway]
        if now >= self._tidied + TIDY:
            self._tidied = now
            self.tiers.tidy()
        spent = 0.0
        while self._unsaved and spent < SAVES_PER_STEP:
            spent += 1 if self._save(self._unsaved.popleft()) else LOOK

    def _insert(self, fetch: Fetch, came: int) -> None:
        fetch.underway = False
        at = fetch.path[-1] if fetch.path else None
        for i in range(came):
            page = fetch.pages[i]
            key = fetch.realm.key(fetch.ids, len(fetch.path) + i)
            at = self.tree.insert(fetch.realm, at, key, page, *self.worth(fetch.ttl))
            if at.page != page:  # computed meanwhile
                self._pages.share([at.page])
                fetch.table[len(fetch.path) + i] = at.page
                self._pages.drop([page])
        self.tree.idle(self._pages.drop(fetch.table))

    def worth(self, ttl: float) -> tuple[float, float]:
        """What a page is worth that is used now, and until when its conversation may go on."""
        return self._now + CREDIT * ttl, self._now + ttl if ttl else 0.0

    def keep(self, path: Sequence[Node]) -> None:
        """Have these pages saved, the last of them first: where room is made later, what was saved first goes first,
        and without its beginning the rest of a path is of no use."""
        room = max(0, MOST_UNSAVED - len(self._unsaved))
        self._unsaved.extend(reversed(path[:room]))

    def forget(self, realm: Realm, ids: Sequence[int], spare: int) -> None:
        """Free what only this sequence of tokens has, in all tiers; but its first ``spare`` pages."""
        end = len(ids) // PAGE_SIZE
        self.tree.prune(self.tree.match(realm, ids, end)[spare:])
        self.tiers.forget(list(blocks_of(realm, root_key(realm.root), ids, 0, end))[spare:])

    def _evicted(self, node: Node) -> None:
        if node.until > self._now:
            self._save(node)

    def _save(self, node: Node) -> bool:
        """Whether the page had to be copied."""
        ttl = node.until - self._now
        if node.page == GONE or ttl <= 0 or self.tiers.extend(node.block.key, ttl):
            return False
        self.tiers.save(node.block, node.page, ttl)
        return True

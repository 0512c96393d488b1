"""How much of a prompt the engine will probably find in its prefix cache, guessed in the front from what was sent there
lately: a request's cost is what must be computed, and it is judged before the engine has seen it.

A page is known by a hash over its tokens and the number that the page before it got when it was remembered. So a page
that is forgotten takes all behind it along, in every chain, at no cost: remembered anew, it has another number. That is
as the engine has it, where a page is evicted only when nothing goes on from it. Two pages of one hash, and whatever
else is wrong here, cost a wrong guess and nothing more.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from itertools import islice

from ..engine.kv.pages import PAGE_SIZE
from ..engine.kv.tiers import Realm
from ..engine.sequence import Emit

#: More is never remembered: two million tokens, in about 18 MB.
MOST_PAGES = 1 << 17


def worth_remembering(pool: int, *, lower_tiers: bool) -> int:
    """Pages that the engine may have, of a ``pool`` of so many. The tiers below it hold conversations only, and how
    many pages their bytes are is not known here: they count as one more pool."""
    return min(MOST_PAGES, pool * (2 if lower_tiers else 1))


class Prefixes:
    """The ``limit_pages`` whole pages that were used last, as chains from a root of ``Realm``; each takes about 130
    bytes. Not for several threads."""

    def __init__(self, limit_pages: int) -> None:
        self._limit = limit_pages
        # Key -> number, the least recently used first: of a chain, the pages behind before those that lead to them.
        self._pages: dict[int, int] = {}
        self._last = secrets.randbits(60)  # numbers that nobody can make up pages for

    def __len__(self) -> int:
        return len(self._pages)

    def known(self, realm: Realm, ids: Sequence[int]) -> int:
        """Tokens of a prompt that need probably not be computed. Its last one always must be, for what comes next."""
        return self._tokens(len(self._path(realm, ids)), ids)

    def add(self, realm: Realm, ids: Sequence[int]) -> int:
        """The engine has these tokens, or will have computed them before the next that come. Returns what was known
        of them before."""
        path = self._path(realm, ids)
        known = len(path)
        above = self._pages[path[-1]] if path else hash(realm.root)
        for page in range(known, len(ids) // PAGE_SIZE):
            key = _key(above, realm, ids, page)
            self._last += 1
            self._pages[key] = above = self._last
            path.append(key)
        for key in reversed(path):
            self._pages[key] = self._pages.pop(key)
        excess = len(self._pages) - self._limit
        if excess > 0:
            # Many at once: each search for the first of a dict passes the holes that those before it have left.
            for key in list(islice(self._pages, excess + self._limit // 16)):
                del self._pages[key]
        return self._tokens(known, ids)

    def correct(self, realm: Realm, ids: Sequence[int], found: int) -> None:
        """The engine had no more than ``found`` tokens of these."""
        for key in self._path(realm, ids)[found // PAGE_SIZE :]:
            self._pages.pop(key, None)  # twice the same, if hashes collide

    def _path(self, realm: Realm, ids: Sequence[int]) -> list[int]:
        """Keys of the pages of ``ids`` that are remembered, from the first on."""
        path: list[int] = []
        above = hash(realm.root)
        for page in range(len(ids) // PAGE_SIZE):
            key = _key(above, realm, ids, page)
            number = self._pages.get(key)
            if number is None:
                break
            path.append(key)
            above = number
        return path

    @staticmethod
    def _tokens(pages: int, ids: Sequence[int]) -> int:
        return min(pages, max(0, len(ids) - 1) // PAGE_SIZE) * PAGE_SIZE


class Trace:
    """What one request does to the engine's cache, and what the engine's news of it tell. ``ids``: its prompt, just
    submitted."""

    def __init__(self, prefixes: Prefixes, realm: Realm, ids: list[int]) -> None:
        self._prefixes = prefixes
        self._realm = realm
        self._ids = ids
        self._written: list[int] = []
        # At once: others with the same beginning will wait for this one to compute it.
        self._expected = prefixes.add(realm, ids)

    def hear(self, emit: Emit) -> None:
        if emit.started and emit.cached < self._expected:
            self._expected = emit.cached
            self._prefixes.correct(self._realm, self._ids, emit.cached)
            self._prefixes.add(self._realm, self._ids)  # what it lacked has been computed since, if it wrote anything
        self._written += emit.tokens

    def end(self, counted: int) -> None:
        """It is over; ``counted`` tokens of its answer are kept."""
        if self._written:
            # The state of the last one is never computed.
            answer = self._written[: min(counted, len(self._written) - 1)]
            self._prefixes.add(self._realm, [*self._ids, *answer])
        else:  # it has left, or was sent away, before its prompt was computed
            self._prefixes.correct(self._realm, self._ids, self._expected)


def _key(above: int, realm: Realm, ids: Sequence[int], page: int) -> int:
    """Of the page behind the one that has the number ``above``. As in Realm.key, the first page behind what all may
    share is a salt's own."""
    tokens = ids[page * PAGE_SIZE : (page + 1) * PAGE_SIZE]
    return hash((above, realm.salt, *tokens)) if page == realm.public > 0 else hash((above, *tokens))

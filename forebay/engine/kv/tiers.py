"""What the scheduler asks of the tiers below the device: memory of the host, and disk. No torch, no clock, no I/O.

A page's K and V depend on all tokens up to its end and on nothing else, so they are known by a key: SHA-256 over the
key of the page before and the page's own tokens, beginning with the salt's (law 11).
"""

from __future__ import annotations

import hashlib
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from .pages import PAGE_SIZE

#: A page's place under the one before it: its tokens. The first behind what all tenants share has the salt in front.
Key = tuple[int | str, ...]
#: The root of what all tenants share: no salt, which is a hash or nothing, is written so.
PUBLIC = "public"


class Realm(NamedTuple):
    """Who may share pages: sequences of one ``salt``, and of any salt those whose first ``public`` pages are the same
    (and declared to be nobody's own)."""

    salt: str = ""
    public: int = 0

    @property
    def root(self) -> str:
        return PUBLIC if self.public else self.salt

    def key(self, ids: Sequence[int], page: int) -> Key:
        tokens = tuple(ids[page * PAGE_SIZE : (page + 1) * PAGE_SIZE])
        return (self.salt, *tokens) if page == self.public > 0 else tokens


class Block(NamedTuple):
    """One page's tokens under their key, and the key of the page before them."""

    key: bytes
    parent: bytes
    ids: tuple[int, ...]


def root_key(root: str) -> bytes:
    return hashlib.sha256(b"root" + root.encode()).digest()


def block_of(parent: bytes, key: Key) -> Block:
    salt = "".join(part for part in key[:1] if isinstance(part, str))
    if salt:
        parent = hashlib.sha256(b"salt" + parent + salt.encode()).digest()
    ids = tuple(part for part in key if isinstance(part, int))
    return Block(hashlib.sha256(parent + array("q", ids).tobytes()).digest(), parent, ids)


def blocks_of(realm: Realm, parent: bytes, ids: Sequence[int], first: int, end: int) -> Iterator[Block]:
    """Those of the pages ``first`` to before ``end`` of a sequence; ``parent`` is the key of the page before."""
    for page in range(first, end):
        block = block_of(parent, realm.key(ids, page))
        yield block
        parent = block.key


def loose_end(blocks: Sequence[Block], parents: Mapping[bytes, bytes]) -> list[bytes]:
    """Keys of a chain that are there (``parents``: key of all that is there -> that of the page before), from its end
    on, up to the first that another chain goes on from."""
    behind = Counter(parents.values())
    loose = []
    for block in reversed(blocks):
        if behind[block.key]:
            break
        if block.key in parents:
            behind[block.parent] -= 1
            loose.append(block.key)
    return loose


@dataclass(frozen=True, slots=True)
class Offer:
    """Pages one after the other that lower tiers have. ``tier`` is the slowest that has any of them."""

    blocks: tuple[Block, ...]
    tier: str


class Arrival:
    """Pages on their way to the device. ``pages``: how many of them are there, from the first on; None: not yet."""

    pages: int | None = None


class Tiers(Protocol):
    """Nothing here waits for a disk, except ``wait``."""

    def find(self, blocks: Iterable[Block]) -> Offer | None:
        """As many as there are from the first on, if fetching them costs less than computing them."""
        ...

    def fetch(self, offer: Offer, pages: Sequence[int]) -> Arrival:
        """Begin to write them into these pages of the pool, which belong to the arrival until it says what came."""
        ...

    def extend(self, key: bytes, ttl: float) -> bool:
        """Whether it has the page; if so, it keeps it for ``ttl`` more seconds at least."""
        ...

    def save(self, block: Block, page: int, ttl: float) -> None:
        """Copy the page now, and keep it for ``ttl`` seconds where there is room."""
        ...

    def forget(self, blocks: Sequence[Block]) -> None:
        """Let go of a chain of pages from its end on, up to the first that another chain goes on from."""
        ...

    def tidy(self) -> None:
        """Let go of what has expired."""
        ...

    def wait(self, seconds: float) -> None:
        """Until some arrival is over, or the time."""
        ...

    def counts(self) -> dict[str, int]:
        """Pages by what became of them, cumulative: ``<tier>_hit``, ``saved``, ``skipped``, ``damaged``; and
        ``disk_bytes`` now."""
        ...


class NoTiers:
    """The device has all there is."""

    def find(self, blocks: Iterable[Block]) -> Offer | None:
        return None

    def fetch(self, offer: Offer, pages: Sequence[int]) -> Arrival:
        raise RuntimeError("nothing was offered")

    def extend(self, key: bytes, ttl: float) -> bool:
        return True

    def save(self, block: Block, page: int, ttl: float) -> None:
        pass

    def forget(self, blocks: Sequence[Block]) -> None:
        pass

    def tidy(self) -> None:
        pass

    def wait(self, seconds: float) -> None:
        pass

    def counts(self) -> dict[str, int]:
        return {}

"""Who has had how much lately, so that the next turn goes to who has had least, and nobody takes the place of all.

A user's *use* is the tokens of its requests, fading with time: so nobody saves up turns, and one who has been away is
like a newcomer (what lifting a counter on re-entry does in "Fairness in Serving Large Language Models", Sheng et al.,
2024). Counters of those alone who have requests open would not do: in a chat hardly anybody has, and one who asks ten
times as often would be the equal of all whom he delays.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from ..contract import RateLimited

User = tuple[str, str]
#: Seconds in which a use fades to a third; after MEMORY without a request a user is here no more, and has no part.
FADING, MEMORY = 120.0, 120.0
#: So many users without open requests are remembered; of more, those who were not here for longest are forgotten.
REMEMBERED = 10_000
#: Seconds over which a user's tokens, and a key's requests, are counted.
_TOKEN_SPAN, _KEY_SPAN = 60.0, 10.0
_YOUNG = 10.0  # seconds


@dataclass(slots=True)
class _Account:
    at: float  # when it was so much
    used: float = 0.0
    last: float = -math.inf  # the latest tag: later requests of one user never go before earlier ones
    open: int = 0
    bucket: Bucket | None = None


class Bucket:
    """A token bucket: ``rate`` a second, and no more than ``span`` seconds' worth at once (but at least one)."""

    __slots__ = ("_at", "_left", "_most", "rate")

    def __init__(self, rate: float, span: float, now: float) -> None:
        self.rate = rate
        self._most = max(rate * span, 1.0)
        self._left, self._at = self._most, now

    def missing(self, amount: float, now: float) -> float:
        """Seconds until so much is there; what is more than the bucket holds needs a full one."""
        self._left = min(self._most, self._left + self.rate * (now - self._at))
        self._at = now
        return max(0.0, (min(amount, self._most) - self._left) / self.rate)

    def take(self, amount: float) -> None:
        self._left = min(self._most, self._left - amount)


class Keys:
    """Requests per second of each key. There are as many as the settings name."""

    def __init__(self) -> None:
        self._buckets: dict[str, Bucket] = {}

    def missing(self, key: str, rate: float, now: float) -> float:
        """Counts one more request, or tells in how many seconds it would be in order."""
        if not rate:
            return 0.0
        bucket = self._buckets.get(key)
        if bucket is None or bucket.rate != rate:
            bucket = self._buckets[key] = Bucket(rate, _KEY_SPAN, now)
        missing = bucket.missing(1.0, now)
        if not missing:
            bucket.take(1.0)
        return missing


class Users:
    """``share``, ``concurrency``, ``rate``: the settings user_share, user_concurrency and user_tokens. ``refuse`` makes
    the error of a message, a code and the seconds after which it may do."""

    def __init__(
        self,
        share: float,
        concurrency: int,
        rate: float,
        refuse: Callable[[str, str, float], RateLimited],
        now: float = 0.0,
    ) -> None:
        self._share = share
        self._concurrency = concurrency
        self._rate = rate
        self._refuse = refuse
        self._accounts: OrderedDict[User, _Account] = OrderedDict()  # who was not here for longest first
        self._total = 0.0
        self._at = self._begun = now

    def check(self, user: User, places: int, cost: float, now: float) -> None:
        """Raises RateLimited if the user may have no more now, however much room there is."""
        account = self._accounts.get(user)
        already = account.open if account is not None else 0
        if self._concurrency and already + places > self._concurrency:
            raise self._refuse(f"this user has {already} requests open already", "user_concurrency", 1.0)
        if account is not None and account.bucket is not None and (missing := account.bucket.missing(cost, now)):
            raise self._refuse("this user has had many tokens in the last minute", "user_tokens", missing)

    def check_share(self, user: User, cost: float, now: float, rate: float) -> None:
        """Raises RateLimited if the user has had more than its part, and more than what the others leave over of
        ``rate`` tokens per second. With 0, nothing is left over: to be asked where there is not enough for all. Who has
        had less than the ``cost`` of what it asks for has not had much."""
        account = self._accounts.get(user)
        if not self._share or account is None:
            return
        used, total = _faded(account.used, now - account.at), _faded(self._total, now - self._at)
        # At first less was seen than fades later, and of very little nothing follows.
        seen = FADING * (1 - math.exp(-max(now - self._begun, _YOUNG) / FADING))
        part = max(self._share * total / len(self._accounts), rate * seen - (total - used))
        if used > max(part, cost):
            # When it has faded to what the others leave over. (To its part it comes only as they ask for more.)
            wait = FADING * math.log(used / part) if part else FADING
            raise self._refuse("this user has had more than its part lately", "user_share", wait)

    def tag(self, user: User) -> float:
        """The place in the order of a request that would be taken in now: who has used least comes first.

        It is the logarithm of the use, and grows with time as all uses fade: so the order of two does not change while
        they wait.
        """
        account = self._accounts.get(user)
        if account is None or account.used <= 0:
            return -math.inf if account is None else account.last
        return max(math.log(account.used) + account.at / FADING, account.last)

    def enter(self, user: User, places: int, cost: float, now: float) -> None:
        """Another request of ``cost`` tokens begins."""
        account = self._accounts.setdefault(user, _Account(now))
        self._accounts.move_to_end(user)
        account.last = self.tag(user)
        account.open += places
        self._use(account, cost, now)
        if self._rate:
            if account.bucket is None:
                account.bucket = Bucket(self._rate, _TOKEN_SPAN, now)
            account.bucket.missing(0.0, now)
            account.bucket.take(cost)
        self._forget(now)

    def leave(self, user: User, places: int, saved: float, begun: float, now: float) -> None:
        """A request that had ``begun`` then is over, and took ``saved`` tokens less than it was to cost."""
        account = self._accounts[user]
        account.open -= places
        if not account.open:
            account.last = -math.inf
        self._accounts.move_to_end(user)
        left = _faded(account.used, now - account.at)
        self._use(account, -min(left, _faded(saved, now - begun)), now)
        if account.bucket is not None:
            account.bucket.take(-saved)

    @property
    def open(self) -> int:
        """Requests that are not over."""
        return sum(account.open for account in self._accounts.values())

    def _use(self, account: _Account, tokens: float, now: float) -> None:
        account.used = _faded(account.used, now - account.at) + tokens
        account.at = now
        self._total = max(0.0, _faded(self._total, now - self._at) + tokens)
        self._at = now

    def _forget(self, now: float) -> None:
        """Who was away for long, and has nothing open."""
        for _ in range(len(self._accounts)):
            user, account = next(iter(self._accounts.items()))
            if now - account.at < MEMORY and len(self._accounts) <= REMEMBERED:
                return
            if account.open:
                self._accounts.move_to_end(user)
            else:
                self._use(account, -_faded(account.used, now - account.at), now)
                del self._accounts[user]


def _faded(tokens: float, seconds: float) -> float:
    return tokens * math.exp(-seconds / FADING)

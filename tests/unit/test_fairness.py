"""Who has had how much lately: equal parts for all who want them, whatever the sizes of their requests."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay.admission import fairness
from forebay.admission.fairness import FADING, MEMORY, Bucket, Keys, User, Users
from forebay.contract import RateLimited


def refuse(why: str, code: str, wait: float) -> RateLimited:
    return RateLimited(why, retry_after=wait, code=code)


def named(name: str) -> User:
    return ("tenant", name)


def make(*, share: float = 0.0, concurrency: int = 0, rate: float = 0.0) -> Users:
    return Users(share, concurrency, rate, refuse, 0.0)


def faded(uses: list[tuple[float, float]], now: float) -> float:
    """What is left of uses, each with its time."""
    return sum(cost * math.exp((when - now) / FADING) for when, cost in uses)


def left(users: Users, name: str, now: float) -> float:
    """What is left now of what it has used."""
    account = users._accounts[named(name)]
    return account.used * math.exp((account.at - now) / FADING)


@dataclass
class Request:
    user: User
    cost: float
    tag: float
    number: int
    asked: float


class Server:
    """Serves who has the lowest tag, one request at a time, and notes what each user was given. Its clock stands still
    unless it is moved."""

    def __init__(self) -> None:
        self.users = make()
        self.now = 0.0
        self.line: list[Request] = []
        self.given: dict[str, list[tuple[float, float]]] = {}
        self.numbers = 0

    def ask(self, name: str, cost: float) -> Request:
        user = named(name)
        self.numbers += 1
        request = Request(user, cost, self.users.tag(user), self.numbers, self.now)
        self.users.enter(user, 1, cost, self.now)
        self.line.append(request)
        return request

    def turn(self) -> Request:
        """Give the next one its turn; it runs until ``end``."""
        request = min(self.line, key=lambda one: (one.tag, one.number))
        self.line.remove(request)
        self.given.setdefault(request.user[1], []).append((request.asked, request.cost))
        return request

    def end(self, request: Request, saved: float = 0.0) -> None:
        self.users.leave(request.user, 1, saved, request.asked, self.now)

    def serve(self) -> Request:
        request = self.turn()
        self.end(request)
        return request

    def has(self, name: str) -> float:
        """What is left of what it was given."""
        return faded(self.given.get(name, []), self.now)


Sizes = st.lists(st.integers(1, 1000), min_size=5, max_size=40)


@settings(max_examples=100, deadline=None)
@given(st.lists(Sizes, min_size=2, max_size=5), st.integers(1, 3), st.integers(0, 3), st.sampled_from([0.0, 0.5, 30.0]))
def test_users_that_always_want_more_get_the_same(
    sizes: list[list[int]], ahead: int, running: int, pace: float
) -> None:
    """What two users have been given, who always had requests waiting, differs by no more than the largest request of
    each, at any time; where no time passes, over any span of turns: the bound of start-time fair queueing."""
    server = Server()
    names = [str(number) for number in range(len(sizes))]
    left = {name: deque(float(size) for size in sizes[int(name)]) for name in names}
    largest = {name: max(sizes[int(name)]) for name in names}
    for name in names:
        for _ in range(ahead):
            server.ask(name, left[name].popleft())
    run: deque[Request] = deque()
    differences: dict[tuple[str, str], list[float]] = {pair: [0.0] for pair in combinations(names, 2)}
    while all(left.values()):
        request = server.turn()
        run.append(request)
        server.ask(request.user[1], left[request.user[1]].popleft())
        if len(run) > running:
            server.end(run.popleft())
        for (one, other), seen in differences.items():
            seen.append(server.has(one) - server.has(other))
        server.now += pace
    for (one, other), seen in differences.items():
        most = largest[one] + largest[other] + 1e-6
        assert max(map(abs, seen)) <= most
        assert pace or max(seen) - min(seen) <= most


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 3000), st.integers(1, 100), st.integers(1, 100), st.integers(1, int(MEMORY) - 1))
def test_who_comes_back_catches_up_with_what_is_left_of_the_others_use_and_no_more(
    before: int, ours: int, theirs: int, pause: int
) -> None:
    server = Server()
    server.ask("back", float(before))
    server.serve()
    for _ in range(40):
        server.now += pause / 40
        server.ask("busy", float(theirs))
        server.serve()
    lead = max(0.0, server.has("busy") - server.has("back"))
    server.given.clear()
    server.ask("back", float(ours))
    server.ask("busy", float(theirs))
    for _ in range(80):
        name = server.serve().user[1]
        server.ask(name, float(ours if name == "back" else theirs))
        assert server.has("back") - server.has("busy") <= lead + ours + theirs + 1e-6


def test_who_was_away_for_long_is_like_who_is_new() -> None:
    server = Server()
    server.ask("back", 10.0)
    server.serve()
    for _ in range(100):
        server.now += MEMORY / 99
        server.ask("busy", 50.0)
        server.serve()
    assert server.users.tag(named("back")) == server.users.tag(named("new"))
    assert server.users.tag(named("busy")) > server.users.tag(named("new"))


def test_a_use_fades_with_time() -> None:
    users = make()
    users.enter(named("early"), 1, 300.0, 0.0)
    users.enter(named("late"), 1, 300.0, FADING)
    users.enter(named("little"), 1, 100.0, FADING)
    early, late, little = (left(users, name, FADING) for name in ("early", "late", "little"))
    assert late / early == pytest.approx(math.e)
    assert late / little == pytest.approx(3.0)
    assert little < early < late


def test_who_sent_much_is_behind_who_sent_little() -> None:
    server = Server()
    heavy = [server.ask("heavy", 100.0) for _ in range(10)]
    light = [server.ask(f"light {number}", 100.0) for number in range(5)]
    order = [server.serve() for _ in range(15)]
    assert order == [heavy[0], *light, *heavy[1:]]


def test_a_large_request_counts_for_what_it_takes() -> None:
    server = Server()
    server.ask("large", 900.0)
    server.ask("large", 900.0)
    for _ in range(12):
        server.ask("small", 100.0)
    order = [server.serve().user[1] for _ in range(14)]
    assert order[:2] == ["large", "small"]
    assert order.index("large", 1) in (10, 11)  # nine small ones for one large


Asked = st.lists(
    st.tuples(st.sampled_from("abc"), st.integers(1, 500), st.integers(-500, 500), st.sampled_from([0.0, 1.0, 90.0])),
    max_size=40,
)


@settings(max_examples=100, deadline=None)
@given(Asked)
def test_first_come_first_served_within_a_user(asked: list[tuple[str, int, int, float]]) -> None:
    """Whatever their requests turn out to take."""
    server = Server()
    served: list[Request] = []
    for number, (name, cost, saved, pause) in enumerate(asked):
        server.now += pause
        server.ask(name, float(cost))
        if number % 3 == 2:
            request = server.turn()
            served.append(request)
            server.end(request, float(min(saved, request.cost)))
    while server.line:
        served.append(server.serve())
    for name in "abc":
        own = [request for request in served if request.user == named(name)]
        assert [request.number for request in own] == sorted(request.number for request in own)
    assert server.users.open == 0


def test_what_it_did_not_take_is_given_back_at_the_end() -> None:
    server = Server()
    short, long = server.ask("short", 1000.0), server.ask("long", 1000.0)
    for request, saved in ((short, 900.0), (long, -500.0)):
        server.turn()
        server.end(request, saved)
    assert left(server.users, "short", server.now) == pytest.approx(100.0)
    assert left(server.users, "long", server.now) == pytest.approx(1500.0)


def test_who_never_had_its_turn_has_had_nothing() -> None:
    server = Server()
    one = server.ask("one", 10.0)
    gone = server.ask("one", 1000.0)
    server.line.remove(gone)
    server.end(gone, gone.cost)
    assert server.users.open == 1
    assert left(server.users, "one", server.now) == pytest.approx(10.0)
    assert server.serve() is one
    assert server.users.open == 0


def test_who_waited_long_and_left_is_given_back_what_was_taken_and_no_more() -> None:
    users = make()
    for name in ("leaves", "other"):
        users.enter(named(name), 1, 1000.0, 0.0)
        users.leave(named(name), 1, 0.0, 0.0, 0.0)
    users.enter(named("leaves"), 1, 5000.0, 1.0)
    users.leave(named("leaves"), 1, 5000.0, 1.0, 61.0)
    users.enter(named("leaves"), 1, 1.0, 61.0)  # what it had before still counts
    used = {name: users._accounts[named(name)].used for name in ("leaves", "other")}
    used["other"] = left(users, "other", 61.0)
    assert used["leaves"] == pytest.approx(used["other"], rel=0.01)


def test_years_pass() -> None:
    users = make()
    for late in (1e6, 1e9):
        users.enter(named("a"), 1, 100.0, late)
        assert left(users, "a", late) == pytest.approx(100.0)
        assert left(users, "a", late + FADING) == pytest.approx(100.0 / math.e)
        users.leave(named("a"), 1, 0.0, late, late)


def test_what_one_had_fades_also_while_it_has_something_open() -> None:
    """Ten minutes after a burst, with a long answer that still runs, it is not behind who has had much just now."""
    users = make()
    users.enter(named("one"), 1, 10_000.0, 0.0)
    users.enter(named("one"), 1, 10.0, 0.0)
    users.leave(named("one"), 1, 0.0, 0.0, 1.0)
    users.enter(named("other"), 1, 5000.0, 600.0)
    assert users.tag(named("one")) < users.tag(named("other"))


def test_the_order_of_two_does_not_turn_by_waiting() -> None:
    """Both had theirs at one time: one asks again at once, the other, who has had more, half a minute later."""
    users = make()
    users.enter(named("less"), 1, 900.0, 0.0)
    users.enter(named("more"), 1, 1000.0, 0.0)
    earlier = users.tag(named("less"))
    users.enter(named("somebody"), 1, 1.0, 30.0)
    assert earlier < users.tag(named("more"))


def test_who_ended_a_long_answer_keeps_nobody_who_was_away_for_longer() -> None:
    users = make()
    users.enter(named("long"), 1, 10.0, 0.0)
    use(users, "short", 10.0, 1.0)
    users.leave(named("long"), 1, 0.0, 0.0, MEMORY - 1.0)
    use(users, "new", 10.0, MEMORY + 2.0)
    assert named("short") not in users._accounts


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 60), st.integers(1, 100), st.integers(0, 20)), max_size=200))
def test_the_memory_of_those_who_are_not_here_is_bounded(moves: list[tuple[int, int, int]]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fairness, "REMEMBERED", 8)
        users = make()
        now = 0.0
        for number, cost, pause in moves:
            now += pause
            users.enter(named(str(number)), 1, float(cost), now)
            users.leave(named(str(number)), 1, float(cost // 2), now, now)
            assert len(users._accounts) <= 9  # of those, one has only just gone
            whole = sum(left(users, name, now) for _, name in users._accounts)
            assert users._total == pytest.approx(whole)
        users.enter(named("last"), 1, 1.0, now + MEMORY)
        assert list(users._accounts) == [named("last")]


def test_one_long_answer_does_not_keep_the_memory_of_all() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fairness, "REMEMBERED", 8)
        users = make()
        users.enter(named("long"), 1, 10.0, 0.0)
        for number in range(100):
            users.enter(named(str(number)), 1, 10.0, float(number))
            users.leave(named(str(number)), 1, 0.0, float(number), float(number))
        assert len(users._accounts) <= 10
        assert named("long") in users._accounts


def test_who_has_requests_open_is_never_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fairness, "REMEMBERED", 2)
    users = make()
    for number in range(20):
        users.enter(named(str(number)), 1, 10.0, MEMORY * number)
    assert users.open == len(users._accounts) == 20
    for number in range(20):
        users.leave(named(str(number)), 1, 0.0, MEMORY * number, MEMORY * 30)
    assert users.open == 0


# ---- parts


def use(users: Users, name: str, cost: float, now: float = 0.0) -> None:
    users.enter(named(name), 1, cost, now)
    users.leave(named(name), 1, 0.0, now, now)


def over(users: Users, name: str, now: float = 0.0, rate: float = 0.0) -> float | None:
    """For how long it is refused."""
    try:
        users.check_share(named(name), 0.0, now, rate)
    except RateLimited as limited:
        return limited.retry_after if limited.code == "user_share" else None
    return None


def test_one_user_may_have_all() -> None:
    users = make(share=1.0)
    assert over(users, "one") is None
    for _ in range(100):
        use(users, "one", 1000.0)
        assert over(users, "one") is None


def test_a_user_may_have_so_many_equal_parts() -> None:
    users = make(share=2.0)
    for number in range(9):
        use(users, str(number), 100.0)
    use(users, "much", 199.0)
    assert over(users, "much") is None
    use(users, "much", 51.0)  # the mean is 115 now
    assert over(users, "much") == pytest.approx(FADING * math.log(250.0 / 230.0))
    assert all(over(users, str(number)) is None for number in range(9))
    assert over(users, "new") is None
    for number in range(9):
        use(users, str(number), 100.0)
    assert over(users, "much") is None  # now all have had much


def test_no_parts() -> None:
    users = make(share=0.0)
    for number in range(9):
        use(users, str(number), 1.0)
    use(users, "much", 1e6)
    assert over(users, "much") is None


def test_who_has_had_no_more_than_it_asks_for_now_has_not_had_much() -> None:
    """Its second request, where the others' are shorter."""
    users = make(share=1.0)
    for number in range(9):
        use(users, str(number), 1.0)
    use(users, "long", 100.0)
    users.check_share(named("long"), 100.0, 0.0, 0.0)
    with pytest.raises(RateLimited):
        users.check_share(named("long"), 99.0, 0.0, 0.0)


def test_those_who_are_forgotten_are_in_nobodys_way() -> None:
    """One who asks much and is not alone, until the others were away for ten minutes."""
    users = make(share=2.0)
    for number in range(9):
        use(users, str(number), 1.0)
    use(users, "much", 1000.0)
    assert over(users, "much")
    use(users, "much", 1000.0, MEMORY + 1)
    assert over(users, "much") is None


def test_a_user_may_have_what_the_others_leave_over() -> None:
    """At 10 tokens a second: of what ``FADING`` seconds had, once it is so long; of ten seconds, at first."""
    users = make(share=1.0)
    for number in range(4):
        use(users, str(number), 10.0)
    use(users, "much", 59.0)  # 40 of the 100 tokens of ten seconds are the others'
    assert over(users, "much", rate=0.0)
    assert over(users, "much", rate=10.4) is None
    assert over(users, "much", rate=9.4)
    late = 5 * FADING
    for number in range(4):
        use(users, str(number), 100.0, late)
    use(users, "much", 750.0, late)
    assert over(users, "much", late, rate=10.0) is None
    use(users, "much", 50.0, late)
    assert over(users, "much", late, rate=10.0)
    assert over(users, "much", late + 20.0, rate=10.0) is None  # it has faded


# ---- limits


Moves = st.lists(st.tuples(st.integers(0, 80), st.integers(-40, 200), st.booleans()), max_size=50)


@settings(max_examples=200, deadline=None)
@given(st.sampled_from([0.125, 0.5, 1.0, 4.0]), st.sampled_from([2.0, 10.0, 60.0]), Moves)
def test_a_bucket_fills_as_time_goes_by(rate: float, span: float, moves: list[tuple[int, int, bool]]) -> None:
    """Against one that is filled tick by tick. All are binary fractions, so that they compare exactly."""
    tick = 0.125
    bucket = Bucket(rate, span, 100.0)
    most = max(rate * span, 1.0)
    left, now = most, 100.0
    for ticks, amount, takes in moves:
        for _ in range(ticks):
            now += tick
            left = min(most, left + rate * tick)
        missing = bucket.missing(float(amount), now)
        assert missing == max(0.0, min(float(amount), most) - left) / rate
        if takes:
            bucket.take(float(amount))
            left = min(most, left - amount)


def test_a_key_may_save_up_ten_seconds() -> None:
    keys = Keys()
    for key in ("one", "other"):  # each has its own
        assert [keys.missing(key, 2.0, 5.0) for _ in range(20)] == [0.0] * 20
        assert keys.missing(key, 2.0, 5.0) == 0.5
        assert keys.missing(key, 2.0, 5.25) == 0.25  # who is refused is not counted
        assert keys.missing(key, 2.0, 5.5) == 0.0
        assert keys.missing(key, 2.0, 5.5) == 0.5
        assert [keys.missing(key, 2.0, 1e6) for _ in range(21)] == [0.0] * 20 + [0.5]


def test_a_slow_key_may_send_one_at_a_time() -> None:
    keys = Keys()
    assert keys.missing("slow", 0.01, 0.0) == 0.0
    assert keys.missing("slow", 0.01, 0.0) == pytest.approx(100.0)
    assert keys.missing("slow", 0.01, 100.0) == 0.0


def test_a_key_without_a_rate_and_one_whose_rate_changed() -> None:
    keys = Keys()
    assert all(keys.missing("free", 0.0, 0.0) == 0.0 for _ in range(1000))
    assert [keys.missing("key", 0.1, 0.0) for _ in range(2)] == [0.0, 10.0]
    assert [keys.missing("key", 1.0, 0.0) for _ in range(11)] == [0.0] * 10 + [1.0]


def test_tokens_of_a_user_over_a_minute() -> None:
    users = make(rate=2.0)
    user = named("one")
    users.check(user, 1, 10**6, 0.0)  # more than it could ever save up: once, when nothing was taken
    users.enter(user, 1, 120.0, 0.0)
    with pytest.raises(RateLimited) as limited:
        users.check(user, 1, 30.0, 5.0)
    assert limited.value.code == "user_tokens"
    assert limited.value.retry_after == 10.0
    users.check(named("other"), 1, 30.0, 5.0)
    users.check(user, 1, 30.0, 15.0)
    users.leave(user, 1, 110.0, 0.0, 15.0)  # it took 10 in fact
    users.check(user, 1, 120.0, 15.0)
    users.enter(user, 1, 120.0, 15.0)
    users.leave(user, 1, 120.0, 15.0, 15.0)  # it left
    users.check(user, 1, 120.0, 15.0)


def test_a_user_may_have_so_many_open() -> None:
    users = make(concurrency=3)
    user = named("one")
    users.check(user, 3, 1.0, 0.0)
    users.enter(user, 2, 1.0, 0.0)
    users.check(user, 1, 1.0, 0.0)
    with pytest.raises(RateLimited) as limited:
        users.check(user, 2, 1.0, 0.0)
    assert limited.value.code == "user_concurrency"
    users.check(named("other"), 3, 1.0, 0.0)
    users.leave(user, 2, 0.0, 0.0, 0.0)
    users.check(user, 3, 1.0, 0.0)


def test_a_request_for_too_many_answers_is_judged_alike_whoever_asks() -> None:
    """One of more places than a user may have open: by one who was here before, and by one who was not."""
    users = make(concurrency=3)
    use(users, "known", 1.0)
    refused = []
    for name in ("known", "new"):
        try:
            users.check(named(name), 4, 1.0, 0.0)
            refused.append(False)
        except RateLimited:
            refused.append(True)
    assert refused[0] == refused[1]

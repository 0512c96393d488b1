"""The front's guess of what the engine has cached: against a naive model, and against the engine's own prefix tree."""

from __future__ import annotations

import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay.backends.prefixes import MOST_PAGES, Prefixes, Trace, worth_remembering
from forebay.engine.kv.pages import PAGE_SIZE, Pages
from forebay.engine.kv.radix import Node, PrefixTree
from forebay.engine.kv.tiers import Key, Realm
from forebay.engine.sequence import Emit, End

quick = settings(max_examples=300, deadline=None)
A = Realm("a")


def ids(*pages: int, more: int = 0) -> list[int]:
    """Whole pages of tokens, and ``more`` of another."""
    return [16 * page + i for page in pages for i in range(PAGE_SIZE)] + [7] * more


realms = st.builds(Realm, st.sampled_from("ab"), st.integers(0, 2))
prompts = st.builds(
    lambda pages, more: ids(*pages, more=more), st.lists(st.integers(0, 2), max_size=5), st.integers(0, 3)
)
adds = st.tuples(st.just("add"), realms, prompts, st.just(0))
corrections = st.tuples(st.just("correct"), realms, prompts, st.integers(0, 5))


class Naive:
    """Whole paths of pages, written out; the least recently used first."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.paths: list[tuple[str | Key, ...]] = []

    def chain(self, realm: Realm, ids: list[int]) -> list[tuple[str | Key, ...]]:
        keys = [realm.key(ids, page) for page in range(len(ids) // PAGE_SIZE)]
        return [(realm.root, *keys[: end + 1]) for end in range(len(keys))]

    def known(self, realm: Realm, ids: list[int]) -> int:
        return PAGE_SIZE * sum(path in self.paths for path in self.chain(realm, ids[:-1]))

    def add(self, realm: Realm, ids: list[int]) -> None:
        chain = self.chain(realm, ids)
        self.paths = [path for path in self.paths if path not in chain] + chain[::-1]
        self.paths = self.paths[max(0, len(self.paths) - self.limit) :]

    def correct(self, realm: Realm, ids: list[int], found: int) -> None:
        gone = [path for path in self.chain(realm, ids) if path in self.paths][found:][:1]
        self.paths = [path for path in self.paths if not any(path[: len(g)] == g for g in gone)]


@quick
@given(history=st.lists(adds | corrections, max_size=30))
def test_it_is_a_dict_of_whole_paths(history: list[tuple[str, Realm, list[int], int]]) -> None:
    """And what is forgotten takes along all that goes on from it."""
    prefixes, naive = Prefixes(1000), Naive(1000)
    for what, realm, prompt, found in history:
        if what == "add":
            assert prefixes.add(realm, prompt) == naive.known(realm, prompt)
            naive.add(realm, prompt)
        else:
            prefixes.correct(realm, prompt, found * PAGE_SIZE)
            naive.correct(realm, prompt, found)
        for _, asked, other, _ in history:
            assert prefixes.known(asked, other) == naive.known(asked, other)


@quick
@given(history=st.lists(adds, max_size=30), limit=st.integers(0, 9))
def test_of_more_than_there_is_room_for_it_has_what_was_used_last(
    history: list[tuple[str, Realm, list[int], int]], limit: int
) -> None:
    prefixes, naive = Prefixes(limit), Naive(limit)
    for _, realm, added, _ in history:
        prefixes.add(realm, added)
        naive.add(realm, added)
        assert len(prefixes) == len(naive.paths) <= limit
        for _, asked, other, _ in history:
            assert prefixes.known(asked, other) == naive.known(asked, other)


@quick
@given(history=st.lists(adds | corrections, max_size=40), limit=st.integers(0, 40), asked=realms, prompt=prompts)
def test_it_is_bounded_and_never_knows_what_was_not_added(
    history: list[tuple[str, Realm, list[int], int]], limit: int, asked: Realm, prompt: list[int]
) -> None:
    prefixes, naive = Prefixes(limit), Naive(1000)
    for what, realm, other, found in history:
        if what == "add":
            prefixes.add(realm, other)
            naive.add(realm, other)
        else:
            prefixes.correct(realm, other, found * PAGE_SIZE)
            naive.correct(realm, other, found)
        assert len(prefixes) <= limit
    assert prefixes.known(asked, prompt) <= naive.known(asked, prompt) <= max(0, len(prompt) - 1)


def test_a_page_takes_little_room() -> None:
    prefixes = Prefixes(8192)
    for i in range(400):
        prefixes.add(A, ids(*range(100 * i, 100 * i + 100)))
        assert len(prefixes) <= 8192
    assert len(prefixes) >= 7600
    entries = sys.getsizeof(prefixes._pages) + sum(
        sys.getsizeof(key) + sys.getsizeof(number) for key, number in prefixes._pages.items()
    )
    assert entries / 8192 < 200  # right after a dict has grown; 130 in the middle


def test_the_last_token_is_always_computed() -> None:
    prefixes = Prefixes(100)
    assert prefixes.known(A, []) == prefixes.add(A, []) == 0
    prefixes.add(A, ids(1, 2))
    assert prefixes.known(A, ids(1, 2)) == prefixes.add(A, ids(1, 2)) == 16
    assert prefixes.known(A, ids(1, 2, more=1)) == 32


def test_public_pages_are_known_under_any_salt_and_nothing_behind_them() -> None:
    prefixes = Prefixes(100)
    prefixes.add(Realm("a", 2), ids(1, 2, 3, 4))
    assert prefixes.known(Realm("a", 2), ids(1, 2, 3, 4, more=1)) == 64
    assert prefixes.known(Realm("b", 2), ids(1, 2, 3, 4, more=1)) == 32
    assert prefixes.known(Realm("a"), ids(1, 2, 3, 4, more=1)) == 0
    assert prefixes.known(Realm("b"), ids(1, 2, 3, 4, more=1)) == 0
    prefixes.add(A, ids(5))
    assert prefixes.known(Realm("b"), ids(5, more=1)) == 0


def test_it_remembers_as_many_pages_as_the_engine_may_have() -> None:
    assert worth_remembering(500, lower_tiers=False) == 500
    assert worth_remembering(500, lower_tiers=True) == 1000
    assert worth_remembering(10 * MOST_PAGES, lower_tiers=True) == MOST_PAGES


# ---- what the engine says

STARTED = 5.0


def news(*tokens: int, cached: int = 0, end: End | None = None) -> Emit:
    return Emit(1, list(tokens), end, cached=cached, started=STARTED)


def test_the_next_turn_finds_prompt_and_answer_but_for_its_last_token() -> None:
    for answer, counted, known in (
        (ids(3, 4), 32, 48),
        ([*ids(3, 4), 9], 33, 64),
        ([*ids(3, 4), 9], 32, 64),
        ([*ids(3, 4), 9], 20, 48),
    ):
        prefixes = Prefixes(100)
        trace = Trace(prefixes, A, ids(1, 2))
        trace.hear(news(*answer[:5]))
        trace.hear(news(*answer[5:]))
        trace.end(counted)
        assert prefixes.known(A, [*ids(1, 2), *answer, 1, 2, 3]) == known


def test_a_prompt_that_is_just_being_computed_counts() -> None:
    prefixes = Prefixes(100)
    Trace(prefixes, A, ids(1, 2, more=1))
    assert prefixes.known(A, ids(1, 2, 3)) == 32


@pytest.mark.parametrize("heard", [[], [Emit(1, end=End.EXPIRED)], [Emit(1, end=End.REFUSED)]])
def test_what_leaves_before_it_was_computed_leaves_nothing(heard: list[Emit]) -> None:
    prefixes = Prefixes(100)
    prefixes.add(A, ids(1))
    trace = Trace(prefixes, A, ids(1, 2, 3))
    for emit in heard:
        trace.hear(emit)
    trace.end(0)
    assert prefixes.known(A, ids(1, 2, 3)) == 16


def test_a_wrong_guess_is_made_once_also_of_all_that_goes_on_from_there() -> None:
    prefixes = Prefixes(100)
    for last in (3, 4, 5):
        prefixes.add(A, ids(1, 2, last))
    trace = Trace(prefixes, A, ids(1, 2, 3, more=1))
    trace.hear(news(8, cached=16))
    # What the engine lacked has been computed since; what went on from it had gone before it.
    assert prefixes.known(A, ids(1, 2, 3, more=1)) == 48
    assert prefixes.known(A, ids(1, 2, 4, more=1)) == 32
    prefixes.add(A, ids(1, 2, 4))
    trace.hear(news(9, cached=16))  # the same news: nothing new
    assert prefixes.known(A, ids(1, 2, 4, more=1)) == 48
    trace = Trace(prefixes, A, ids(1, 2, 3, more=1))
    trace.hear(Emit(1, end=End.ERROR, cached=16, started=STARTED))  # failed before it was computed
    trace.end(0)
    assert prefixes.known(A, ids(1, 2, 3, more=1)) == 16


class Engine:
    """The engine's own prefix tree: each request computes what it does not find."""

    def __init__(self, n_pages: int) -> None:
        self.pages = Pages(n_pages)
        self.tree = PrefixTree(self.pages, self._count)
        self.evicted = 0

    def _count(self, node: Node) -> None:
        self.evicted += 1

    def found(self, realm: Realm, ids: list[int]) -> int:
        return len(self.tree.match(realm, ids, max(0, len(ids) - 1) // PAGE_SIZE)) * PAGE_SIZE

    def compute(self, realm: Realm, ids: list[int]) -> int:
        path = self.tree.match(realm, ids, max(0, len(ids) - 1) // PAGE_SIZE)
        self.pages.share(node.page for node in path)
        self.tree.touch(path)
        held = [node.page for node in path]
        at: Node | None = path[-1] if path else None
        for page in range(len(path), len(ids) // PAGE_SIZE):
            if not self.pages.free:
                self.tree.evict(1)
            (own,) = self.pages.take(1) or [-1]
            at = self.tree.insert(realm, at, realm.key(ids, page), own)
            held.append(at.page)
            if at.page != own:  # its last page, which is computed again for its last token
                self.pages.share([at.page])
                self.pages.drop([own])
        self.tree.idle(self.pages.drop(held))
        return len(path) * PAGE_SIZE


@quick
@given(history=st.lists(st.tuples(realms, prompts, st.integers(0, 3)), max_size=30), size=st.integers(6, 20))
def test_guesses_follow_an_engine_that_forgets(history: list[tuple[Realm, list[int], int]], size: int) -> None:
    """A guess after a request is right, and each eviction makes at most one that is too high."""
    prefixes, engine = Prefixes(1000), Engine(size)
    too_high = 0
    for realm, prompt, evict in history:
        if not prompt:
            continue
        engine.tree.evict(evict)
        guess = prefixes.known(realm, prompt)
        trace = Trace(prefixes, realm, prompt)
        found = engine.compute(realm, prompt)
        too_high += guess > found
        assert guess >= found  # nothing came to the engine that was not submitted
        trace.hear(news(8, cached=found))
        trace.end(1)
        assert prefixes.known(realm, prompt) == engine.found(realm, prompt)
        assert too_high <= engine.evicted

"""Pages and the prefix tree by themselves: states, canonical pages, eviction order, pins."""

import pytest

from forebay.engine.kv.capacity import OutputGuess, pages_of, pool_pages, predicted_peak
from forebay.engine.kv.pages import PAGE_SIZE, Pages
from forebay.engine.kv.radix import Node, PrefixTree
from forebay.engine.kv.tiers import Realm


def page_key(n: int) -> tuple[int, ...]:
    return tuple(range(n * PAGE_SIZE, (n + 1) * PAGE_SIZE))


def ids(*keys: int) -> list[int]:
    return [token for n in keys for token in page_key(n)]


def grow(pages: Pages, tree: PrefixTree, *keys: int, salt: str = "") -> tuple[list[int], list[Node]]:
    """A table that computed these pages, inserted."""
    table = pages.take(len(keys))
    assert table is not None
    path: list[Node] = []
    for i, n in enumerate(keys):
        node = tree.insert(Realm(salt), path[-1] if path else None, page_key(n), table[i])
        if node.page != table[i]:
            pages.share([node.page])
            pages.drop([table[i]])
            table[i] = node.page
        path.append(node)
    return table, path


def test_law_5_a_page_is_in_one_state_and_they_add_up() -> None:
    pages = Pages(8)
    tree = PrefixTree(pages)
    table, path = grow(pages, tree, 1, 2, 3)
    assert pages.counts() == {"free": 5, "cached": 0, "pinned": 0, "running": 3}
    tree.idle(pages.drop(table))
    assert pages.counts() == {"free": 5, "cached": 3, "pinned": 0, "running": 0}
    tree.pin(path[:2])
    assert pages.counts() == {"free": 5, "cached": 1, "pinned": 2, "running": 0}
    pages.share(node.page for node in path)
    assert pages.counts() == {"free": 5, "cached": 0, "pinned": 0, "running": 3}
    pages.check([table], tree.all_pages())


def test_law_4_insert_returns_the_canonical_page() -> None:
    pages = Pages(8)
    tree = PrefixTree(pages)
    first, _ = grow(pages, tree, 1, 2)
    second, _ = grow(pages, tree, 1, 2)
    assert second == first
    assert pages.free == 6
    pages.check([first, second], tree.all_pages())


def test_salts_share_nothing() -> None:
    pages = Pages(8)
    tree = PrefixTree(pages)
    table, path = grow(pages, tree, 1, 2, salt="a")
    assert tree.match(Realm("a"), ids(1, 2, 3), 3) == path
    assert tree.match(Realm("b"), ids(1, 2, 3), 3) == []
    assert tree.match(Realm("a"), ids(1, 2, 3), 1) == path[:1]
    assert tree.match(Realm("a"), ids(2, 1), 2) == []
    tree.idle(pages.drop(table))
    assert tree.evict(2) == 2
    pages.check([], tree.all_pages())


def test_eviction_takes_the_least_recently_used_leaf() -> None:
    pages = Pages(8)
    tree = PrefixTree(pages)
    old, _ = grow(pages, tree, 1, 2)
    new, _ = grow(pages, tree, 1, 3)
    tree.idle(pages.drop(old))
    tree.idle(pages.drop(new))
    tree.touch(tree.match(Realm(), ids(1, 2), 2))
    assert tree.evict(1) == 1
    assert len(tree.match(Realm(), ids(1, 2), 2)) == 2
    assert len(tree.match(Realm(), ids(1, 3), 2)) == 1


def test_pinned_and_held_pages_stay() -> None:
    pages = Pages(8)
    tree = PrefixTree(pages)
    held, _ = grow(pages, tree, 1, 2)
    pinned, path = grow(pages, tree, 3, 4)
    tree.idle(pages.drop(pinned))
    tree.pin(path)
    assert tree.evict(8) == 0
    tree.unpin(path)
    assert tree.evict(8) == 2
    pages.check([held], tree.all_pages())


def test_misuse_is_an_error_not_a_wrong_count() -> None:
    pages = Pages(2)
    assert pages.take(3) is None
    table = pages.take(1)
    assert table is not None
    pages.drop(table)
    for act in (lambda: pages.drop(table), lambda: pages.forget(table[0]), lambda: pages.pin(table[0])):
        with pytest.raises(RuntimeError):
            act()
    with pytest.raises(RuntimeError):
        pages.share(table)


def test_law_5_check_sees_a_leak() -> None:
    pages = Pages(4)
    pages.take(1)
    with pytest.raises(RuntimeError, match="page 0"):
        pages.check([], [])


@pytest.mark.parametrize(
    ("loads", "tokens"),
    [
        ([(100, 50)], 150),
        ([(100, 50), (100, 50)], 300),
        # The short one has given back its 200 when the long one is at its longest.
        ([(100, 200), (190, 10)], 310),
    ],
)
def test_predicted_peak_is_that_of_a_simulation(loads: list[tuple[int, int]], tokens: int) -> None:
    longest = max(to_come for _, to_come in loads)
    simulated = max(sum(held + t for held, to_come in loads if t <= to_come) for t in range(longest + 1))
    assert simulated == tokens
    assert pages_of(tokens) <= predicted_peak(loads) <= pages_of(tokens) + len(loads)


def test_pool_pages() -> None:
    assert pool_pages(1000, 10**9, 100, useful=5) == 10  # bytes are taken at their word
    assert pool_pages(0.5, 1000, 100, useful=99) == 5
    assert pool_pages(0.5, 10**9, 100, useful=7) == 7


def test_output_guess_learns_and_never_exceeds_the_order() -> None:
    guess = OutputGuess()
    assert guess.remaining(0, 500) == 500
    for n in range(100):
        guess.record(20 + n % 10)
    assert 28 <= guess.remaining(0, 500) <= 30
    assert guess.remaining(0, 5) == 5
    assert guess.remaining(40, 500) == 40
    assert guess.remaining(499, 500) == 1

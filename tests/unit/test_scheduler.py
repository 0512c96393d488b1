"""The scheduler against the laws of the design, first by example, then by random histories."""

import hypothesis.strategies as st
import pytest
from histories import Harness, Histories, expected, misled
from hypothesis import HealthCheck, given, settings

from forebay.engine.kv.capacity import predicted_peak
from forebay.engine.kv.pages import PAGE_SIZE
from forebay.engine.kv.tiers import Realm
from forebay.engine.sequence import End, GenSpec, Sequence, State


def order(id: int, n_prompt: int = 20, max_tokens: int = 10, **more: object) -> GenSpec:
    return GenSpec(id, [(id * 7 + i) % 50 for i in range(n_prompt)], max_tokens, **more)  # type: ignore[arg-type]


def test_decodes_come_first_and_chunks_fill_the_budget() -> None:
    h = Harness(n_pages=100, max_batch=4, token_budget=32)
    h.submit(order(1, n_prompt=10))
    h.step()
    h.submit(order(2, n_prompt=100))
    h.submit(order(3, n_prompt=10))
    works = {work.seq.spec.id: (work.start, work.count, work.samples) for work in h.step().works}
    assert works == {1: (10, 1, True), 2: (0, 31, False)}
    h.run()
    for id in (1, 2, 3):
        assert h.tokens(id) == expected(order(id, n_prompt=100 if id == 2 else 10))


def test_a_decode_is_never_left_out_for_prefill() -> None:
    h = Harness(n_pages=200, max_batch=8, token_budget=16)
    for id in range(4):
        h.submit(order(id, n_prompt=4, max_tokens=30))
    h.step()
    for id in range(4, 8):
        h.submit(order(id, n_prompt=200, max_tokens=4))
    for _ in range(20):
        step = h.step()
        assert {0, 1, 2, 3} <= {work.seq.spec.id for work in step.works}


def test_second_turn_hits_what_the_first_generated() -> None:
    h = Harness(n_pages=100, max_batch=4, token_budget=64)
    first = order(1, n_prompt=40, max_tokens=30)
    h.submit(first)
    h.run()
    turn = GenSpec(2, [*first.ids, *h.tokens(1), 3, 4, 5], 5)
    h.submit(turn)
    h.run()
    assert h.news[2][0].cached == (40 + 30 - 1) // 16 * 16
    assert h.tokens(2) == expected(turn)


def test_a_prompt_that_is_cached_whole_still_computes_its_last_token() -> None:
    h = Harness(n_pages=100, max_batch=4, token_budget=64)
    h.submit(GenSpec(1, list(range(32)), 1))
    h.run()
    h.submit(GenSpec(2, list(range(32)), 3))
    h.run()
    assert h.news[2][0].cached == 16
    assert h.tokens(2) == expected(GenSpec(2, list(range(32)), 3))


def test_law_4_two_at_once_with_one_prompt_end_on_the_same_pages() -> None:
    """Law 4 through the scheduler: duplicates computed side by side become one."""
    h = Harness(n_pages=100, max_batch=4, token_budget=256)
    first, second = (GenSpec(id, [*range(40), *[id] * 60], 20) for id in (1, 2))
    h.submit(first)
    h.submit(second)
    h.step()
    tables = [seq.table for seq in h.scheduler.running]
    assert tables[0][:2] == tables[1][:2]
    assert tables[0][2] != tables[1][2]
    h.run()
    assert h.tokens(1) == expected(first)
    assert h.tokens(2) == expected(second)


def test_what_another_is_just_computing_is_waited_for_and_shared() -> None:
    h = Harness(n_pages=100, max_batch=4, token_budget=64)
    same = list(range(50)) * 2
    for id in (1, 2, 3):
        h.submit(GenSpec(id, [*same, id], 6))
    h.submit(order(4))
    joined = [{work.seq.spec.id: work.count for work in h.step().works} for _ in range(4)]
    # 101 tokens in chunks of 64. Number 4 fills the place beside the rest; 2 and 3 join for what they lack.
    assert joined[:3] == [{1: 64}, {1: 37, 4: 20}, {1: 1, 4: 1, 2: 5, 3: 5}]
    h.run()
    assert h.news[2][0].cached == h.news[3][0].cached == 96
    for id in (1, 2, 3):
        assert h.tokens(id) == expected(GenSpec(id, [*same, id], 6))


def test_little_in_common_is_not_waited_for() -> None:
    h = Harness(n_pages=100, max_batch=4, token_budget=256)
    h.submit(GenSpec(1, list(range(40)), 4))
    h.submit(GenSpec(2, [*range(32), *[7] * 40], 4))  # 32 of 72
    h.submit(GenSpec(3, list(range(40)), 4, salt="another"))
    assert {work.seq.spec.id for work in h.step().works} == {1, 2, 3}


def test_those_held_back_keep_their_place() -> None:
    h = Harness(n_pages=100, max_batch=2, token_budget=64)
    same = list(range(50)) * 2
    h.submit(GenSpec(1, same, 6))
    h.submit(GenSpec(2, same, 6))
    h.submit(order(3, n_prompt=10))
    h.step()
    assert {work.seq.spec.id for work in h.step().works} == {1}
    assert {work.seq.spec.id for work in h.step().works} == {1, 2}
    h.run()


def test_the_one_waited_for_may_leave() -> None:
    h = Harness(n_pages=100, max_batch=4, token_budget=64)
    same = list(range(50)) * 2
    h.submit(GenSpec(1, same, 6))
    h.submit(GenSpec(2, same, 6))
    h.step()
    h.scheduler.cancel(1)
    h.run()
    assert h.tokens(2) == expected(GenSpec(2, same, 6))
    assert h.news[2][0].cached == 64


def test_salts_do_not_share() -> None:
    h = Harness(n_pages=100, max_batch=4, token_budget=64)
    h.submit(GenSpec(1, list(range(40)), 2, salt="a"))
    h.run()
    h.submit(GenSpec(2, list(range(40)), 2, salt="b"))
    h.run()
    assert h.news[2][-1].cached == 0


def test_law_3_a_cancelled_sequence_keeps_its_pages_until_the_step_that_uses_them_is_committed() -> None:
    h = Harness(n_pages=10, max_batch=4, token_budget=64)
    h.submit(order(1, n_prompt=40))
    step = h.scheduler.plan(1.0)
    h.scheduler.cancel(1)
    assert h.scheduler.pages.running == 3
    with pytest.raises(RuntimeError, match="not been committed"):
        h.scheduler.plan(2.0)
    (emit,) = h.scheduler.commit(step, h.memory.execute(step))
    assert (emit.end, emit.tokens) == (End.CANCELLED, [])
    assert h.scheduler.pages.running == 0
    h.scheduler.check()


def test_cancel_in_the_queue_and_of_the_unknown() -> None:
    h = Harness(n_pages=10, max_batch=1, token_budget=64)
    h.submit(order(1))
    h.submit(order(2))
    h.step()
    h.scheduler.cancel(2)
    h.scheduler.cancel(99)
    h.run()
    assert [e.end for e in h.news[2]] == [End.CANCELLED]
    assert h.tokens(1) == expected(order(1))


def test_deadline_is_honoured_before_prefill_and_only_then() -> None:
    h = Harness(n_pages=100, max_batch=1, token_budget=64)
    h.submit(order(1, deadline=3.0))
    h.submit(order(2, deadline=3.0))
    h.run()
    assert h.tokens(1) == expected(order(1))
    assert [(e.end, e.tokens) for e in h.news[2]] == [(End.EXPIRED, [])]
    assert all(work.seq.spec.id == 1 for step in h.steps for work in step.works)


@pytest.mark.parametrize(
    ("spec", "why"),
    [
        (GenSpec(1, [], 5), "no tokens"),
        (GenSpec(1, [1], 0), "max_tokens"),
        (GenSpec(1, [1] * 100, 61), "exceed 160 tokens"),
    ],
)
def test_law_6_what_can_never_fit_is_refused_at_submit(spec: GenSpec, why: str) -> None:
    h = Harness(n_pages=10, max_batch=4, token_budget=64)
    h.submit(spec)
    (emit,) = h.news[1]
    assert emit.end is End.REFUSED
    assert why in emit.detail
    assert not h.scheduler.has_work


def test_law_6_what_fits_just_so_is_served_alone() -> None:
    h = Harness(n_pages=10, max_batch=4, token_budget=64)
    for id in range(3):
        h.submit(order(id, n_prompt=100, max_tokens=60))
    h.run()
    for id in range(3):
        assert h.tokens(id) == expected(order(id, n_prompt=100, max_tokens=60))


def test_law_12_a_failed_work_ends_alone() -> None:
    h = Harness(n_pages=20, max_batch=4, token_budget=64)
    h.submit(order(1))
    h.submit(order(2))
    step = h.scheduler.plan(1.0)
    emits = h.scheduler.commit(step, h.memory.execute(step), failures={0: "broken"})
    h.scheduler.check()
    assert [(e.id, e.end, e.detail) for e in emits] == [(1, End.ERROR, "broken"), (2, None, "")]
    h.run()


def test_stop_ids_and_min_tokens() -> None:
    answer = expected(order(1, max_tokens=30))
    stop = answer[4]
    first = answer.index(stop)
    h = Harness(n_pages=20, max_batch=4, token_budget=64)
    h.submit(order(1, max_tokens=30, stop_ids=[stop]))
    h.run()
    assert h.tokens(1) == answer[: first + 1]
    assert h.news[1][-1].end is End.STOP
    h.submit(order(2, max_tokens=30))
    h.run()
    assert h.news[2][-1].end is End.LENGTH


def test_preemption_by_recompute_once_then_first() -> None:
    h = Harness(n_pages=12, max_batch=3, token_budget=64)
    misled(h)
    # The deadline passes while the preempted ones wait for the second time: it is about the first.
    orders = [order(id, n_prompt=40, max_tokens=90, deadline=5.0) for id in range(3)]
    small = order(9, n_prompt=16, max_tokens=16)
    for spec in (*orders, small):
        h.submit(spec)
    while not h.preempted:
        h.step()
    # The small one would fit at once where the preempted one must wait for its whole need.
    (first,), at = h.preempted, len(h.steps)
    h.run()
    assert sum(h.preempted.values()) == h.scheduler.preemptions >= 2
    assert max(h.preempted.values()) == 1
    for spec in (*orders, small):
        assert h.tokens(spec.id) == expected(spec)
    later = [work.seq.spec.id for step in h.steps[at:] for work in step.works]
    assert later.index(first) < later.index(9)


def test_two_that_may_not_be_preempted_again_cannot_block_each_other() -> None:
    """Their predicted peak fits, for a sequence that decodes and one that needs many steps of prefill; but the
    second lags behind the prediction, and both would stand still holding what the other needs."""
    h = Harness(n_pages=11, max_batch=2, token_budget=3)
    orders = [order(1, n_prompt=20, max_tokens=100), order(2, n_prompt=100, max_tokens=5)]
    for spec in orders:
        h.submit(spec)
    for seq in h.scheduler.waiting:
        seq.preempted = True
    h.run()
    for spec in orders:
        assert h.tokens(spec.id) == expected(spec)


def test_legal_transitions_only() -> None:
    seq = Sequence.of(order(1), 0)
    seq.move(State.RUNNING)
    seq.move(State.WAITING)
    seq.move(State.ENDED)
    with pytest.raises(RuntimeError, match="not a legal transition"):
        seq.move(State.RUNNING)


def test_law_7_credits_go_by_slots_and_by_predicted_pages() -> None:
    h = Harness(n_pages=100, max_batch=8, token_budget=512)
    assert h.scheduler.credits() == 8
    for id in range(3):
        h.submit(order(id, n_prompt=40, max_tokens=40))
    h.step()
    assert h.scheduler.credits() == 5
    # A pool for six of them: slots are free, pages are not.
    h = Harness(n_pages=31, max_batch=8, token_budget=512)
    for id in range(3):
        h.submit(order(id, n_prompt=40, max_tokens=40))
    h.step()
    assert h.scheduler.credits() in (2, 3)
    for id in range(3, 8):
        h.submit(order(id, n_prompt=40, max_tokens=40))
    h.step()
    assert h.scheduler.waiting
    assert h.scheduler.credits() < 0
    h.run()
    assert h.scheduler.credits() == 8


def test_pages_come_back_from_a_lower_tier_and_others_run_meanwhile() -> None:
    h = Harness(n_pages=12, max_batch=4, token_budget=64, lower=100)
    first = order(1, n_prompt=80, max_tokens=10, ttl=100.0)
    h.submit(first)
    h.run()
    h.submit(order(2, n_prompt=150, max_tokens=20))  # takes the whole pool
    h.run()
    assert h.lower is not None
    h.lower.delay = 5
    again = GenSpec(3, [*first.ids, *h.tokens(1), 1, 2], 5, ttl=100.0)
    h.submit(order(4, n_prompt=20, max_tokens=30))
    h.step()
    h.submit(again)
    for _ in range(4):
        assert [work.seq.spec.id for work in h.step().works] == [4]
        assert h.scheduler.pages.running > 2
    h.run()
    assert (h.news[3][0].cached, h.news[3][0].tier) == (80, "disk")
    assert h.tokens(3) == expected(again)


def test_a_turn_that_is_cancelled_while_its_pages_come_leaves_nothing_behind() -> None:
    h = Harness(n_pages=12, max_batch=4, token_budget=64, lower=100)
    h.submit(first := order(1, n_prompt=80, max_tokens=10, ttl=100.0))
    h.run()
    h.submit(order(2, n_prompt=150, max_tokens=20))
    h.run()
    assert h.lower is not None
    h.lower.delay = 4
    h.submit(GenSpec(3, [*first.ids, *h.tokens(1), 1, 2], 5, ttl=100.0))
    h.step()
    h.scheduler.cancel(3)
    h.step()
    assert h.news[3][-1].end is End.CANCELLED
    assert h.scheduler.pages.running == 5  # they belong to who fills them
    h.run()
    assert h.scheduler.pages.running == 0


def test_two_turns_that_need_the_same_pages_fetch_them_once() -> None:
    h = Harness(n_pages=14, max_batch=4, token_budget=64, lower=100)
    h.submit(first := order(1, n_prompt=80, max_tokens=10, ttl=100.0))
    h.run()
    h.submit(order(2, n_prompt=180, max_tokens=20))
    h.run()
    for id in (3, 4):
        h.submit(GenSpec(id, [*first.ids, *h.tokens(1), id], 5, ttl=100.0))
    h.run()
    assert h.lower is not None
    assert h.lower.fetched == 1
    assert [h.news[id][0].cached for id in (3, 4)] == [80, 80]


def test_law_4_pages_that_another_computed_before_they_came_are_given_back() -> None:
    h = Harness(n_pages=40, max_batch=4, token_budget=64, lower=100)
    h.submit(first := order(1, n_prompt=80, max_tokens=10, ttl=100.0))
    h.run()
    h.scheduler.tree.evict(40)
    assert h.lower is not None
    kept, h.lower.kept = h.lower.kept, {}
    h.submit(GenSpec(2, [*first.ids, *[2] * 20], 5))  # computes them, because nothing has them yet
    h.step()
    h.lower.kept, h.lower.delay = kept, 3
    last = GenSpec(3, [*first.ids, *[3] * 200], 5)
    h.submit(last)
    h.run()
    assert h.lower.fetched == 1
    assert h.tokens(3) == expected(last)
    h.scheduler.tree.evict(40)
    assert h.scheduler.pages.free == 40


def test_pages_that_must_leave_before_they_were_saved_are_saved_then() -> None:
    h = Harness(n_pages=64, max_batch=4, token_budget=1024, lower=100)
    h.submit(order(1, n_prompt=800, max_tokens=1, ttl=100.0))
    h.step()
    assert h.lower is not None
    assert len(h.lower.kept) < 50
    h.submit(order(2, n_prompt=1020, max_tokens=1))  # the whole pool
    h.step()
    assert len(h.lower.kept) == 50


def test_pages_that_left_unsaved_are_not_saved_later_with_what_others_put_there() -> None:
    h = Harness(n_pages=64, max_batch=4, token_budget=1024, lower=100)
    h.submit(order(1, n_prompt=800, max_tokens=1, ttl=100.0))
    h.step()
    assert h.lower is not None
    h.lower.refuses = True
    h.submit(order(2, n_prompt=1000, max_tokens=1))
    h.step()
    h.lower.refuses = False
    h.run()  # LowerMemory compares what it is given with the tokens
    assert len(h.lower.kept) < 50


def test_pages_of_an_expired_conversation_are_not_saved() -> None:
    h = Harness(n_pages=12, max_batch=4, token_budget=64, lower=100)
    h.submit(order(1, n_prompt=80, max_tokens=60, ttl=10.0))
    h.run()  # a step is a second
    assert h.lower is not None
    assert len(h.lower.kept) < 8


def test_tenants_share_what_is_declared_public_and_nothing_behind_it() -> None:
    h = Harness(n_pages=60, max_batch=4, token_budget=200)
    system, mine = list(range(40)), [7] * 60

    def asked(id: int, salt: str, public: int, ids: list[int]) -> int:
        h.submit(GenSpec(id, ids, 5, salt=salt, public=public))
        h.run()
        assert h.tokens(id) == expected(GenSpec(id, ids, 5))
        return h.news[id][0].cached

    assert asked(1, "a", 2, [*system, *mine]) == 0
    assert asked(2, "b", 2, [*system, *mine]) == 32  # the very same prompt, of another tenant
    assert asked(3, "a", 2, [*system, *mine, 1]) == 96
    assert asked(4, "c", 0, [*system, *mine]) == 0  # who declares nothing shares nothing
    assert asked(5, "c", 0, [*system, *mine, 1]) == 96


def test_what_a_tenant_deletes_leaves_the_public_part_to_the_others() -> None:
    h = Harness(n_pages=60, max_batch=4, token_budget=200, lower=100)
    system = list(range(40))
    for id, salt in enumerate("ab", 1):
        h.submit(GenSpec(id, [*system, *[id] * 60], 5, salt=salt, public=2, ttl=100.0))
        h.run()
    assert h.lower is not None
    assert len(h.lower.kept) == 2 + 4 + 4
    h.scheduler.purge(Realm("a", 2), [*system, *[1] * 60])
    assert len(h.lower.kept) == 2 + 4
    h.scheduler.tree.evict(60)
    for id, salt, cached in ((3, "b", 96), (4, "a", 32)):
        spec = GenSpec(id, [*system, *[5 - id] * 60, 3], 5, salt=salt, public=2)
        h.submit(spec)
        h.run()
        assert h.news[id][0].cached == cached
        assert h.tokens(id) == expected(spec)


def test_deleting_a_conversation_leaves_its_neighbour_all_of_its_own() -> None:
    """Also what they share, where the neighbour's turn is just running and nothing of it is saved yet."""
    h = Harness(n_pages=60, max_batch=4, token_budget=300, lower=100)
    system = list(range(64))
    mine, other = (GenSpec(id, [*system, *[id] * 40], 20, ttl=100.0) for id in (1, 2))
    h.submit(mine)
    h.run()
    assert h.lower is not None
    h.submit(other)
    h.step()
    h.scheduler.purge(Realm(), mine.ids + h.tokens(1))
    h.run()
    assert len(h.lower.kept) == (104 + 20 - 1) // 16
    h.scheduler.tree.evict(60)
    again = GenSpec(3, [*other.ids, *h.tokens(2), 9], 5)
    h.submit(again)
    h.run()
    assert h.news[3][0].cached == (104 + 20 - 1) // 16 * 16
    assert h.tokens(3) == expected(again)
    h.submit(GenSpec(4, [*mine.ids, 9], 5))
    h.run()
    assert h.news[4][0].cached == 64


@pytest.mark.parametrize("running", [True, False])
def test_what_was_computed_beyond_what_counts_does_not_stand_in_the_way(running: bool) -> None:
    """A stop string was seen late, or a client left: the engine knows more of the answer than anybody keeps."""
    h = Harness(n_pages=60, max_batch=4, token_budget=300, lower=100)
    spec = GenSpec(1, [1] * 40, 100, ttl=100.0)
    h.submit(spec)
    for _ in range(30):
        h.step()
    heard = [*spec.ids, *h.tokens(1)[:5]]
    h.scheduler.cancel(1, len(heard))
    h.run()
    assert h.lower is not None
    assert len(h.lower.kept) == h.scheduler.pages.cached == 45 // 16
    if not running:
        h.scheduler.tree.evict(60)
    h.scheduler.purge(Realm(), heard)
    assert len(h.lower.kept) == h.scheduler.pages.cached == 0


@given(st.lists(st.tuples(st.integers(1, 200), st.integers(1, 200)), min_size=1, max_size=12))
def test_what_fits_at_its_longest_is_predicted_to_fit(sizes: list[tuple[int, int]]) -> None:
    """So that the prediction need not be made."""
    h = Harness(n_pages=10, max_batch=1, token_budget=16)
    seqs = [Sequence.of(GenSpec(id, [1] * now, to_come), id) for id, (now, to_come) in enumerate(sizes)]
    assert predicted_peak(sizes) * PAGE_SIZE <= sum(map(h.scheduler._most, seqs))


TestLaws1And3To6 = Histories.TestCase
TestLaws1And3To6.settings = settings(
    max_examples=500, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
)

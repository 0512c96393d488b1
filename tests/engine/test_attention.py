"""The paged torch path against the textbook: any mix of chunks and decodes over shuffled pages."""

import hypothesis.strategies as st
import torch
from hypothesis import HealthCheck, given, settings

from forebay.engine.attention.base import KVShape, empty_pool
from forebay.engine.attention.naive import NaiveAttention
from forebay.engine.attention.paged import PagedAttention
from forebay.engine.batch import Batch
from forebay.engine.kv.capacity import pages_of
from forebay.engine.scheduler import Step, Work
from forebay.engine.sequence import GenSpec, Sequence

N_PAGES = 64
parts = st.lists(st.tuples(st.integers(0, 90), st.integers(1, 40)), min_size=1, max_size=6)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    parts=parts,
    n_kv_heads=st.sampled_from([1, 2, 3]),
    group=st.sampled_from([1, 3]),
    head_dim=st.sampled_from([2, 16]),
    seed=st.integers(0, 99),
)
def test_paged_equals_naive(
    parts: list[tuple[int, int]], n_kv_heads: int, group: int, head_dim: int, seed: int
) -> None:
    torch.manual_seed(seed)
    shape = KVShape(n_layers=2, n_kv_heads=n_kv_heads, head_dim=head_dim)
    pool = empty_pool(shape, N_PAGES, torch.float32, torch.device("cpu"))
    pool.normal_()
    free = torch.randperm(N_PAGES).tolist()
    works = []
    for start, count in parts:
        seq = Sequence.of(GenSpec(1, [0] * (start + count), 1), 0)
        seq.table = [free.pop() for _ in range(pages_of(start + count))]
        works.append(Work(seq, start, count, samples=True))
    batch = Batch.of(Step(tuple(works)))
    q = torch.randn(len(batch.ids), n_kv_heads * group, head_dim)
    kv = torch.randn(len(batch.ids), 2 * n_kv_heads, head_dim)
    other = pool.clone()
    paged, naive = PagedAttention(pool, shape), NaiveAttention(other, shape)
    paged.begin(batch)
    naive.begin(batch)
    for layer in range(2):
        torch.testing.assert_close(paged.attend(layer, q, kv), naive.attend(layer, q, kv), atol=1e-5, rtol=1e-5)
    # What is written is written to the same places, and nowhere else.
    torch.testing.assert_close(pool, other, atol=0, rtol=0)


def test_a_page_is_one_span_of_the_pool() -> None:
    shape = KVShape(n_layers=3, n_kv_heads=2, head_dim=4)
    pool = empty_pool(shape, 5, torch.bfloat16, torch.device("cpu"))
    assert pool.is_contiguous()
    assert pool[1].numel() == shape.page_elements() == pool.stride(0)
    assert not pool.any()

"""Attention over pages against the textbook: any mix of chunks and decodes over shuffled pages, with torch's operators
and with the compiled kernels."""

from collections.abc import Callable

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import HealthCheck, given, settings

from forebay.engine import kernels
from forebay.engine.attention.base import Attention, KVShape, Reach, empty_pool, k_view, scale_view, v_view
from forebay.engine.attention.naive import NaiveAttention
from forebay.engine.attention.native import NativeAttention
from forebay.engine.attention.paged import PagedAttention
from forebay.engine.batch import Batch
from forebay.engine.kv.capacity import pages_of
from forebay.engine.sequence import GenSpec, Sequence
from forebay.engine.step import Step, Work

N_PAGES = 220
CPU = torch.device("cpu")
compiled = pytest.mark.skipif(kernels.library() is None, reason="the kernels were not built (no compiler)")
parts_of_a_step = st.lists(
    st.tuples(st.one_of(st.integers(0, 90), st.integers(230, 540)), st.one_of(st.just(1), st.integers(1, 40))),
    min_size=1,
    max_size=5,
)


def batch_of(parts: list[tuple[int, int]], free: list[int]) -> Batch:
    works = []
    for start, count in parts:
        seq = Sequence.of(GenSpec(1, [0] * (start + count), 1), 0)
        seq.table = [free.pop() for _ in range(pages_of(start + count))]
        works.append(Work(seq, start, count, samples=True))
    return Batch.of(Step(tuple(works)))


def unwritten(batch: Batch, pool: torch.Tensor) -> None:
    """Poison the pages that this step begins: NaN from whoever had the page before must not be seen (law 12)."""
    for b, length in enumerate(batch.kv_len):
        start = pages_of(int(batch.positions[batch.q_start[b]])) * 16
        for at in range(start, pages_of(int(length)) * 16):
            page = int(batch.tables[b, at // 16])
            if pool.dtype == torch.int8:
                scale_view(pool)[page, :, :, :, at % 16] = torch.nan
                continue
            dim = pool.shape[-1] // 16
            k_view(pool, dim)[page, :, :, :, at % 16] = torch.nan
            v_view(pool, dim)[page, :, :, at % 16] = torch.nan


Make = Callable[[torch.Tensor, KVShape, int, torch.dtype, Reach], Attention]


def compare(make: Make, parts: list[tuple[int, int]], **size: int) -> None:
    dtype = torch.bfloat16 if size.pop("bf16", 0) else torch.float32
    stored = torch.int8 if size.pop("int8", 0) else dtype
    torch.manual_seed(size.pop("seed", 0))
    heads, group, dim = size["heads"], size["group"], size["dim"]
    shape = KVShape(n_layers=2, n_kv_heads=heads, head_dim=dim, dtype=stored)
    pool = empty_pool(shape, N_PAGES, CPU)
    if stored == torch.int8:
        pool.copy_(torch.randint(-127, 128, pool.shape))
        scale_view(pool).copy_(torch.rand(scale_view(pool).shape) / 50)
    else:
        pool.copy_(torch.randn(pool.shape))
    batch = batch_of(parts, torch.randperm(N_PAGES).tolist())
    unwritten(batch, pool)
    # As in the decoder: q and kv are parts of one matrix.
    qkv = torch.randn(len(batch.ids), heads * (group + 2), dim).to(dtype)
    q, kv = qkv[:, : heads * group], qkv[:, heads * group :]
    other = pool.clone()
    reach = Reach(0.05 * size.get("scale", 0), (size["window"], 0))
    fast, naive = make(pool, shape, heads * group, dtype, reach), NaiveAttention(other, shape, reach)
    fast.begin(batch)
    naive.begin(batch)
    tolerance = 2e-2 if dtype == torch.bfloat16 else 2e-5
    for layer in range(2):
        ours, theirs = fast.attend(layer, q, kv), naive.attend(layer, q, kv)
        torch.testing.assert_close(ours, theirs, atol=tolerance, rtol=tolerance)
    # What is written is written to the same places, bit for bit.
    for page, offset in zip(batch.page, batch.offset, strict=True):
        for view, axis in ((k_view, -1), (v_view, -2)):
            a, b = (view(where, dim)[int(page)].select(axis, int(offset)) for where in (pool, other))
            assert torch.equal(a, b)
        if stored == torch.int8:
            a, b = (scale_view(where)[int(page), ..., int(offset)] for where in (pool, other))
            assert torch.equal(a, b)


def paged(pool: torch.Tensor, shape: KVShape, _: int, dtype: torch.dtype, reach: Reach) -> Attention:
    return PagedAttention(pool, shape, dtype, reach)


sizes = {
    "heads": st.sampled_from([1, 3]),
    "group": st.sampled_from([1, 3, 4, 7]),
    "dim": st.sampled_from([16, 64, 80]),
    "bf16": st.integers(0, 1),
    "int8": st.integers(0, 1),
    "window": st.sampled_from([0, 1, 17, 256, 300]),
    "scale": st.integers(0, 2),
    "seed": st.integers(0, 99),
}
fuzz = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@fuzz
@given(parts=parts_of_a_step, size=st.fixed_dictionaries(sizes))
def test_torch_equals_naive(parts: list[tuple[int, int]], size: dict[str, int]) -> None:
    compare(paged, parts, **size)


@compiled
@fuzz
@given(parts=parts_of_a_step, size=st.fixed_dictionaries(sizes), threads=st.sampled_from([1, 2, 3]))
def test_kernels_equal_naive(parts: list[tuple[int, int]], size: dict[str, int], threads: int) -> None:
    kernels.use_threads(threads)
    compare(NativeAttention, parts, **size)


@compiled
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.int8])
@pytest.mark.parametrize("window", [0, 100, 300])
def test_law_9_a_row_of_the_kernels_does_not_depend_on_its_company(stored: torch.dtype, window: int) -> None:
    """Bit for bit: alone, in a crowd, chunked in any way, one row with its splits apart, on any number of threads."""
    torch.manual_seed(3)
    shape = KVShape(n_layers=1, n_kv_heads=3, head_dim=64, dtype=stored)
    dtype = torch.float32 if stored == torch.int8 else stored
    n, length = 9, 600
    rows = torch.randn(length, 15, 64).to(dtype)

    def run(cuts: list[int], crowd: list[tuple[int, int]], threads: int) -> torch.Tensor:
        kernels.use_threads(threads)
        pool = empty_pool(shape, N_PAGES, CPU)
        attention = NativeAttention(pool, shape, n, dtype, Reach(windows=(window,)))
        free = torch.randperm(N_PAGES).tolist()
        table = [free.pop() for _ in range(pages_of(length))]
        out = []
        for first, last in zip([0, *cuts], [*cuts, length], strict=True):
            seq = Sequence.of(GenSpec(1, [0] * last, 1), 0)
            seq.table = table
            others = batch_of(crowd, list(free)) if crowd else None
            works = [Work(seq, first, last - first, samples=True)]
            for b in range(len(crowd)):
                other = Sequence.of(GenSpec(2, [0] * sum(crowd[b]), 1), 0)
                assert others is not None
                other.table = others.tables[b].tolist()
                works.append(Work(other, *crowd[b], samples=True))
            batch = Batch.of(Step(tuple(works)))
            mine = int(batch.q_start[next(b for b in range(len(works)) if batch.tables[b, 0] == table[0])])
            qkv = torch.randn(len(batch.ids), 15, 64).to(dtype)
            qkv[mine : mine + last - first] = rows[first:last]
            attention.begin(batch)
            split.append(attention.attend_job.n_merges > 0)
            out.append(attention.attend(0, qkv[:, :n], qkv[:, n:])[mine : mine + last - first])
        return torch.cat(out)

    split: list[bool] = []
    alone = run([], [], 1)
    assert torch.equal(run([1, 64, 65, 300, 511], [], 2), alone)
    assert not any(split)
    assert torch.equal(run([256, 599], [(40, 1), (0, 33), (17, 1)], 3), alone)
    assert torch.equal(run([257, 511, 512, 513, 599], [], 2), alone)
    assert any(split)


def test_a_page_is_one_span_of_the_pool() -> None:
    shape = KVShape(n_layers=3, n_kv_heads=2, head_dim=4, dtype=torch.bfloat16)
    pool = empty_pool(shape, 5, CPU)
    assert pool.is_contiguous()
    assert 2 * pool[1].numel() == shape.page_bytes() == 2 * pool.stride(0)
    assert not pool.any()
    assert k_view(pool, 4).shape == (5, 3, 2, 4, 16)
    assert v_view(pool, 4).shape == (5, 3, 2, 16, 4)


def test_a_page_of_8_bits_holds_its_scales() -> None:
    shape = KVShape(n_layers=3, n_kv_heads=2, head_dim=32, dtype=torch.int8)
    pool = empty_pool(shape, 5, CPU)
    assert pool[1].numel() == shape.page_bytes() == 3 * 2 * 2 * (16 * 32 + 16 * 4)
    assert scale_view(pool).shape == (5, 3, 2, 2, 16)
    scale_view(pool)[:] = 1
    assert not k_view(pool, 32).any()
    assert not v_view(pool, 32).any()


@compiled
@pytest.mark.parametrize(
    ("dim", "heads", "dtype", "usable"),
    [
        (64, 9, torch.float32, True),
        (64, 9, torch.float16, False),
        (24, 9, torch.float32, False),
        (512, 9, torch.float32, False),
        (64, 3 * 65, torch.float32, False),
    ],
)
def test_where_the_kernels_are_used(dim: int, heads: int, dtype: torch.dtype, usable: bool) -> None:
    assert NativeAttention.usable(KVShape(1, 3, dim, dtype), heads, dtype, CPU) is usable

"""Log probabilities against a slow reference and against transformers, and choices that share their prompt."""

from collections.abc import Callable

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from test_engine import prompt, tokens
from tiny import Judge

from forebay.catalog import ModelFiles
from forebay.engine.loop import Engine
from forebay.engine.sample import logprobs
from forebay.engine.sequence import Emit, GenSpec, Logprobs


def known(news: list[Emit]) -> list[Logprobs]:
    return [entry for emit in news for entry in emit.logprobs]


@settings(deadline=None, max_examples=200)
@given(
    # few values, so that there are equals
    st.lists(st.lists(st.integers(-9, 9), min_size=12, max_size=12), min_size=1, max_size=4),
    st.lists(st.tuples(st.integers(0, 11), st.integers(0, 14)), min_size=4, max_size=4),
)
def test_as_the_definition_says(rows: list[list[int]], asked: list[tuple[int, int]]) -> None:
    asked = asked[: len(rows)]
    found = logprobs(torch.tensor(rows, dtype=torch.float32), [t for t, _ in asked], [n for _, n in asked])
    for row, (token, count), got in zip(rows, asked, found, strict=True):
        wanted = np.array(row) - np.log(np.exp(np.array(row, dtype=np.float64)).sum())
        assert got.chosen == pytest.approx(wanted[token], abs=1e-5)
        order = sorted(range(12), key=lambda id: (-row[id], id))[:count]
        if len(set(row)) == len(row):  # which of many equals are the likeliest is anybody's guess
            assert got.ids == order
        assert got.values == pytest.approx(wanted[order], abs=1e-5)
        assert got.ids == sorted(got.ids, key=lambda id: (-row[id], id))


@pytest.mark.parametrize("kernels", ["auto", "off"])
def test_as_transformers_has_them(
    plain: tuple[ModelFiles, Judge], engine_of: Callable[..., Engine], kernels: str
) -> None:
    files, judge = plain
    news = engine_of(files, kernels=kernels).generate([GenSpec(1, prompt(40), 12, logprobs=5)])[1]
    answer = tokens(news)
    wanted = torch.log_softmax(judge.logits([*prompt(40), *answer])[39:-1], dim=-1)
    assert len(known(news)) == len(answer) == 12
    for row, token, got in zip(wanted, answer, known(news), strict=True):
        assert got.chosen == pytest.approx(row[token].item(), abs=2e-4)
        assert got.ids[0] == token  # greedy
        assert got.values == pytest.approx(row[got.ids].tolist(), abs=2e-4)
        assert got.values == pytest.approx(row.topk(5).values.tolist(), abs=2e-4)


def test_they_are_the_models_own_whatever_is_done_to_the_logits(
    plain: tuple[ModelFiles, Judge], engine_of: Callable[..., Engine]
) -> None:
    files, judge = plain
    bias = dict.fromkeys((3, 4, 5), 100.0)
    order = GenSpec(
        1, prompt(40), 12, temperature=1.5, seed=5, logit_bias=bias, repetition_penalty=1.8, bad_words=[[4]], logprobs=1
    )
    news = engine_of(files).generate([order])[1]
    answer = tokens(news)
    assert set(answer) <= {3, 5}
    wanted = torch.log_softmax(judge.logits([*prompt(40), *answer])[39:-1], dim=-1)
    assert [entry.chosen for entry in known(news)] == pytest.approx(
        [row[token].item() for row, token in zip(wanted, answer, strict=True)], abs=2e-4
    )


def test_law_9_they_are_the_same_to_the_bit_alone_and_in_a_crowd(
    plain: tuple[ModelFiles, Judge], engine_of: Callable[..., Engine]
) -> None:
    files, _ = plain
    order = GenSpec(1, prompt(60), 20, logprobs=7)
    # Some of them want more, some less, some none.
    others = [GenSpec(i, prompt(30, i), 20, logprobs=None if i % 2 else i) for i in range(2, 9)]
    settings = {"quantize": "int8", "kv_dtype": "int8", "quantize_anyway": True}
    alone = engine_of(files, **settings).generate([order])[1]
    crowd = engine_of(files, **settings).generate([*others, order])
    assert known(crowd[1]) == known(alone)
    assert [len(known(crowd[i])) for i in range(2, 9)] == [0 if i % 2 else 20 for i in range(2, 9)]


def test_choices_of_one_prompt_compute_it_once(
    plain: tuple[ModelFiles, Judge], engine_of: Callable[..., Engine]
) -> None:
    files, _ = plain
    engine = engine_of(files, token_budget=64)
    specs = [GenSpec(i, prompt(100), 10, temperature=1.0, seed=i) for i in range(1, 9)]
    news: dict[int, list[int]] = {spec.id: [] for spec in specs}
    for spec in specs:
        engine.submit(spec)
    computed = 0
    while engine.has_work:
        frame = engine.step()
        computed += frame.step_tokens
        for emit in frame.emits:
            news[emit.id] += emit.tokens
        engine.scheduler.check()
    # The prompt once, what is no whole page of it for each of the others, and the answers but their last tokens.
    assert computed == 100 + 7 * (100 - 96) + 8 * 9
    assert len({tuple(answer) for answer in news.values()}) > 1
    for spec in specs:
        assert news[spec.id] == tokens(engine_of(files).generate([spec])[spec.id])

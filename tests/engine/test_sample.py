"""Sampling against a slow reference, and against the distribution it claims to draw from."""

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import example, given, settings

from forebay.engine import kernels
from forebay.engine.batch import Sampling
from forebay.engine.sample import FAILED, sample, uniform

#: With torch's operators and with the kernel.
both = pytest.mark.parametrize(
    "compiled",
    [
        False,
        pytest.param(True, marks=pytest.mark.skipif(kernels.library() is None, reason="the kernels were not built")),
    ],
)


def params(rows: list[tuple[float, int, float]], *, banned: list[list[int]] | None = None, at: int = 7) -> Sampling:
    return Sampling(
        temperature=np.array([t for t, _, _ in rows], dtype=np.float32),
        top_k=np.array([k for _, k, _ in rows], dtype=np.int64),
        top_p=np.array([p for _, _, p in rows], dtype=np.float32),
        seed=list(range(len(rows))),
        position=[at] * len(rows),
        banned=banned or [[] for _ in rows],
    )


def allowed(logits: np.ndarray, temperature: float, top_k: int, top_p: float) -> tuple[np.ndarray, np.ndarray]:
    """(ids by falling probability, their probabilities) of what may be drawn: the definition, written out."""
    heat = np.float64(np.float32(temperature))
    weights = np.exp((logits.astype(np.float64) - logits.max()) / heat)
    order = np.argsort(-weights, kind="stable")
    weights = weights[order] / weights.sum()
    if top_k:
        order, weights = order[:top_k], weights[:top_k]
        weights = weights / weights.sum()
    if top_p < 1:
        n = int(np.searchsorted(np.cumsum(weights), np.float32(top_p))) + 1
        order, weights = order[:n], weights[:n]
    return order, weights / weights.sum()


#: Top-p is a share of what top-k leaves, also where far fewer tokens than top-k have nearly all of it.
PEAKED = [(2.0, 50, 0.9)] * 6

rows = st.lists(
    st.tuples(
        st.sampled_from([0.0, 0.3, 1.0, 2.0]),
        st.sampled_from([0, 1, 3, 50, 500]),
        st.sampled_from([1.0, 0.9, 0.5, 0.01]),
    ),
    min_size=1,
    max_size=6,
)


@both
@settings(max_examples=200, deadline=None)
@given(rows=rows, seed=st.integers(0, 1000), flat=st.booleans())
@example(rows=PEAKED, seed=0, flat=False)
def test_each_row_draws_what_the_definition_allows(
    compiled: bool, rows: list[tuple[float, int, float]], seed: int, flat: bool
) -> None:
    torch.manual_seed(seed)
    logits = torch.randn(len(rows), 101) * (0.01 if flat else 3)
    tokens = sample(logits.clone(), params(rows, at=seed), compiled=compiled)
    for i, (temperature, top_k, top_p) in enumerate(rows):
        if temperature == 0:
            assert tokens[i] == int(logits[i].argmax())
            continue
        ids, weights = allowed(logits[i].numpy(), temperature, top_k, top_p)
        if top_k or top_p < 1:
            # By falling probability the draw is one inversion of the uniform number. The kernel's weights are float32:
            # of tokens that are as likely as makes no difference there it may take the other one.
            at = min(int(np.searchsorted(np.cumsum(weights), uniform(i, seed), "right")), len(ids) - 1)
            close = 1e-5 * weights[at] if compiled else 0
            assert tokens[i] in ids[np.abs(weights - weights[at]) <= close]
        else:
            assert tokens[i] in ids


@both
@pytest.mark.parametrize("row", [(1.0, 0, 1.0), (0.7, 4, 1.0), (1.0, 0, 0.8), (1.5, 5, 0.9)])
def test_frequencies_are_those_of_the_distribution(row: tuple[float, int, float], compiled: bool) -> None:
    """Chi-square over 4,000 draws at successive positions of one seed; 1e-4 false alarms by its 99.99 % quantile."""
    torch.manual_seed(3)
    logits = torch.randn(1, 8)
    n = 4000
    drawn = np.array([sample(logits.clone(), params([row], at=at), compiled=compiled)[0] for at in range(n)])
    ids, weights = allowed(logits[0].numpy(), *row)
    seen = np.array([(drawn == i).sum() for i in ids])
    assert seen.sum() == n
    chi2 = float(((seen - n * weights) ** 2 / (n * weights)).sum())
    quantile = {0: 0.0, 1: 15.1, 2: 18.4, 3: 21.1, 4: 23.5, 5: 25.7, 6: 27.9, 7: 29.9}[len(ids) - 1]
    assert chi2 <= quantile


@both
def test_a_seeded_draw_does_not_depend_on_its_neighbours(compiled: bool) -> None:
    torch.manual_seed(1)
    logits = torch.randn(5, 300)
    row = (1.0, 0, 0.9)
    crowd = sample(
        logits.clone(), params([row, (0.5, 3, 1.0), (0.0, 0, 1.0), (1.0, 0, 1.0), (2.0, 7, 0.5)]), compiled=compiled
    )
    alone = sample(logits[:1].clone(), params([row]), compiled=compiled)
    assert crowd[0] == alone[0]


@both
def test_a_broken_row_fails_alone(compiled: bool) -> None:
    logits = torch.randn(4, 20)
    logits[1, 3] = torch.nan
    logits[2, 3] = torch.inf
    tokens = sample(logits, params([(0.0, 0, 1.0), (1.0, 0, 1.0), (0.0, 0, 1.0), (1.0, 5, 0.5)]), compiled=compiled)
    assert [token == FAILED for token in tokens] == [False, True, True, False]


@both
def test_banned_ids_are_not_drawn(compiled: bool) -> None:
    logits = torch.zeros(2, 4)
    logits[:, 2] = 50
    assert sample(logits.clone(), params([(0.0, 0, 1.0), (1.0, 0, 1.0)]), compiled=compiled) == [2, 2]
    tokens = sample(logits.clone(), params([(0.0, 0, 1.0), (1.0, 0, 1.0)], banned=[[2, 0], [2, 0]]), compiled=compiled)
    assert set(tokens) <= {1, 3}
    everything = [[0, 1, 2, 3], []]
    assert sample(logits.clone(), params([(0.0, 0, 1.0), (0.0, 0, 1.0)], banned=everything), compiled=compiled) == [
        FAILED,
        2,
    ]


@both
def test_a_large_vocabulary_is_cut_as_the_definition_says(compiled: bool) -> None:
    torch.manual_seed(9)
    logits = torch.randn(3, 50_000) * torch.tensor([[6.0], [2.0], [0.3]])
    rows = [(1.0, 0, 0.9), (0.8, 0, 0.95), (1.0, 0, 0.5)]
    for at in range(20):
        tokens = sample(logits.clone(), params(rows, at=at), compiled=compiled)
        for i, row in enumerate(rows):
            ids, weights = allowed(logits[i].numpy(), *row)
            near = int(np.searchsorted(np.cumsum(weights), uniform(i, at), "right"))
            assert tokens[i] in ids[max(0, near - 1) : near + 2]  # sums of 50,000 floats differ in the last digits


def test_uniform_is_a_function_of_seed_and_position() -> None:
    assert uniform(-1, 5) == uniform(-1, 5) != uniform(-1, 6)
    assert uniform(2**63, 0) != uniform(2**62, 0)
    many = [uniform(4, i) for i in range(2000)]
    assert all(0 <= u < 1 for u in many)
    assert abs(sum(many) / 2000 - 0.5) < 0.03

"""Sampling against a slow reference, and against the distribution it claims to draw from."""

from collections.abc import Callable

import hypothesis.strategies as st
import msgspec
import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from test_engine import Blind, prompt
from test_engine import tokens as tokens_of
from tiny import Judge

from forebay.catalog import ModelFiles
from forebay.engine import kernels
from forebay.engine.batch import Batch, Sampling
from forebay.engine.kv.capacity import pages_of
from forebay.engine.loop import Engine
from forebay.engine.sample import FAILED, sample, uniform
from forebay.engine.sequence import GenSpec, Sequence
from forebay.engine.step import Step, Work

#: 99.99 % quantiles of chi-square by degrees of freedom.
QUANTILES = (0.0, 15.1, 18.4, 21.1, 23.5, 25.7, 27.9, 29.9)
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
        min_p=np.zeros(len(rows), dtype=np.float32),
        seed=list(range(len(rows))),
        position=[at] * len(rows),
        banned=banned or [[] for _ in rows],
    )


def allowed(
    logits: np.ndarray, temperature: float, top_k: int, top_p: float, min_p: float = 0.0
) -> tuple[np.ndarray, np.ndarray]:
    """(ids by falling probability, their probabilities) of what may be drawn: the definition, written out."""
    heat = np.float64(np.float32(temperature))
    weights = np.exp((logits.astype(np.float64) - logits.max()) / heat)
    order = np.argsort(-weights, kind="stable")
    order = order[weights[order] >= np.float32(min_p)]
    order = order[weights[order] > 0]
    weights = weights[order] / weights[order].sum()
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
    assert chi2 <= QUANTILES[len(ids) - 1]


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


def adjusted(logits: np.ndarray, spec: GenSpec, answer: list[int]) -> np.ndarray:
    """One row's logits after the steps of the definition that come before temperature, written out."""
    result = []
    for id, logit in enumerate(logits):
        banned = len(answer) < spec.min_tokens and id in spec.stop_ids
        for word in spec.bad_words:
            banned = banned or [*answer, id][-len(word) :] == word
        x = np.float64(np.float32(logit + spec.logit_bias.get(id, 0.0)))
        if id in spec.ids or id in answer:
            x = x / spec.repetition_penalty if x > 0 else x * spec.repetition_penalty
        x -= spec.frequency_penalty * answer.count(id) + spec.presence_penalty * (id in answer)
        result.append(-np.inf if banned else x)
    return np.array(result, dtype=np.float32)


def sampling_of(rows: list[tuple[GenSpec, list[int]]]) -> Sampling:
    """What the runner would make of these orders, each with an answer so far."""
    works = []
    for i, (spec, answer) in enumerate(rows):
        seq = Sequence.of(spec, i)
        for token in answer:
            seq.append(token)
        seq.table = list(range(pages_of(len(seq.ids))))
        works.append(Work(seq, len(seq.ids) - 1, 1, samples=True))
    return Batch.of(Step(tuple(works))).sampling


#: Few ids, so that they repeat and bad words come about.
few = st.integers(0, 4)
penalty = st.sampled_from([0.0, 0.0, 1.5, 0.3, -2.0, 2.0])
specs = st.builds(
    GenSpec,
    id=st.just(0),
    ids=st.lists(st.integers(0, 9), min_size=1, max_size=12),
    max_tokens=st.just(50),
    min_tokens=st.sampled_from([0, 5]),
    temperature=st.sampled_from([0.0, 0.5, 1.0]),
    top_k=st.sampled_from([0, 3, 50]),
    top_p=st.sampled_from([1.0, 0.9, 0.3]),
    seed=st.integers(0, 2**63),
    stop_ids=st.lists(few, max_size=2),
    min_p=st.sampled_from([0.0, 0.02, 0.3, 1.0]),
    repetition_penalty=st.sampled_from([1.0, 1.3, 0.5, 2.0]),
    frequency_penalty=penalty,
    presence_penalty=penalty,
    logit_bias=st.dictionaries(st.integers(0, 100), st.sampled_from([1.0, -3.5, 100.0, -100.0]), max_size=4),
    bad_words=st.lists(st.lists(few, min_size=1, max_size=3), max_size=6),
)


@both
@settings(max_examples=300, deadline=None)
@given(rows=st.lists(st.tuples(specs, st.lists(few, max_size=12)), min_size=1, max_size=5), seed=st.integers(0, 1000))
def test_every_parameter_does_what_the_definition_says(
    compiled: bool, rows: list[tuple[GenSpec, list[int]]], seed: int
) -> None:
    torch.manual_seed(seed)
    logits = torch.randn(len(rows), 101) * 2
    logits[:, :5] += 4  # what the rules are about is what would be drawn
    tokens = sample(logits.clone(), sampling_of(rows), compiled=compiled)
    for i, (spec, answer) in enumerate(rows):
        wanted = adjusted(logits[i].numpy(), spec, answer)
        if spec.temperature == 0:
            assert tokens[i] == int(wanted.argmax())
            continue
        ids, weights = allowed(wanted, spec.temperature, spec.top_k, spec.top_p, spec.min_p)
        if not spec.top_k and spec.top_p == 1:  # then the draw goes by id
            weights, ids = weights[np.argsort(ids)], np.sort(ids)
        # The kernel's weights are float32: a draw at the edge of two tokens may fall to the other one, and two tokens
        # that are as likely as makes no difference there may stand in the other order.
        edge = 1e-5 if compiled else 1e-12
        high = np.cumsum(weights)
        u = uniform(spec.seed, len(spec.ids) + len(answer))
        hit = (high - weights - edge <= u) & (u <= high + edge)
        alike = np.abs(weights[:, None] - weights[hit]).min(axis=1) <= edge * weights
        assert tokens[i] in ids[hit | alike]
    alone = sample(logits[:1].clone(), sampling_of(rows[:1]), compiled=compiled)
    assert alone == tokens[:1]


@both
@pytest.mark.parametrize(
    "more",
    [
        {"repetition_penalty": 1.6, "frequency_penalty": 0.4, "presence_penalty": -0.5},
        {"repetition_penalty": 0.8, "presence_penalty": 1.0, "min_p": 0.15, "logit_bias": {6: 1.0, 2: -0.5}},
        {"frequency_penalty": -0.6, "min_p": 0.05, "top_p": 0.9, "temperature": 1.4, "bad_words": [[3, 5], [3, 1]]},
    ],
)
def test_frequencies_with_penalties_are_those_of_the_distribution(more: dict[str, object], compiled: bool) -> None:
    """Chi-square over 4,000 seeds, with false alarms as above."""
    torch.manual_seed(4)
    logits = torch.randn(1, 8)
    n, answer = 4000, [1, 1, 4, 3]
    base = msgspec.structs.replace(GenSpec(0, [0, 1, 2, 2], 9, temperature=1.0), **more)
    orders = [msgspec.structs.replace(base, seed=seed) for seed in range(n)]
    drawn = np.array(sample(logits.repeat(n, 1), sampling_of([(order, answer) for order in orders]), compiled=compiled))
    order = orders[0]
    wanted = adjusted(logits[0].numpy(), order, answer)
    ids, weights = allowed(wanted, order.temperature, order.top_k, order.top_p, order.min_p)
    seen = np.array([(drawn == i).sum() for i in ids])
    assert seen.sum() == n
    chi2 = float(((seen - n * weights) ** 2 / (n * weights)).sum())
    assert chi2 <= QUANTILES[len(ids) - 1]


def test_who_uses_none_of_it_pays_nothing() -> None:
    params = sampling_of([(GenSpec(0, [1, 2], 5), [3]), (GenSpec(0, [1], 5, temperature=1.0, top_p=0.5), [])])
    assert params.biases is None
    assert params.penalties is None
    assert params.banned == [[], []]


@both
def test_absurd_penalties_break_no_row_and_mend_none(compiled: bool) -> None:
    absurd: list[dict[str, float]] = [
        {"repetition_penalty": 5e-324},
        {"repetition_penalty": 1e300},
        {"frequency_penalty": -1e300, "repetition_penalty": 1e-300},
        {"presence_penalty": 1e300},
    ]
    base = GenSpec(0, [0, 1, 2], 9, logit_bias={0: -1e300})
    rows = [(msgspec.structs.replace(base, temperature=t, **more), [1, 1]) for more in absurd for t in (0.0, 1.0)]
    torch.manual_seed(2)
    logits = torch.randn(len(rows), 20)
    assert FAILED not in sample(logits.clone(), sampling_of(rows), compiled=compiled)
    for broken in (torch.nan, torch.inf):
        logits[:, 1] = broken
        assert sample(logits.clone(), sampling_of(rows), compiled=compiled) == [FAILED] * len(rows)


PARAMETERS: list[dict[str, object]] = [
    {"repetition_penalty": 1.2},
    {"frequency_penalty": 0.7, "presence_penalty": 0.5},
    {"repetition_penalty": 0.9, "presence_penalty": -1.0, "logit_bias": {7: 2.5, 11: -100.0, 198: 4.0}},
]


@pytest.mark.parametrize("more", PARAMETERS)
def test_law_9_every_path_through_the_engine_gives_the_plain_answer(
    plain: tuple[ModelFiles, Judge], engine_of: Callable[..., Engine], more: dict[str, object]
) -> None:
    """Alone, in a crowd, in chunks and after a preemption: what transformers' logits and the definition give."""
    files, judge = plain
    torch.set_num_threads(1)  # models as small as this are no faster on more
    ids, n = prompt(40), 60
    taken = judge.greedy(ids, n)
    order = GenSpec(1, ids, n, bad_words=[taken[:1], taken[1:3], taken[3:6]], **more)  # type: ignore[arg-type]
    answer: list[int] = []
    while len(answer) < n:
        wanted = adjusted(judge.logits([*ids, *answer])[-1].numpy(), order, answer)
        answer.append(int(wanted.argmax()))
    assert answer != taken
    others = [GenSpec(i, prompt(40, i), n, repetition_penalty=1.5, presence_penalty=2.0) for i in range(2, 6)]
    assert tokens_of(engine_of(files, threads=1).generate([order])[1]) == answer
    assert tokens_of(engine_of(files, token_budget=16, max_batch=8, threads=1).generate([*others, order])[1]) == answer
    engine = engine_of(files, kv_memory=200_000, max_batch=8, threads=1)
    engine.scheduler.guess = Blind()
    assert tokens_of(engine.generate([*others, order])[1]) == answer
    assert engine.scheduler.preemptions > 0


@pytest.mark.parametrize("more", PARAMETERS)
def test_law_9_a_seeded_draw_survives_crowd_and_preemption(
    plain: tuple[ModelFiles, Judge], engine_of: Callable[..., Engine], more: dict[str, object]
) -> None:
    files, _ = plain
    order = GenSpec(1, prompt(40), 60, temperature=0.8, min_p=0.02, seed=5, **more)  # type: ignore[arg-type]
    others = [GenSpec(i, prompt(40, i), 60, temperature=1.0, seed=i, frequency_penalty=1.0) for i in range(2, 6)]
    alone = tokens_of(engine_of(files, threads=1).generate([order])[1])
    engine = engine_of(files, kv_memory=200_000, max_batch=8, threads=1)
    engine.scheduler.guess = Blind()
    assert tokens_of(engine.generate([*others, order])[1]) == alone
    assert engine.scheduler.preemptions > 0


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({"min_p": 1.1}, "min_p"),
        ({"min_p": float("nan")}, "min_p"),
        ({"repetition_penalty": 0.0}, "repetition_penalty"),
        ({"repetition_penalty": float("nan")}, "repetition_penalty"),
        ({"repetition_penalty": float("inf")}, "repetition_penalty"),
        ({"frequency_penalty": float("inf")}, "frequency_penalty"),
        ({"presence_penalty": float("nan")}, "presence_penalty"),
        ({"logit_bias": {1: float("inf")}}, "logit_bias"),
        ({"logit_bias": {199: 1.0}}, "token id 199"),
        ({"logit_bias": {-1: 1.0}}, "token id -1"),
        ({"bad_words": [[3, 199]]}, "token id 199"),
        ({"bad_words": [[3], []]}, "bad_words"),
    ],
)
def test_the_backstop_knows_every_parameter(
    plain: tuple[ModelFiles, Judge], engine_of: Callable[..., Engine], more: dict[str, object], why: str
) -> None:
    (emit,) = engine_of(plain[0], threads=1).generate([GenSpec(1, [1], 5, **more)])[1]  # type: ignore[arg-type]
    assert emit.end == "refused"
    assert why in emit.detail

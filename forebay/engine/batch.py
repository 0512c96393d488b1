"""Step -> flat arrays: what the runner needs, with no sequence left in it.

Rows are tokens; all sequences of the step stand one after the other, decodes first.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from .kv.pages import PAGE_SIZE
from .sequence import Sequence
from .step import Step, Work

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Biases:
    """What is added to logits, [E]: ``value`` to that of token ``id`` in sampling row ``row``, each at most once."""

    row: Ints
    id: Ints
    value: Floats


@dataclass(frozen=True, slots=True)
class Penalties:
    """Penalties on logits, [E]: that of token ``id`` in sampling row ``row`` is weakened by the factor
    ``repetition``, then ``minus`` is taken from it. Each at most once."""

    row: Ints
    id: Ints
    repetition: Floats
    minus: Floats


@dataclass(frozen=True, slots=True)
class Sampling:
    """Per sampling row (S of them): arrays [S], and the token ids that must not be drawn now. ``logprobs``: how many
    are wanted, by row, of those that want any. ``biases`` and ``penalties`` None: no row has any."""

    temperature: npt.NDArray[np.float32]
    top_k: Ints
    top_p: npt.NDArray[np.float32]
    min_p: npt.NDArray[np.float32]
    seed: list[int]
    position: list[int]
    banned: list[list[int]]
    logprobs: dict[int, int] = field(default_factory=dict)
    biases: Biases | None = None
    penalties: Penalties | None = None


@dataclass(frozen=True, slots=True)
class Batch:
    """One step as arrays. N rows (tokens), B sequences, S rows that sample.

    ``ids``, ``positions`` [N]; ``page``, ``offset`` [N]: where the row's K and V go. ``q_start`` [B+1]: first row of
    each sequence; ``kv_len`` [B]: tokens that its last row attends to; ``tables`` [B, max pages]: page ids, padded
    with the sequence's first. The first ``n_decodes`` sequences have one row each. ``sample_rows`` [S], and ``works``
    [S]: the index in the step of the work that each belongs to.
    """

    ids: Ints
    positions: Ints
    page: Ints
    offset: Ints
    q_start: Ints
    kv_len: Ints
    tables: Ints
    n_decodes: int
    sample_rows: Ints
    works: list[int]
    sampling: Sampling

    @classmethod
    def of(cls, step: Step) -> Batch:
        order = sorted(range(len(step.works)), key=lambda i: step.works[i].count > 1)
        works = [step.works[i] for i in order]
        counts = np.array([work.count for work in works], dtype=np.int64)
        starts = np.array([work.start for work in works], dtype=np.int64)
        q_start = np.concatenate([[0], np.cumsum(counts)])
        # Padded with the row's own first page: torch's attention reads the padding, and a stranger's may be NaN.
        tables = np.zeros((len(works), max(len(work.seq.table) for work in works)), dtype=np.int64)
        for b, work in enumerate(works):
            tables[b, : len(work.seq.table)] = work.seq.table
            tables[b, len(work.seq.table) :] = work.seq.table[0]
        owner = np.repeat(np.arange(len(works)), counts)
        positions = np.arange(q_start[-1]) - q_start[owner] + starts[owner]
        ids = np.fromiter(_ids(works), dtype=np.int64, count=int(q_start[-1]))
        sampling = [b for b, work in enumerate(works) if work.samples]
        return cls(
            ids=ids,
            positions=positions,
            page=tables[owner, positions // PAGE_SIZE],
            offset=positions % PAGE_SIZE,
            q_start=q_start,
            kv_len=starts + counts,
            tables=tables,
            n_decodes=int((counts == 1).sum()),
            sample_rows=q_start[1:][sampling] - 1,
            works=[order[b] for b in sampling],
            sampling=_sampling([works[b] for b in sampling]),
        )


def _ids(works: list[Work]) -> Iterator[int]:
    for work in works:
        yield from work.seq.ids[work.start : work.start + work.count]


def _sampling(works: list[Work]) -> Sampling:
    specs = [work.seq.spec for work in works]
    return Sampling(
        temperature=np.array([spec.temperature for spec in specs], dtype=np.float32),
        top_k=np.array([spec.top_k for spec in specs], dtype=np.int64),
        top_p=np.array([spec.top_p for spec in specs], dtype=np.float32),
        min_p=np.array([spec.min_p for spec in specs], dtype=np.float32),
        seed=[spec.seed for spec in specs],
        position=[len(work.seq.ids) for work in works],
        banned=[_banned(work.seq) for work in works],
        logprobs={row: spec.logprobs for row, spec in enumerate(specs) if spec.logprobs is not None},
        biases=_biases(works),
        penalties=_penalties(works),
    )


def _banned(seq: Sequence) -> list[int]:
    early = seq.spec.stop_ids if seq.generated < seq.spec.min_tokens else []
    return early if seq.bad_words is None else [*early, *seq.bad_words.next(seq.ids, seq.generated)]


def _biases(works: list[Work]) -> Biases | None:
    biased = [(row, work.seq.spec.logit_bias) for row, work in enumerate(works) if work.seq.spec.logit_bias]
    if not biased:
        return None
    return Biases(
        row=np.repeat([row for row, _ in biased], [len(bias) for _, bias in biased]),
        id=np.array([id for _, bias in biased for id in bias], dtype=np.int64),
        value=np.array([value for _, bias in biased for value in bias.values()], dtype=np.float64),
    )


def _penalties(works: list[Work]) -> Penalties | None:
    counted = [(row, work.seq.spec, work.seq.tally) for row, work in enumerate(works) if work.seq.tally is not None]
    if not counted:
        return None
    sizes = [len(tally.ids) for _, _, tally in counted]

    def each(values: list[float]) -> Floats:
        return np.repeat(np.array(values, dtype=np.float64), sizes)

    times = _joined([tally.counts for _, _, tally in counted])
    frequency = each([spec.frequency_penalty for _, spec, _ in counted])
    presence = each([spec.presence_penalty for _, spec, _ in counted])
    return Penalties(
        row=np.repeat([row for row, _, _ in counted], sizes),
        id=_joined([tally.ids for _, _, tally in counted]),
        repetition=each([spec.repetition_penalty for _, spec, _ in counted]),
        minus=frequency * times + presence * (times > 0),
    )


def _joined(parts: list[array[int]]) -> Ints:
    """A copy: an array that numpy looks at could not grow."""
    return np.concatenate([np.asarray(part, dtype=np.int64) for part in parts])

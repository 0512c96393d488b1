"""Logits -> token ids, one row at a time in meaning, all rows at once in execution.

The definition, in order; each row has its own numbers:

1. banned ids (an end of turn too early, the last id of a bad word whose others have just come) get -inf;
2. logit_bias is added;
3. repetition_penalty r, of ids that the prompt or the answer has: positive logits are divided by r, others multiplied;
4. frequency_penalty times how often the id is in the answer, and presence_penalty if it is in it, are subtracted;
5. temperature 0: the largest logit wins, of equals the lowest id. Else logits / temperature become probabilities;
6. min_p: ids less likely than min_p times the likeliest are dropped;
7. top_k: the k likeliest stay; then top_p: of these, as many as are needed for that share of what is left;
8. a draw by inverting the cumulative distribution with one uniform number per row. The number is a function of (seed,
   position) alone (Philox, a counter-based generator: Salmon et al. 2011), so a seeded answer does not depend on who
   else is in the batch.

Steps 2 to 4 touch few logits, and are done here for both ways of sampling.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from . import kernels
from .batch import Ints, Sampling
from .sequence import Logprobs
from .step import FAILED

#: Logits are kept inside of this, so that no penalty, however absurd, makes a sound row look broken.
LARGEST = 1e30


def sample(logits: torch.Tensor, params: Sampling, *, compiled: bool = False) -> list[int]:
    """``logits`` float32 [S, vocab], overwritten. Returns S ids, FAILED for broken rows. ``compiled``: with the kernel
    where it can be; torch sorts the whole vocabulary for top-p."""
    _adjust(logits, params)
    if compiled and logits.device.type == "cpu" and logits.stride(-1) == 1 and kernels.library():
        return _compiled(logits, params)
    for row, banned in enumerate(params.banned):
        if banned:
            logits[row, banned] = -torch.inf
    best, greedy = logits.max(dim=-1)
    tokens = torch.where(torch.isfinite(best), greedy, FAILED)
    hot = np.flatnonzero(params.temperature > 0)
    if len(hot):
        rows = torch.from_numpy(hot).to(logits.device)
        drawn = _draw(logits[rows], params, hot)
        tokens[rows] = torch.where(tokens[rows] == FAILED, FAILED, drawn)
    result: list[int] = tokens.tolist()
    return result


def logprobs(logits: torch.Tensor, tokens: list[int], counts: list[int]) -> list[Logprobs]:
    """For each row of ``logits`` float32 [R, vocab], as the model gave them: log probabilities of the token that was
    drawn, and of the ``counts`` likeliest. Of equals the lower id comes first."""
    values = torch.log_softmax(logits, dim=-1)
    # One more than asked for, so that equals at the end do not hide the lower id among them.
    top = values.topk(min(max(counts) + 1, values.shape[-1]), dim=-1)
    chosen = values.gather(-1, torch.tensor(tokens, device=values.device).clamp(min=0)[:, None])[:, 0].tolist()
    found = []
    for mine, ids, high, n in zip(chosen, top.indices.tolist(), top.values.tolist(), counts, strict=True):
        order = sorted(zip(ids, high, strict=True), key=lambda entry: (-entry[1], entry[0]))[:n]
        found.append(Logprobs(mine, [id for id, _ in order], [value for _, value in order]))
    return found


def _adjust(logits: torch.Tensor, params: Sampling) -> None:
    """Biases and penalties, in place. (The ids that are banned may come later: -inf stays -inf under all of them.)"""
    if biases := params.biases:
        place = _place(biases.row, biases.id, logits)
        _put(logits, place, logits[place].double() + torch.from_numpy(biases.value).to(logits.device))
    if penalties := params.penalties:
        place = _place(penalties.row, penalties.id, logits)
        repetition = torch.from_numpy(penalties.repetition).to(logits.device)
        old = logits[place].double()
        new = torch.where(old > 0, old / repetition, old * repetition)
        _put(logits, place, new - torch.from_numpy(penalties.minus).to(logits.device))


def _place(row: Ints, id: Ints, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.from_numpy(row).to(logits.device), torch.from_numpy(id).to(logits.device)


def _put(logits: torch.Tensor, place: tuple[torch.Tensor, torch.Tensor], new: torch.Tensor) -> None:
    """``new`` instead of logits that are finite; others are no numbers to reckon with."""
    old = logits[place]
    logits[place] = torch.where(torch.isfinite(old), new.clamp(-LARGEST, LARGEST).float(), old)


def _compiled(logits: torch.Tensor, params: Sampling) -> list[int]:
    lib = kernels.library()
    if lib is None:
        raise RuntimeError("the kernels were not built")
    rows, vocab = logits.shape
    hot = params.temperature > 0
    draw = np.zeros(rows)
    for i in np.flatnonzero(hot):
        draw[i] = uniform(params.seed[i], params.position[i])
    banned = np.array([id for ids in params.banned for id in ids], dtype=np.int64)
    begins = np.cumsum([0, *map(len, params.banned)], dtype=np.int64)
    # Room to sort in, for rows that are cut. Memory that is not touched is not there.
    order = np.empty(rows * vocab if hot.any() else 0, dtype=np.int32)
    tokens = np.zeros(rows, dtype=np.int64)
    arrays: list[npt.NDArray[Any]] = [
        params.temperature,
        params.top_p,
        params.min_p,
        params.top_k,
        draw,
        banned,
        begins,
        tokens,
        order,
    ]
    pointers = [array.ctypes.data for array in arrays]
    job = kernels.SampleJob(logits.data_ptr(), *pointers, rows, vocab, logits.stride(0))
    lib.forebay_sample(ctypes.byref(job))
    result: list[int] = tokens.tolist()
    return result


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) that depends on nothing but its arguments."""
    return float(np.random.Generator(np.random.Philox(key=seed % 2**64, counter=position)).random())


def _draw(logits: torch.Tensor, params: Sampling, hot: np.ndarray) -> torch.Tensor:
    """One draw for each row [H, vocab] with a temperature."""
    device = logits.device
    heat = torch.from_numpy(params.temperature[hot]).to(device)
    top_k, top_p = params.top_k[hot], params.top_p[hot]
    u = torch.tensor([uniform(params.seed[i], params.position[i]) for i in hot], dtype=torch.float64, device=device)
    probs = torch.softmax(logits.double() / heat[:, None].double(), dim=-1)
    if (min_p := params.min_p[hot]).any():
        bound = torch.from_numpy(min_p).to(device).double()[:, None] * probs.max(-1, keepdim=True).values
        probs = probs.masked_fill(probs < bound, 0)
    tokens = torch.empty(len(hot), dtype=torch.int64, device=device)
    cut = (top_k > 0) | (top_p < 1)
    # Rows that keep the whole vocabulary need no order: invert the cumulative sum as it stands.
    if (~cut).any():
        rows = torch.from_numpy(np.flatnonzero(~cut)).to(device)
        tokens[rows] = _invert(probs[rows], u[rows])
    for k, rows_ in _by_width(top_k, top_p, cut, probs.shape[-1]):
        rows = torch.from_numpy(rows_).to(device)
        some, ids = probs[rows].topk(k, dim=-1)
        limit = torch.from_numpy(np.where(top_k[rows_] > 0, top_k[rows_], k)).to(device)
        some = some.masked_fill(torch.arange(k, device=device) >= limit[:, None], 0)
        p = torch.from_numpy(top_p[rows_]).to(device).double()
        before = some.cumsum(-1) - some
        some = some.masked_fill(before > p[:, None] * some.sum(-1, keepdim=True), 0)
        tokens[rows] = ids.gather(-1, _invert(some, u[rows])[:, None])[:, 0]
    return tokens


def _by_width(top_k: np.ndarray, top_p: np.ndarray, cut: np.ndarray, vocab: int) -> list[tuple[int, np.ndarray]]:
    """Rows that are cut, in two groups by how much of the sorted vocabulary they need."""
    narrow = cut & (top_k > 0) & (top_k < vocab)
    wide = cut & ~narrow
    groups = []
    if narrow.any():
        groups.append((int(top_k[narrow].max()), np.flatnonzero(narrow)))
    if wide.any():
        groups.append((vocab, np.flatnonzero(wide)))
    return groups


def _invert(weights: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
    """Index i with cumsum[i-1] <= u * total < cumsum[i], per row of [R, V] non-negative weights."""
    total = weights.cumsum(-1)
    index = torch.searchsorted(total, (u * total[:, -1])[:, None], right=True)[:, 0]
    # u * total can round up to total itself: fall back to the last index that has any weight.
    last = (weights > 0).long().cumsum(-1).argmax(-1)
    return torch.minimum(index, last)

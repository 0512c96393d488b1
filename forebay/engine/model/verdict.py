"""What `forebay quantize --report` has found, and what ``auto`` makes of it.

A verdict belongs to a model (by fingerprint) and an instruction set, because speed is part of it. Reports of this
machine are kept beside the model's other derived files; those of the catalog's models ship with Forebay.
"""

from __future__ import annotations

import json
import logging
from dataclasses import asdict, dataclass
from importlib import resources
from pathlib import Path
from typing import Any, Literal

from ...catalog import replacing
from ...config import EngineSettings
from ...contract import Unsupported

log = logging.getLogger(__name__)

#: Most perplexity that a mode may lose against the model's own dtype, as a share.
LIMIT = 0.01
#: Instruction sets from the least up: what paid on a lower one is taken on a higher one that has no verdict.
_LEVELS = ("none", "portable", "avx2", "vnni")

Quantize = Literal["none", "int8", "int4"]
KVType = Literal["model", "int8"]


@dataclass(frozen=True, slots=True)
class Score:
    """One mode's report. ``loss``: perplexity over that of the model's own dtype, minus 1. ``agreement``: share of
    greedy tokens that are the same. ``recall``: share of facts found again. ``right``: questions answered right;
    ``lost``: of those that the model's own dtype answers right, answered wrong. ``speed``: output tokens/s of 16
    sequences; ``alone``: seconds per token of one. ``weights`` and ``kv_token`` in bytes."""

    quantize: Quantize
    kv: KVType
    loss: float
    agreement: float
    recall: float
    right: int
    lost: int
    speed: float
    alone: float
    weights: int
    kv_token: int


@dataclass(frozen=True, slots=True)
class Verdict:
    scores: tuple[Score, ...]

    def of(self, quantize: Quantize, kv: KVType) -> Score | None:
        return next((s for s in self.scores if (s.quantize, s.kv) == (quantize, kv)), None)

    def passes(self, score: Score) -> bool:
        """At most 1 % of perplexity lost, no fact forgotten that the model's own dtype remembers, and one right answer
        in 16 lost: a small model has some that hang on two tokens equally likely."""
        own = self.of("none", "model")
        return (
            score.loss <= LIMIT
            and score.lost <= (own.right // 16 if own else 0)
            and (own is None or score.recall >= own.recall)
        )

    def best(self) -> Score | None:
        """The fastest mode that passes."""
        return max((s for s in self.scores if self.passes(s)), key=lambda s: s.speed, default=None)


def save(verdict: Verdict, path: Path) -> None:
    """Raises OSError."""
    text = "[\n" + ",\n".join(json.dumps(asdict(score)) for score in verdict.scores) + "\n]\n"
    with replacing(path) as file:
        file.write(text.encode())


def find(cache: Path | None, level: str) -> Verdict | None:
    """The verdict for the model whose folder of derived files is ``cache``: this machine's own, else a shipped one."""
    if cache is None:
        return None
    usable = _LEVELS[1 : _LEVELS.index(level) + 1][::-1] if level != "none" else ("none",)
    for name in usable:
        for text in (_own(file_of(cache, name)), _shipped(cache.name, name)):
            if text is not None and (verdict := _parse(text)):
                return verdict
    return None


def file_of(cache: Path, level: str) -> Path:
    return cache / f"verdict-{level}.json"


def choose(settings: EngineSettings, cache: Path | None, level: str) -> tuple[Quantize, KVType]:
    """What to run. ``auto`` is what the verdict found best, and nothing where the user has named a dtype or there is
    no verdict. Raises Unsupported for a mode that failed its report, unless it is forced."""
    verdict = find(cache, level)
    open_choice = settings.dtype == "auto"
    if settings.quantize == "auto" and open_choice and verdict is None:
        log.info("no verdict on quantization for this model here; get one with: forebay quantize --report MODEL")
    best = verdict.best() if verdict and open_choice else None
    quantize: Quantize = settings.quantize if settings.quantize != "auto" else best.quantize if best else "none"
    kv: KVType = "model"
    if settings.kv_dtype != "auto":
        kv = settings.kv_dtype
    elif open_choice and verdict and (int8 := verdict.of(quantize, "int8")) and verdict.passes(int8):
        kv = "int8"
    score = verdict.of(quantize, kv) if verdict else None
    if verdict and score and not verdict.passes(score) and not settings.quantize_anyway:
        raise Unsupported(
            f"quantize {quantize} with kv-dtype {kv} failed its report on this model: it loses {score.loss:.1%} of "
            f"perplexity (limit {LIMIT:.0%}), recalls {score.recall:.0%} and gets {score.lost} answers wrong that were "
            "right; take it all the same with "
            "--quantize-anyway true",
            param="quantize",
        )
    return quantize, kv


def _own(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError):
        return None


def _shipped(fingerprint: str, level: str) -> str | None:
    file = resources.files(__package__) / "verdicts" / f"{fingerprint}-{level}.json"
    return file.read_text(encoding="utf-8") if file.is_file() else None


def _parse(text: str) -> Verdict | None:
    try:
        rows: list[dict[str, Any]] = json.loads(text)
        return Verdict(tuple(Score(**row) for row in rows))
    except (ValueError, TypeError):
        return None

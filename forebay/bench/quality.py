"""The gate of quantization: speed, memory and accuracy of each mode on this machine, and a verdict that is stored.

    forebay quantize --report MODEL        (this module in a process of its own)

Accuracy is judged on Python's own manual (``pydoc_data.topics``: prose, tables and code that every installation has):
perplexity and the share of positions where the most likely token is the same as without quantization; and on
conversations of several turns in which a fact of the first turn is asked for at the end, and on short questions of
general knowledge: perplexity does not show a first token that tips over. Speed is 16 sequences of 300 tokens in and
100 out, from the times of prefill and of a decode step, and the time per token of one sequence.
"""

from __future__ import annotations

import gc
import json
import math
import pydoc_data.topics
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import click
import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from .. import catalog
from ..config import EngineSettings
from ..contract import ForebayError, Message
from ..engine import kernels
from ..engine.loop import Engine
from ..engine.model import verdict
from ..engine.model.verdict import KVType, Quantize, Score, Verdict
from ..engine.runner import Built, build, dummy_work
from ..engine.scheduler import Scheduler
from ..engine.sequence import GenSpec
from ..engine.step import Step
from ..text.detokenize import Detokenizer
from ..text.template import ChatTemplate
from ..text.tokenizer import Tokenizer

MODES: tuple[tuple[Quantize, KVType], ...] = (
    ("none", "model"),
    ("none", "int8"),
    ("int8", "model"),
    ("int8", "int8"),
    ("int4", "model"),
    ("int4", "int8"),
)
WINDOW = 512
#: Questions, and what a right answer contains.
_KNOWLEDGE = (
    ("What is the capital of France?", "paris"),
    ("What is the capital of Germany?", "berlin"),
    ("What is the capital of Italy?", "rome"),
    ("What is the capital of Spain?", "madrid"),
    ("What is the capital of Japan?", "tokyo"),
    ("What is the capital of China?", "beijing"),
    ("What is the capital of Russia?", "moscow"),
    ("What is the capital of Egypt?", "cairo"),
    ("What is the largest planet in our solar system?", "jupiter"),
    ("Which planet is known as the Red Planet?", "mars"),
    ("Who wrote Romeo and Juliet?", "shakespeare"),
    ("Who painted the Mona Lisa?", "leonardo"),
    ("What is the chemical formula of water?", "h2o"),
    ("Which gas do plants take from the air?", "carbon dioxide"),
    ("How many days are there in a week?", "seven"),
    ("How many legs does a spider have?", "eight"),
    ("What is the opposite of hot?", "cold"),
    ("Which language is spoken in Brazil?", "portuguese"),
    ("On which continent is Kenya?", "africa"),
    ("What is the largest ocean on Earth?", "pacific"),
    ("What is the tallest mountain in the world?", "everest"),
    ("Which metal has the symbol Fe?", "iron"),
    ("Which animal is called man's best friend?", "dog"),
    ("What do bees make?", "honey"),
)
SAID = 24
BATCH, PROMPT, ANSWER = 16, 300, 100

_FILLERS = (
    "What are your opening hours on public holidays?",
    "Do you deliver to other countries, and what does it cost?",
    "I would like to know how to return a pair of shoes that do not fit.",
    "Which payment methods do you accept in the online shop?",
)
_REPLIES = (
    "We are open from ten to four on most public holidays. Please look at our site for the exceptions.",
    "Yes, we deliver to most countries. The cost depends on the weight of the parcel and on where it goes.",
    "You can return them within thirty days. Please use the label in the box and keep the receipt.",
    "We accept all common cards, bank transfer and payment on delivery in some regions.",
)


@dataclass(frozen=True, slots=True)
class Questions:
    """What every mode is asked: windows of text [W][512], prompts with the ids of the fact that they end before, and
    prompts with the word that their answer should contain."""

    windows: list[list[int]]
    facts: list[tuple[list[int], list[int]]]
    knowledge: list[tuple[list[int], str]]
    tokenizer: Tokenizer


def questions(files: catalog.ModelFiles, n_tokens: int, n_facts: int) -> Questions:
    meta = catalog.read_meta(files)
    tokenizer = Tokenizer.load(files, meta)
    template = ChatTemplate.of(meta)
    topics = pydoc_data.topics.topics
    text = "\n".join(topics[name] for name in sorted(topics))
    ids = tokenizer.encode(text[: n_tokens * 8], specials=False)
    windows = [ids[i : i + WINDOW] for i in range(0, min(n_tokens, len(ids)) - WINDOW + 1, WINDOW)]
    facts = []
    for i in range(n_facts):
        number = str(10_000 + i * 7_919 % 90_000)
        turns = [Message("user", f"Hello, my order number is {number}. Please remember it."), _said("Of course.")]
        for n in range(4):
            turns += [Message("user", _FILLERS[(i + n) % 4]), _said(_REPLIES[(i + n) % 4])]
        turns.append(Message("user", "What was my order number?"))
        prompt = template.encode(tokenizer, turns) + tokenizer.encode("Your order number is ", specials=False)
        facts.append((prompt, tokenizer.encode(number, specials=False)))
    knowledge = [(template.encode(tokenizer, [Message("user", asked)]), word) for asked, word in _KNOWLEDGE]
    return Questions(windows, facts, knowledge, tokenizer)


def _said(text: str) -> Message:
    return Message("assistant", text)


@dataclass(slots=True)
class Measured:
    """``picks``: the most likely token at every position of the windows."""

    nll: float
    picks: np.ndarray
    recall: float
    right: list[bool]
    speed: float
    alone: float
    weights: int
    kv_token: int


def measure(built: Built, asked: Questions, repeats: int, advance: Callable[[], None]) -> Measured:
    losses, picks = [], []
    for window in asked.windows:
        logits = built.runner.logits(_step(window), every_row=True)[:-1]
        target = torch.tensor(window[1:])
        losses.append(float(torch.nn.functional.cross_entropy(logits, target)))
        picks.append(logits.argmax(-1).numpy())
        advance()
    speed, alone = _speed(built, repeats)
    advance()
    said = _generate(built, [(prompt, len(fact)) for prompt, fact in asked.facts])
    recall = statistics.fmean(ids == fact for ids, (_, fact) in zip(said, asked.facts, strict=True))
    said = _generate(built, [(prompt, SAID) for prompt, _ in asked.knowledge])
    texts = [Detokenizer(asked.tokenizer).push(ids).lower() for ids in said]
    right = [word in text for text, (_, word) in zip(texts, asked.knowledge, strict=True)]
    advance()
    return Measured(
        nll=statistics.fmean(losses),
        picks=np.concatenate(picks),
        recall=recall,
        right=right,
        speed=speed,
        alone=alone,
        weights=built.weight_bytes,
        kv_token=built.kv_token_bytes,
    )


def _step(ids: list[int]) -> Step:
    work = dummy_work(0, len(ids), n_pages=10**6)
    work.seq.ids = ids
    return Step((work,))


def _speed(built: Built, repeats: int) -> tuple[float, float]:
    """Output tokens/s of 16 sequences of 300 in and 100 out; seconds per token of one."""
    middle = PROMPT + ANSWER // 2

    def median(works: int, start: int, count: int) -> float:
        step = Step(tuple(dummy_work(start, count, built.n_pages, first_page=i * 32) for i in range(works)))
        times = []
        for _ in range(repeats + 1):
            begin = time.perf_counter()
            built.runner.execute(step)
            times.append(time.perf_counter() - begin)
        return statistics.median(times[1:])

    for i in range(BATCH):
        built.runner.execute(Step((dummy_work(0, middle, built.n_pages, first_page=i * 32),)))
    prefill, decode, alone = median(1, 0, PROMPT), median(BATCH, middle, 1), median(1, middle, 1)
    return BATCH * ANSWER / (BATCH * prefill + ANSWER * decode), alone


def _generate(built: Built, asked: list[tuple[list[int], int]]) -> list[list[int]]:
    """The greedy answers to prompts, of so many tokens at most."""
    scheduler = Scheduler(n_pages=built.n_pages, max_batch=BATCH, token_budget=WINDOW, max_context=built.max_context)
    engine = Engine(scheduler, built.runner, vocab_size=built.spec.vocab_size, clock=time.monotonic)
    news = engine.generate([GenSpec(i, prompt, most) for i, (prompt, most) in enumerate(asked)])
    return [[token for emit in news[i] for token in emit.tokens] for i in range(len(asked))]


def report(
    files: catalog.ModelFiles,
    modes: tuple[tuple[Quantize, KVType], ...] = MODES,
    *,
    n_tokens: int = 8192,
    n_facts: int = 24,
    repeats: int = 7,
    advance: Callable[[], None] = lambda: None,
) -> Verdict:
    """Measure each mode. The first of ``modes`` is what the others are compared with."""
    asked = questions(files, n_tokens, n_facts)
    scores: list[Score] = []
    own: Measured | None = None
    for quantize, kv in modes:
        settings = EngineSettings(
            quantize=quantize, kv_dtype=kv, quantize_anyway=True, device="cpu", max_batch=BATCH, kv_memory=2**30
        )
        built = build(files, settings)
        got = measure(built, asked, repeats, advance)
        own = own or got
        scores.append(
            Score(
                quantize=quantize,
                kv=kv,
                loss=math.expm1(got.nll - own.nll),
                agreement=float((got.picks == own.picks).mean()),
                recall=got.recall,
                right=sum(got.right),
                lost=sum(a and not b for a, b in zip(own.right, got.right, strict=True)),
                speed=got.speed,
                alone=got.alone,
                weights=got.weights,
                kv_token=got.kv_token,
            )
        )
        del built
        gc.collect()
    return Verdict(tuple(scores))


def show(found: Verdict, model: str, level: str) -> None:
    table = Table(title=f"{model} on this CPU ({level})")
    for name in (
        "weights",
        "KV",
        "perplexity",
        "same token",
        "recall",
        "right answers",
        "tokens/s of 16",
        "ms/token",
        "MiB",
        "KV B/token",
    ):
        table.add_column(name, justify="left" if name in ("weights", "KV") else "right")
    best = found.best()
    for s in found.scores:
        style = "bold" if s is best else None if found.passes(s) else "dim"
        figures = [f"{s.loss:+.2%}", f"{s.agreement:.1%}", f"{s.recall:.0%}", f"{s.right} ({-s.lost})"]
        sizes = [f"{s.speed:.0f}", f"{s.alone * 1e3:.1f}", f"{s.weights / 2**20:,.0f}", f"{s.kv_token:,}"]
        table.add_row(s.quantize, s.kv, *figures, *sizes, style=style)
    console = Console(highlight=False)
    console.print(table)
    failed = [f"{s.quantize} with KV {s.kv}" for s in found.scores if not found.passes(s)]
    if failed:
        console.print(f"Refused unless forced: {', '.join(failed)}")
    if best:
        console.print(f"auto takes: weights {best.quantize}, KV {best.kv}")


@click.command()
@click.argument("model")
@click.option("--data-dir", type=click.Path(path_type=Path), required=True)
@click.option("--tokens", type=click.IntRange(WINDOW), default=8192, show_default=True, help="Text judged, in tokens.")
@click.option("--facts", type=click.IntRange(1), default=24, show_default=True, help="Conversations with a fact.")
@click.option("--repeats", type=click.IntRange(1), default=7, show_default=True, help="Timed steps; medians count.")
def main(model: str, data_dir: Path, tokens: int, facts: int, repeats: int) -> None:
    """Measure every mode of MODEL, store the verdict, end in one JSON line."""
    from rich.progress import Progress  # noqa: PLC0415 - only for people

    try:
        files = catalog.resolve(model, data_dir)
    except ForebayError as error:
        raise click.ClickException(error.message) from error
    level = kernels.level()
    with Progress(transient=True) as bar:
        task = bar.add_task(f"{model}", total=len(MODES) * (tokens // WINDOW + 2))
        found = report(files, n_tokens=tokens, n_facts=facts, repeats=repeats, advance=lambda: bar.advance(task))
    show(found, model, level)
    if folder := catalog.cache_dir(files):
        verdict.save(found, verdict.file_of(folder, level))
    best = found.best()
    chosen = {"quantize": best.quantize, "kv_dtype": best.kv} if best else None
    line = {"model": model, "level": level, "chosen": chosen, "scores": [asdict(score) for score in found.scores]}
    click.echo(json.dumps(line))


if __name__ == "__main__":
    main()

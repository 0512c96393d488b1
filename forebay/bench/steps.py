"""Steps of the engine in this process, against the limits of the machine in the same minutes.

    python -m forebay.bench.steps [--model MODEL] [--quantize int8 ...] [--repeats 5] [--json FILE]

Decode by batch and context, and prefill, each as a multiple of what reading the weights, K and V once and computing
the products would take: both rates are measured in every round, between the steps. Beside that, how much of a step is
the scheduler and the building of the batch. Settings of the engine are those of ``forebay serve``. The last line of
the output is JSON.
"""

from __future__ import annotations

import json
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import torch

from .. import catalog
from ..commands.options import SettingsCommand
from ..config import EngineSettings, load
from ..contract import ForebayError
from ..engine.batch import Batch
from ..engine.kv.capacity import pages_of
from ..engine.kv.pages import PAGE_SIZE
from ..engine.runner import Built, build, dummy_work
from ..engine.scheduler import Scheduler
from ..engine.sequence import GenSpec
from ..engine.step import Step
from .machine import machine
from .report import wide_console
from .roofline import Case, Limits, judge, show
from .servers import busy

#: The product that the limit of computing is measured with: a chunk of prefill through the widest linear of the demo.
GEMM = (512, 576, 3072)
_READ_BYTES = 2**29
#: Tokens whose K and V are computed to fill the pool with.
_REAL = 512


def best(run: Callable[[], object], times: int) -> float:
    """Seconds of the fastest of so many runs."""
    found = []
    for _ in range(times):
        begin = time.perf_counter()
        run()
        found.append(time.perf_counter() - begin)
    return min(found)


class Yardstick:
    """Measures the limits again and again on the same data, with as many threads as the engine has."""

    def __init__(self) -> None:
        rows, inner, columns = GEMM
        self._operations = 2 * rows * inner * columns
        self._big = torch.ones(_READ_BYTES // 4)
        x, w = torch.randn(rows, inner), torch.randn(inner, columns)
        self._products: dict[str, Callable[[], object]] = {"float32": lambda: x @ w}
        x16, w16 = x.bfloat16(), w.bfloat16()
        others = {"bfloat16": lambda: x16 @ w16, "int8": _int8_product(rows, inner, columns)}
        # A type that the processor does not multiply in is emulated, and no limit of anything.
        slow = best(self._products["float32"], 5)
        self._products |= {kind: run for kind, run in others.items() if best(run, 2) < slow}

    def measure(self) -> Limits:
        read = self._big.nbytes / best(self._big.sum, 3)
        return Limits(read, {kind: self._operations / best(run, 5) for kind, run in self._products.items()})


def _int8_product(rows: int, inner: int, columns: int) -> Callable[[], object]:
    """oneDNN's, with unsigned activations (the signed path is a reference one); else torch's own."""
    w = torch.randint(-127, 128, (columns, inner), dtype=torch.int8)
    try:
        onednn = torch.ops.onednn
        x = torch.randint(0, 256, (rows, inner), dtype=torch.uint8)
        packed = onednn.qlinear_prepack(w, [rows, inner])
        scales, zeros = torch.ones(columns), torch.zeros(columns, dtype=torch.int64)

        def run() -> object:
            return onednn.qlinear_pointwise(
                x, 1.0, 128, packed, scales, zeros, None, 1.0, 0, torch.float32, "none", [], ""
            )

        run()
    except (AttributeError, RuntimeError):
        signed = torch.randint(-127, 128, (rows, inner), dtype=torch.int8)
        return lambda: torch._int_mm(signed, w.T)
    return run


class Steps:
    """Makes the steps of those cases that fit the pool, without a scheduler. Pages are scattered, as in a pool in
    use."""

    def __init__(self, built: Built, cases: Sequence[Case]) -> None:
        self._built = built
        self._random = random.Random(0)  # noqa: S311 - where pages lie is no secret
        fitting = [case for case in cases if self._fits(case)]
        self._used = max((_pages(case) for case in fitting), default=0)
        _fill(built, self._used)
        self.steps = {case: self._step(case) for case in fitting}

    def _fits(self, case: Case) -> bool:
        return _pages(case) <= self._built.n_pages and case.context + case.rows <= self._built.max_context

    def _step(self, case: Case) -> Step:
        pages = self._random.sample(range(self._used), _pages(case))
        works = []
        for i in range(case.batch):
            work = dummy_work(case.context, case.rows, self._built.n_pages)
            each = len(work.seq.table)
            work.seq.table = pages[i * each : (i + 1) * each]
            work.seq.ids = [self._random.randrange(self._built.spec.vocab_size) for _ in work.seq.ids]
            works.append(work)
        return Step(tuple(works))


def _pages(case: Case) -> int:
    return case.batch * pages_of(case.context + case.rows)


def _fill(built: Built, n_pages: int) -> None:
    """Put K and V of real tokens into the first pages. Memory that was never written is one page of zeros to the
    system, and reading that is faster than reading memory."""
    pool = built.pool
    whole = min(_REAL, built.max_context) // PAGE_SIZE
    built.runner.execute(Step((dummy_work(0, whole * PAGE_SIZE, built.n_pages),)))
    for first in range(whole, n_pages, whole):
        pool[first : first + whole] = pool[: len(pool[first : first + whole])]


@dataclass(slots=True)
class Overhead:
    """Decodes under a real scheduler: seconds of each part, one value per step."""

    plan: list[float]
    batch: list[float]
    execute: list[float]
    commit: list[float]

    def told(self, batch: int) -> dict[str, Any]:
        """``execute`` builds its batch itself, so that is in it already."""
        parts = zip(self.plan, self.batch, self.execute, self.commit, strict=True)
        shares = [(plan + built + commit) / (plan + execute + commit) for plan, built, execute, commit in parts]
        names = ("plan", "batch", "commit", "execute")
        return {
            "batch": batch,
            "share": statistics.median(shares),
            **{f"{name}_s": statistics.median(getattr(self, name)) for name in names},
        }


class Scheduled:
    """So many sequences that decode under a real scheduler."""

    def __init__(self, built: Built, batch: int, prompt: int, steps: int) -> None:
        self._built = built
        self._scheduler = Scheduler(
            n_pages=built.n_pages, max_batch=batch, token_budget=max(512, batch), max_context=built.max_context
        )
        self.found = Overhead([], [], [], [])
        for i in range(batch):
            source = random.Random(i)  # noqa: S311 - prompts
            ids = [source.randrange(built.spec.vocab_size) for _ in range(prompt)]
            # More than are measured: the first to have its prompt computed decodes while the others wait for theirs.
            self._scheduler.submit(GenSpec(i, ids, max_tokens=steps + 2 * batch + 8))
        while self._scheduler.waiting or any(seq.owed > 1 for seq in self._scheduler.running):
            self.step()
        self.found = Overhead([], [], [], [])

    def step(self) -> None:
        begin = time.perf_counter()
        step = self._scheduler.plan(begin)
        planned = time.perf_counter()
        Batch.of(step)
        built = time.perf_counter()
        drawn = self._built.runner.execute(step)
        executed = time.perf_counter()
        self._scheduler.commit(step, drawn)
        committed = time.perf_counter()
        self.found.plan.append(planned - begin)
        self.found.batch.append(built - planned)
        self.found.execute.append(executed - built)
        self.found.commit.append(committed - executed)


def measure(built: Built, cases: Sequence[Case], repeats: int, scheduled: int) -> dict[str, Any]:
    """Rounds over limits, cases and the scheduler in turn -> limits, cases and scheduler, JSON-ready."""
    per_round = 8
    yardstick = Yardstick()
    overhead = Scheduled(built, scheduled, 300, repeats * per_round)
    ready = Steps(built, cases).steps
    for step in ready.values():
        built.runner.execute(step)  # each shape once before it counts
    limits: list[Limits] = []
    times: dict[Case, list[float]] = {case: [] for case in ready}
    for number in range(repeats):
        limits.append(yardstick.measure())
        for case, step in ready.items():
            begin = time.perf_counter()
            built.runner.execute(step)
            times[case].append(time.perf_counter() - begin)
        for _ in range(per_round):
            overhead.step()
        click.echo(f"round {number + 1} of {repeats}", err=True)
    told_cases: list[dict[str, Any]] = []
    for case in cases:
        if case in ready:
            found = judge(case, times[case], limits, built.spec, built.weight_bytes, built.kv_token_bytes)
            told_cases.append(found.told())
        else:
            why = f"needs {_pages(case):,} pages of {built.n_pages:,} and a context of {case.context + case.rows}"
            told_cases.append({"case": case.name, "skipped": why})
    kinds = limits[0].gemm
    return {
        "limits": {
            "read_bytes_per_s": statistics.median(limit.read for limit in limits),
            "gemm_ops_per_s": {kind: statistics.median(limit.gemm[kind] for limit in limits) for kind in kinds},
        },
        "cases": told_cases,
        "scheduler": overhead.found.told(scheduled),
    }


def _numbers(_context: click.Context, _option: click.Parameter, text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",") if part]
    except ValueError:
        raise click.BadParameter(f"{text!r} is not numbers with commas between") from None


@click.command(cls=SettingsCommand, only=tuple(EngineSettings.model_fields), help=__doc__)
@click.option("--model", help="Catalog name, .gguf file or Hugging Face directory.")
@click.option("--batches", default="1,4,16,64", show_default=True, callback=_numbers, help="Sequences of a decode.")
@click.option("--contexts", default="100,400,1500", show_default=True, callback=_numbers, help="Tokens of a decode.")
@click.option("--prefills", default="300,512", show_default=True, callback=_numbers, help="Tokens of a prefill.")
@click.option("--scheduled", type=click.IntRange(1), default=16, show_default=True, help="Under the scheduler.")
@click.option("--repeats", type=click.IntRange(1), default=5, show_default=True)
@click.option("--json", "file", type=click.Path(path_type=Path, dir_okay=False))
def main(
    config: Path | None,
    model: str | None,
    batches: list[int],
    contexts: list[int],
    prefills: list[int],
    scheduled: int,
    repeats: int,
    file: Path | None,
    **flags: str | None,
) -> None:
    neighbours = busy()
    flags["max_batch"] = flags.get("max_batch") or str(max(*batches, scheduled, 1))
    flags["kv_memory"] = flags.get("kv_memory") or "0.4"
    try:
        settings = load({"model": model, **flags}, file=config)
        files = catalog.resolve(settings.paths.model, settings.paths.data_dir)
        built = build(files, settings.engine)
    except ForebayError as error:
        raise click.ClickException(error.message) from None
    cases = [Case(batch, context) for context in contexts for batch in batches]
    cases += [Case(1, 0, rows) for rows in prefills]
    answer: dict[str, Any] = {"machine": machine(), "model": files.id, "engine": built.summary, "busy": neighbours}
    answer |= measure(built, cases, repeats, scheduled)
    show(answer, wide_console())
    text = json.dumps(answer)
    if file:
        file.write_text(text + "\n", encoding="utf-8")
    print(text, flush=True)


if __name__ == "__main__":
    main()

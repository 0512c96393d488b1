"""How near a step is to what the machine can do: the work of a step, the limits, and the multiple. No torch here."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from ..engine.model.spec import ModelSpec
from .machine import told
from .servers import BUSY


@dataclass(frozen=True, slots=True)
class Case:
    """``batch`` sequences that each compute ``rows`` tokens after ``context`` tokens."""

    batch: int
    context: int
    rows: int = 1

    @property
    def name(self) -> str:
        if self.rows == 1:
            return f"decode {self.batch} x {self.context}"
        return f"prefill {self.batch} x {self.rows}" + (f" after {self.context}" if self.context else "")

    def operations(self, spec: ModelSpec) -> int:
        """Multiplications and additions: all linears, attention, and the LM head for one row of each sequence."""
        qkv = spec.hidden * (spec.n_heads + 2 * spec.n_kv_heads) * spec.head_dim
        layer = qkv + spec.n_heads * spec.head_dim * spec.hidden + 3 * spec.hidden * spec.ffn
        linears = self.rows * spec.n_layers * layer + spec.hidden * spec.vocab_size
        attended = self.rows * self.context + self.rows * (self.rows + 1) // 2
        return 2 * self.batch * (linears + 2 * spec.n_layers * spec.n_heads * spec.head_dim * attended)

    def bytes(self, weight_bytes: int, kv_token_bytes: int) -> int:
        """What must cross the memory bus: the weights once, and K and V of every token once."""
        return weight_bytes + self.batch * (self.context + self.rows) * kv_token_bytes


@dataclass(frozen=True, slots=True)
class Limits:
    """Measured: bytes/s read by all threads, and operations/s of a matrix product by type of its operands."""

    read: float
    gemm: Mapping[str, float]

    def seconds(self, operations: int, n_bytes: int, kind: str) -> float:
        """The least a step can take if reading and computing overlap fully."""
        return max(n_bytes / self.read, operations / self.gemm[kind])


@dataclass(frozen=True, slots=True)
class Found:
    """One case over all rounds. ``multiples``: by type of matrix product, time over limit, each within its round."""

    case: Case
    seconds: tuple[float, ...]
    read_seconds: tuple[float, ...]
    multiples: Mapping[str, tuple[float, ...]]

    def told(self) -> dict[str, Any]:
        return {
            "case": self.case.name,
            "batch": self.case.batch,
            "context": self.case.context,
            "rows": self.case.rows,
            "seconds": statistics.median(self.seconds),
            "tokens_per_s": self.case.batch * self.case.rows / statistics.median(self.seconds),
            "times_read_limit": statistics.median(
                time / limit for time, limit in zip(self.seconds, self.read_seconds, strict=True)
            ),
            "times_limit": {kind: statistics.median(each) for kind, each in self.multiples.items()},
            "rounds_seconds": list(self.seconds),
        }


def judge(
    case: Case, seconds: Sequence[float], limits: Sequence[Limits], spec: ModelSpec, weights: int, kv_token: int
) -> Found:
    """``seconds`` and ``limits``: one of each per round."""
    operations, n_bytes = case.operations(spec), case.bytes(weights, kv_token)
    kinds = limits[0].gemm
    return Found(
        case,
        tuple(seconds),
        tuple(n_bytes / limit.read for limit in limits),
        {
            kind: tuple(
                time / limit.seconds(operations, n_bytes, kind) for time, limit in zip(seconds, limits, strict=True)
            )
            for kind in kinds
        },
    )


def table(answer: Mapping[str, Any]) -> Table:
    """``answer`` as of steps.py. A case that does not fit the pool has no figures."""
    kinds = list(answer["limits"]["gemm_ops_per_s"])
    view = Table("step", "ms", "tokens/s", "x reading", *(f"x limit, {kind}" for kind in kinds))
    for case in answer["cases"]:
        if "skipped" in case:
            view.add_row(case["case"], "-")
            continue
        multiples = (f"{case['times_limit'][kind]:.1f}" for kind in kinds)
        view.add_row(
            case["case"],
            f"{case['seconds'] * 1e3:.1f}",
            f"{case['tokens_per_s']:.0f}",
            f"{case['times_read_limit']:.1f}",
            *multiples,
        )
    return view


def show(answer: Mapping[str, Any], console: Console) -> None:
    console.print(told(answer["machine"]))
    console.print(told(answer["engine"]))
    limits, parts = answer["limits"], answer["scheduler"]
    gemm = ", ".join(f"{kind} {rate / 1e9:.0f} G/s" for kind, rate in limits["gemm_ops_per_s"].items())
    console.print(f"limits: reading {limits['read_bytes_per_s'] / 1e9:.1f} GB/s; products: {gemm}")
    console.print(table(answer))
    for case in answer["cases"]:
        if "skipped" in case:
            console.print(f"{case['case']} not measured: {case['skipped']}", style="yellow")
    times = ", ".join(f"{name} {parts[f'{name}_s'] * 1e3:.2f} ms" for name in ("plan", "batch", "commit", "execute"))
    console.print(f"scheduler and batch of {parts['batch']}: {parts['share']:.1%} of a step ({times})")
    if answer["busy"] > BUSY:
        console.print(f"{answer['busy']:.0%} of the cores were busy before the first step", style="yellow")

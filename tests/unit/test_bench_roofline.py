"""The work of a step, the limits, and the multiple of them."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from forebay.bench import roofline
from forebay.bench.roofline import Case, Limits
from forebay.engine.model.spec import LayerSpec, ModelSpec, RopeSpec

#: SmolLM2-135M, whose figures are known: 0.212 GFLOP a token, 0.057 for the LM head.
DEMO = ModelSpec(30, 576, 9, 3, 64, 1536, 49152, 1e-5, 8192, True, (LayerSpec(RopeSpec(1e5)),) * 30)


def test_operations_of_a_decode_and_a_prefill() -> None:
    head = 2 * 576 * 49152
    linears = 2 * 30 * (576 * 960 + 576 * 576 + 3 * 576 * 1536)
    attention = 4 * 30 * 9 * 64
    assert linears == pytest.approx(0.212e9, rel=0.01)
    assert Case(1, 400).operations(DEMO) == linears + head + attention * 401
    assert Case(16, 400).operations(DEMO) == 16 * Case(1, 400).operations(DEMO)
    # The LM head of one row; row i attends to i tokens.
    assert Case(1, 0, 300).operations(DEMO) == 300 * linears + head + attention * 300 * 301 // 2
    # In two chunks there is one head more, and nothing else.
    chunks = Case(1, 0, 100).operations(DEMO) + Case(1, 100, 200).operations(DEMO)
    assert chunks - Case(1, 0, 300).operations(DEMO) == head


def test_bytes_are_the_weights_once_and_each_token_once() -> None:
    assert Case(16, 399).bytes(1_000, 10) == 1_000 + 16 * 400 * 10
    assert Case(1, 0, 300).bytes(1_000, 10) == 4_000


def test_the_limit_is_the_slower_of_reading_and_computing() -> None:
    limits = Limits(read=100.0, gemm={"float32": 10.0, "int8": 40.0})
    assert limits.seconds(20, 100, "float32") == 2.0
    assert limits.seconds(20, 100, "int8") == 1.0


def test_multiples_are_of_the_limits_of_their_own_round() -> None:
    case = Case(1, 9)
    operations, n_bytes = case.operations(DEMO), case.bytes(1_000, 10)
    limits = [
        Limits(read=n_bytes / 1.0, gemm={"float32": operations / 2.0}),
        Limits(read=n_bytes / 1.0, gemm={"float32": operations / 4.0}),
        Limits(read=n_bytes / 8.0, gemm={"float32": operations / 4.0}),
    ]
    found = roofline.judge(case, [6.0, 6.0, 16.0], limits, DEMO, 1_000, 10).told()
    assert found["seconds"] == 6.0
    assert found["times_limit"] == {"float32": 2.0}  # of 3, 1.5 and 2
    assert found["times_read_limit"] == 6.0  # of 6, 6 and 2
    assert found["tokens_per_s"] == pytest.approx(1 / 6)


def test_names_of_cases() -> None:
    names = [case.name for case in (Case(16, 400), Case(1, 0, 300), Case(2, 64, 512))]
    assert names == ["decode 16 x 400", "prefill 1 x 300", "prefill 2 x 512 after 64"]


def test_a_case_that_did_not_fit_stays_in_the_table() -> None:
    limits = [Limits(1e9, {"float32": 1e11})]
    fits = roofline.judge(Case(4, 100), [0.05], limits, DEMO, 10**8, 23_040).told()
    skipped = {"case": "decode 64 x 1500", "skipped": "needs 6,016 pages of 100"}
    view = roofline.table({"limits": {"gemm_ops_per_s": {"float32": 1e11}}, "cases": [fits, skipped]})
    columns = {str(column.header): list(column.cells) for column in view.columns}
    assert columns["step"] == ["decode 4 x 100", "decode 64 x 1500"]
    assert columns["ms"] == ["50.0", "-"]
    assert columns["x limit, float32"][0] == "0.5"


def test_what_is_shown_has_the_limits_the_skipped_the_share_and_the_neighbours() -> None:
    console = Console(file=io.StringIO(), width=160)
    answer = {
        "machine": {"cores": 2},
        "engine": {"weights": "92 MiB in int4"},
        "busy": 0.4,
        "limits": {"read_bytes_per_s": 13e9, "gemm_ops_per_s": {"float32": 59e9, "int8": 128e9}},
        "cases": [{"case": "decode 64 x 1500", "skipped": "needs 6,016 pages of 100"}],
        "scheduler": {
            "batch": 16,
            "share": 0.0134,
            "plan_s": 1e-4,
            "batch_s": 2e-4,
            "commit_s": 3e-4,
            "execute_s": 0.1,
        },
    }
    roofline.show(answer, console)
    shown = console.file.getvalue()
    for part in (
        "reading 13.0 GB/s; products: float32 59 G/s, int8 128 G/s",
        "decode 64 x 1500 not measured: needs 6,016 pages of 100",
        "scheduler and batch of 16: 1.3% of a step (plan 0.10 ms, batch 0.20 ms, commit 0.30 ms, execute 100.00 ms)",
        "40% of the cores were busy",
    ):
        assert part in shown
    roofline.show({**answer, "busy": 0.05}, console)
    assert console.file.getvalue().count("were busy") == 1

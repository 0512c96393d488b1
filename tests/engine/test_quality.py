"""The gate of quantization on the real demo model, with little text: every figure is measured, and INT8 passes."""

import pytest

from forebay.bench.quality import report
from forebay.catalog import ModelFiles
from forebay.engine.attention import paged
from forebay.engine.attention.base import to_int8
from forebay.engine.kernels import library


def test_a_report_of_the_demo_model(demo_model: ModelFiles) -> None:
    modes = (("none", "model"), ("int8", "int8")) if library() else (("none", "model"), ("none", "int8"))
    found = report(demo_model, modes, n_tokens=1024, n_facts=4, repeats=1)
    own, other = found.scores
    assert (own.loss, own.agreement) == (0, 1)
    assert own.recall >= 0.5  # the conversations are ones that the model can follow
    assert own.right >= 12  # and the questions ones that it can answer
    assert own.lost == 0
    assert found.passes(other)
    assert -0.01 < other.loss != 0
    assert 0.97 < other.agreement < 1
    assert other.kv_token * 3 < own.kv_token
    if library():
        assert other.weights * 4 < own.weights
        assert other.speed > own.speed
        assert other.alone < own.alone


def test_a_report_sees_damage(demo_model: ModelFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    """The gate can fail: here K and V keep 3 bits."""
    monkeypatch.setattr(paged, "to_int8", lambda kv: (to_int8(kv)[0] // 32 * 32, to_int8(kv)[1]))
    monkeypatch.setattr("forebay.engine.kernels.level", lambda: "none")
    monkeypatch.setattr("forebay.engine.attention.native.NativeAttention.usable", lambda *_: False)
    found = report(demo_model, (("none", "model"), ("none", "int8")), n_tokens=512, n_facts=1, repeats=1)
    assert found.passes(found.scores[0])
    assert not found.passes(found.scores[1])

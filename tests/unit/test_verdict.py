"""Verdicts on quantization: what passes, what `auto` takes, and what is refused."""

import logging
from pathlib import Path

import pytest

from forebay import catalog
from forebay.config import EngineSettings
from forebay.contract import Unsupported
from forebay.engine.model import verdict
from forebay.engine.model.verdict import Score, Verdict


def score(
    quantize: str, kv: str = "model", loss: float = 0.0, speed: float = 100.0, recall: float = 0.9, lost: int = 0
) -> Score:
    return Score(quantize, kv, loss, 0.97, recall, 20 - lost, lost, speed, 0.01, 1, 1)  # type: ignore[arg-type]


GOOD = Verdict(
    (
        score("none", speed=50),
        score("none", "int8", 0.001, 60),
        score("int8", "model", 0.003, 90),
        score("int8", "int8", 0.012, 140),
        score("int4", "model", 0.004, 110),
        score("int4", "int8", 0.008, 120),
    )
)


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    folder = tmp_path / "cafe"
    folder.mkdir()
    verdict.save(GOOD, verdict.file_of(folder, "avx2"))
    return folder


def choose(cache: Path | None, level: str = "avx2", **settings: object) -> tuple[str, str]:
    return verdict.choose(EngineSettings.model_validate(settings), cache, level)


def test_what_passes() -> None:
    assert [GOOD.passes(s) for s in GOOD.scores] == [True, True, True, False, True, True]
    assert GOOD.best() == score("int4", "int8", 0.008, 120)  # the fastest that passes, not the fastest
    assert not GOOD.passes(score("int4", loss=0.0, recall=0.8))
    assert GOOD.passes(score("int4", lost=1))  # one in 16 of the 20 that the model's own dtype gets right
    assert not GOOD.passes(score("int4", lost=2))
    assert Verdict(()).best() is None


def test_a_verdict_survives_the_disk(cache: Path) -> None:
    assert verdict.find(cache, "avx2") == GOOD


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, ("int4", "int8")),
        ({"quantize": "none"}, ("none", "int8")),
        ({"quantize": "int8"}, ("int8", "model")),  # its KV in 8 bits has failed
        ({"kv_dtype": "model"}, ("int4", "model")),
        ({"dtype": "float32"}, ("none", "model")),  # who names a dtype gets it
        ({"dtype": "float32", "quantize": "int4"}, ("int4", "model")),
    ],
)
def test_auto_goes_by_the_verdict(cache: Path, settings: dict[str, object], expected: tuple[str, str]) -> None:
    assert choose(cache, **settings) == expected


def test_a_mode_that_failed_is_refused_unless_forced(cache: Path) -> None:
    with pytest.raises(Unsupported, match=r"int8 with kv-dtype int8 failed .* 1\.2% .*--quantize-anyway") as error:
        choose(cache, quantize="int8", kv_dtype="int8")
    assert error.value.param == "quantize"
    forced = choose(cache, quantize="int8", kv_dtype="int8", quantize_anyway=True)
    assert forced == ("int8", "int8")


def test_without_a_verdict_the_model_stays_as_it_is_and_says_how_to_get_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        assert choose(tmp_path / "other") == choose(None) == ("none", "model")
    assert "forebay quantize --report" in caplog.text
    # What was asked for is taken without one.
    assert choose(None, quantize="int4", kv_dtype="int8") == ("int4", "int8")


def test_a_higher_instruction_set_takes_the_verdict_of_a_lower_one_but_torch_does_not(cache: Path) -> None:
    assert choose(cache, "vnni") == ("int4", "int8")
    assert choose(cache, "portable") == ("none", "model")
    assert choose(cache, "none") == ("none", "model")


@pytest.mark.parametrize("damage", ["", "[]x", '[{"quantize": "int4"}]', "{}", "[1]"])
def test_a_damaged_verdict_is_none(cache: Path, damage: str) -> None:
    verdict.file_of(cache, "avx2").write_text(damage)
    assert choose(cache) == ("none", "model")


def test_the_demo_model_ships_with_its_verdict(demo_model: catalog.ModelFiles, tmp_path: Path) -> None:
    """Under the fingerprint that its file has: a change of either would silently turn quantization off."""
    found = verdict.find(tmp_path / catalog.fingerprint(demo_model), "avx2")
    assert found is not None
    best = found.best()
    assert best is not None
    assert best.quantize != "none"
    for quantize, kv in (("int8", "model"), ("int8", "int8"), ("int4", "model"), ("int4", "int8")):
        assert found.of(quantize, kv) is not None

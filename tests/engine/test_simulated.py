"""The engine without a model: everything around it is real, its steps take what a profile says."""

import asyncio
import time
from pathlib import Path

import httpx
import pytest
from product import body, product
from tiny import Judge

from forebay.catalog import ModelFiles
from forebay.config import EngineSettings, SettingsError
from forebay.engine.client import EngineClient
from forebay.engine.process import load
from forebay.engine.profile import Profile, names, profile_of, with_profile
from forebay.engine.sequence import Emit, End, GenSpec
from forebay.engine.simulated import VirtualClock, simulated_engine


def profile(name: str) -> Profile:
    found = profile_of(EngineSettings(engine=f"simulated:{name}"))
    assert found
    return found


def tokens(news: list[Emit]) -> list[int]:
    return [token for emit in news for token in emit.tokens]


@pytest.mark.parametrize("name", names())
def test_a_profile_says_what_it_is(name: str) -> None:
    found = profile(name)
    assert found.name == name
    assert found.arithmetic
    assert found.estimate is (name != "cpu")
    assert found.token_budget >= found.max_batch
    assert ("ESTIMATE" in found.arithmetic[0]) is found.estimate


@pytest.mark.parametrize(
    ("decodes", "prefill", "ms"),
    [(15, 0, 30), (15, 16, 47), (15, 64, 102), (15, 128, 163), (15, 512, 619), (0, 16, 19), (0, 64, 62), (0, 512, 518)],
)
def test_the_cpu_is_as_it_was_measured(decodes: int, prefill: int, ms: float) -> None:
    seconds = profile("cpu").seconds(decodes, prefill, prefill * (prefill - 1) // 2)
    assert seconds == pytest.approx(ms / 1000, rel=0.1)


def test_the_cpu_behind_a_long_context_is_as_it_was_measured() -> None:
    cpu = profile("cpu")
    assert cpu.seconds(0, 1, 5000) - cpu.base == pytest.approx(0.004, rel=0.1)


def test_eight_a100_end_410_requests_a_second() -> None:
    """300 tokens in and 100 out, as many as there is room for, each another one."""
    estimate = profile("8xa100")
    clock = VirtualClock()
    engine = simulated_engine(estimate, clock, clock.sleep)
    assert 0.025 <= estimate.seconds(estimate.max_batch) <= 0.04

    def feed(first: int, n: int) -> int:
        for id in range(first, first + n):
            engine.submit(GenSpec(id, [id % 32_000, *range(299)], 100))
        return first + n

    sent = feed(0, estimate.max_batch)
    ended, begin = 0, 0.0
    for step in range(190):
        if step == 120:  # the first have ended, and all that come and go do so evenly
            ended, begin = 0, clock.now
        frame = engine.step()
        ended += sum(emit.end is End.LENGTH for emit in frame.emits)
        sent = feed(sent, max(0, 100 - frame.waiting))
    assert ended / (clock.now - begin) == pytest.approx(410, rel=0.1)
    assert frame.running > 0.8 * estimate.max_batch
    engine.scheduler.check()


def test_steps_take_their_time_and_answers_say_the_prompt_back() -> None:
    clock = VirtualClock()
    cpu = profile("cpu")
    engine = simulated_engine(cpu, clock, clock.sleep)
    order = GenSpec(1, [5, 6, 7, 8], 7, stop_ids=[7], logprobs=2)
    news = engine.generate([order])[1]
    assert tokens(news) == [5, 6, 8, 8, 5, 6, 8]
    assert all(len(emit.logprobs) == len(emit.tokens) for emit in news)
    assert clock.now == pytest.approx(cpu.seconds(0, 4, 6) + 6 * cpu.seconds(1))
    engine.runner.slower = 3.0
    begin = clock.now
    engine.generate([GenSpec(2, [9, 9], 1, stop_ids=[9])])  # nothing else to say
    assert clock.now - begin == pytest.approx(3 * cpu.seconds(0, 2, 1))


def test_a_frame_tells_the_pace_and_what_is_owed() -> None:
    clock = VirtualClock()
    cpu = profile("cpu")
    engine = simulated_engine(cpu, clock, clock.sleep)
    base, decode, prefill, chunk = engine.frame([]).pace
    assert base + 15 * decode + chunk * prefill == pytest.approx(0.075, rel=0.1)
    engine.submit(GenSpec(1, [1] * 600, 50))
    engine.submit(GenSpec(2, [2] * 600, 50))
    assert engine.frame([]).owed == 1200
    assert engine.step().owed == 1200 - 512
    while engine.scheduler.decoding < 2:
        frame = engine.step()
    assert frame.owed == 0
    engine.runner.slower = 3.0
    for _ in range(20):
        frame = engine.step()
    assert frame.pace[1] == pytest.approx(3 * decode, rel=0.1)


def test_sizes_are_the_profiles_where_nobody_says_others() -> None:
    chosen = with_profile(EngineSettings(engine="simulated:8xa100"))
    assert (chosen.max_batch, chosen.token_budget) == (3072, 16384)
    assert with_profile(chosen) == chosen
    chosen = with_profile(EngineSettings(engine="simulated:8xa100", max_batch=16))
    assert (chosen.max_batch, chosen.token_budget) == (16, 16384)
    assert with_profile(EngineSettings()) == EngineSettings()
    with pytest.raises(SettingsError, match="token_budget") as caught:
        with_profile(EngineSettings(engine="simulated:8xa100", token_budget=512))
    assert caught.value.param == "token_budget"


def test_an_unknown_profile_is_an_error_that_lists_the_known() -> None:
    with pytest.raises(SettingsError, match=r"'abacus'.*8xa100, cpu") as caught:
        with_profile(EngineSettings(engine="simulated:abacus"))
    assert caught.value.param == "engine"


def test_an_estimate_is_called_one(plain: tuple[ModelFiles, Judge]) -> None:
    said = {name: load(plain[0], EngineSettings(engine=f"simulated:{name}"))[1].summary["engine"] for name in names()}
    assert said["cpu"].startswith("simulated: cpu profile")
    assert "estimate" not in said["cpu"]
    assert "8xa100 profile, an estimate" in said["8xa100"]


@pytest.mark.anyio
@pytest.mark.parametrize(("batching", "slots"), [("continuous", 16), ("window", 8), ("serial", 1)])
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_the_front_hears_of_slots_pace_and_what_is_owed(
    plain: tuple[ModelFiles, Judge], batching: str, slots: int
) -> None:
    files = plain[0]
    settings = with_profile(EngineSettings.model_validate({"engine": "simulated:cpu", "batching": batching}))
    client = EngineClient((files.id, files.kind, files.path, None), settings)
    begin = time.monotonic()
    await client.start()
    try:
        await client.wait_ready()
        assert time.monotonic() - begin < 10
        while not client.load().ready:  # the first frame comes right behind
            await asyncio.sleep(0.01)
        assert client.load().slots == slots
        streams = [client.submit(lambda id: GenSpec(id, [7] * 100, 3)) for _ in range(4)]
        assert client.load().owed == 400  # all in transit
        for stream in streams:
            while (await asyncio.wait_for(stream.get(), 30)).end is None:
                pass
        end = time.monotonic() + 10
        while (load := client.load()).running or load.owed:
            assert time.monotonic() < end
            await asyncio.sleep(0.01)
        assert load.pace
        assert load.pace.base + 15 * load.pace.decode == pytest.approx(0.03, rel=0.5)
        assert 1 <= load.pace.chunk <= 512
        assert (load.slots, load.waiting) == (slots, 0)
    finally:
        await client.stop()


def test_the_product_without_its_model(demo_model: ModelFiles, tmp_path: Path) -> None:
    options = ("--engine", "simulated:cpu", "--max-batch", "4")
    with product(demo_model.id, tmp_path, *options) as running:
        assert "simulated: cpu profile" in running.log.read_text()
        answer = httpx.post(
            f"{running.url}/v1/chat/completions", json=body("one two three four", max_tokens=40), timeout=30
        )
        assert answer.status_code == 200, answer.text
        assert "one two three four" in answer.json()["choices"][0]["message"]["content"]
        assert answer.json()["usage"]["completion_tokens"] == 40
        assert answer.json()["choices"][0]["finish_reason"] == "length"
        assert not [m for m in running.engine().memory_maps() if "torch" in m.path]


def test_the_product_knows_its_profiles(demo_model: ModelFiles, tmp_path: Path) -> None:
    with (
        pytest.raises(AssertionError, match="there is no profile 'abacus'") as caught,
        product(demo_model.id, tmp_path, "--engine", "simulated:abacus"),
    ):
        pass
    assert "cannot start" not in str(caught.value)  # it is not the engine that finds it out

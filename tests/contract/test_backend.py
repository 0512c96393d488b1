"""What every Backend owes the server, shown on LocalBackend over a tiny model in a Hugging Face directory.

(A backend for an upstream server will be a second parameter of the same suite.)
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest
import tiny_models
from tiny import Judge

from forebay.backends.local import LocalBackend
from forebay.backends.secret import server_secret
from forebay.catalog import ModelFiles, read_meta
from forebay.config import EngineSettings, PathSettings, Settings
from forebay.contract import (
    ContextTooLong,
    DeadlineExceeded,
    Delta,
    EngineUnavailable,
    GenRequest,
    InvalidRequest,
    Message,
    Prepared,
    Resume,
    Unsupported,
)
from forebay.text.detokenize import Detokenizer
from forebay.text.template import ChatTemplate
from forebay.text.tokenizer import Tokenizer

pytestmark = pytest.mark.anyio
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "<|im_start|>assistant{{ '\\n' }}"  # jinja takes a newline off a template's end
)


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[ModelFiles, Judge]:
    folder = tmp_path_factory.mktemp("tiny-chat")
    judge = tiny_models.save_chat(folder, TEMPLATE, max_context=512)
    return ModelFiles("tiny-chat", "hf", folder), Judge(judge)


def local(files: ModelFiles) -> LocalBackend:
    engine = EngineSettings(dtype="float32", device="cpu", kv_memory=2**22, threads=1, max_batch=2)
    return LocalBackend(files, Settings(engine=engine))


@pytest.fixture(scope="module")
async def backend(model: tuple[ModelFiles, Judge]) -> AsyncIterator[LocalBackend]:
    async with local(model[0]) as running:
        await running.wait_ready()
        yield running


def ask(text: str = "the quick brown fox", **more: Any) -> GenRequest:
    return GenRequest(**{"messages": (Message("user", text),), "max_tokens": 24, "temperature": 0.0, **more})


async def run(backend: LocalBackend, request: GenRequest, **more: Any) -> list[Delta]:
    prepared = await backend.prepare(request)
    async with backend.open(prepared, **more) as deltas:
        return [delta async for delta in deltas]


async def idle(backend: LocalBackend) -> None:
    end = time.monotonic() + 10
    while (load := backend.load()).running or load.waiting or load.pages["running"]:
        assert time.monotonic() < end, load
        await asyncio.sleep(0.02)


def judged(model: tuple[ModelFiles, Judge], text: str, n: int) -> tuple[int, list[int], Tokenizer]:
    """(prompt tokens, the greedy answer of transformers, the tokenizer)."""
    files, judge = model
    meta = read_meta(files)
    tokenizer = Tokenizer.load(files, meta)
    ids = ChatTemplate.of(meta).encode(tokenizer, [Message("user", text)])
    return len(ids), judge.greedy(ids, n), tokenizer


async def test_text_is_what_transformers_generates(backend: LocalBackend, model: tuple[ModelFiles, Judge]) -> None:
    n_prompt, tokens, tokenizer = judged(model, "the lazy dog", 24)
    deltas = await run(backend, ask("the lazy dog", ignore_eos=True))
    text = Detokenizer(tokenizer)
    assert "".join(d.text for d in deltas) == text.push(tokens) + text.finish()
    assert sum(d.n_tokens for d in deltas) == 24
    assert [d.finish for d in deltas] == [None] * (len(deltas) - 1) + ["length"]
    assert (deltas[-1].usage.prompt_tokens, deltas[-1].usage.completion_tokens) == (n_prompt, 24)
    assert 0 < deltas[0].started <= time.monotonic()
    again = await run(backend, ask("the lazy dog", ignore_eos=True))
    assert again[-1].usage.cached_tokens == (n_prompt - 1) // 16 * 16


async def test_the_token_that_stops_is_counted_but_is_no_text(
    backend: LocalBackend, model: tuple[ModelFiles, Judge]
) -> None:
    _, tokens, tokenizer = judged(model, "over", 24)
    stop = next(t for i, t in enumerate(tokens) if i > 3 and tokenizer.token_bytes(t).isascii())
    n = tokens.index(stop) + 1
    deltas = await run(backend, ask("over", ignore_eos=True, stop_token_ids=(stop,)))
    text = Detokenizer(tokenizer)
    assert "".join(d.text for d in deltas) == text.push(tokens[: n - 1]) + text.finish()
    assert deltas[-1].finish == "stop"
    assert deltas[-1].usage.completion_tokens == n


async def test_a_stop_string_ends_the_work_too(backend: LocalBackend) -> None:
    whole = "".join(d.text for d in await run(backend, ask(max_tokens=60, ignore_eos=True)))
    stop = next(c for c in whole[5:] if c.isascii())
    deltas = await run(backend, ask(max_tokens=400, ignore_eos=True, stop=(stop,)))
    assert "".join(d.text for d in deltas) == whole[: whole.index(stop)]
    assert deltas[-1].finish == "stop"
    await idle(backend)


async def test_a_stop_string_found_at_the_very_end_is_the_reason(
    backend: LocalBackend, model: tuple[ModelFiles, Judge]
) -> None:
    _, tokens, tokenizer = judged(model, "jumps", 60)

    def text(n: int) -> str:
        return Detokenizer(tokenizer).push(tokens[:n])

    n = next(n for n in range(5, 60) if text(n)[-1].isascii() and text(n)[-1] not in text(n)[:-1])
    # The end is held back for the longer one, which never comes; then the shorter one is found in it.
    stop = (text(n)[-2:] + "never", text(n)[-1])
    deltas = await run(backend, ask("jumps", max_tokens=n, ignore_eos=True, stop=stop))
    assert "".join(d.text for d in deltas) == text(n)[:-1]
    assert deltas[-1].finish == "stop"


async def test_leaving_is_the_cancel(backend: LocalBackend) -> None:
    for read in (0, 1, 5):
        prepared = await backend.prepare(ask(max_tokens=400, ignore_eos=True))
        async with backend.open(prepared) as deltas, aclosing(deltas):  # type: ignore[type-var]
            for _ in range(read):
                await anext(deltas)
        await idle(backend)


async def test_what_does_not_fit_names_its_field(backend: LocalBackend) -> None:
    limit = backend.card.max_context
    for request, error, field in (
        (ask("fox " * limit), ContextTooLong, "messages"),
        (ask("fox " * (40 * limit)), ContextTooLong, "messages"),
        (ask(max_tokens=limit), ContextTooLong, "max_tokens"),
        (ask(min_tokens=30), InvalidRequest, "min_tokens"),
    ):
        with pytest.raises(error) as caught:
            await backend.prepare(request)
        assert caught.value.param == field
    fitting = await backend.prepare(ask(max_tokens=None))
    assert 0 < fitting.n_tokens < limit


async def test_keys_tell_requests_apart(backend: LocalBackend) -> None:
    async def key(**more: Any) -> bytes:
        return (await backend.prepare(ask(**more))).key

    assert await key() == await key()
    others = [
        await key(**{name: value})
        for name, value in (
            ("max_tokens", 4),
            ("stop", ("x",)),
            ("salt", "t"),
            ("top_k", 3),
            ("min_p", 0.5),
            ("repetition_penalty", 1.5),
            ("frequency_penalty", 0.5),
            ("presence_penalty", 0.5),
            ("logit_bias", {5: 1.0}),
            ("logit_bias", {5: -1.0}),
            ("bad_words", ("x",)),
            ("bad_words", ("y",)),
            ("logprobs", 0),
        )
    ]
    assert len({await key(), *others}) == 1 + len(others)
    biases = {5: 1.0, 3: -2.0}
    assert await key(logit_bias=biases) == await key(logit_bias={3: -2.0, 9: 0.0, 5: 1.0})
    assert await key(bad_words=("x", "y")) == await key(bad_words=("y", " x"))
    assert await key(seed=1) == await key(seed=2)  # greedy: the seed decides nothing
    hot = {"temperature": 1.0}
    assert await key(**hot) != await key(**hot)  # no seed: another draw each time
    assert await key(**hot, seed=1) == await key(**hot, seed=1) != await key(**hot, seed=2)


async def test_a_deadline_in_the_engines_queue(backend: LocalBackend) -> None:
    long = [await backend.prepare(ask(text, max_tokens=400, ignore_eos=True)) for text in ("a", "b")]
    async with backend.open(long[0]) as one, backend.open(long[1]) as two:
        await anext(one)
        await anext(two)
        with pytest.raises(DeadlineExceeded):
            await run(backend, ask(), deadline=time.monotonic() + 0.02)
    await idle(backend)


async def test_before_it_is_ready(model: tuple[ModelFiles, Judge]) -> None:
    async with local(model[0]) as starting:
        assert not starting.load().ready
        assert starting.load().credits <= 0
        prepared = await starting.prepare(ask())
        with pytest.raises(EngineUnavailable):
            async with starting.open(prepared):
                pass
        assert starting.card.id == "tiny-chat"


async def test_watchers_hear_of_every_change(backend: LocalBackend) -> None:
    heard: list[int] = []
    backend.watch(lambda: heard.append(backend.load().running))
    await run(backend, ask(max_tokens=5, ignore_eos=True))
    assert 1 in heard


async def test_a_model_without_a_template_serves_text_and_refuses_chats(
    model: tuple[ModelFiles, Judge], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for file in model[0].path.iterdir():
        if file.name != "chat_template.jinja":
            (tmp_path / file.name).write_bytes(file.read_bytes())
    async with local(ModelFiles("bare", "hf", tmp_path)) as backend:
        await backend.wait_ready()
        assert "no chat template" in caplog.text
        for refused in (backend.prepare(ask()), backend.tokenize((Message("user", "hi"),))):
            with pytest.raises(InvalidRequest, match="/v1/completions") as caught:
                await refused
            assert caught.value.param == "messages"
        deltas = await run(backend, GenRequest(prompt="the fox", max_tokens=5, temperature=0.0, ignore_eos=True))
        assert deltas[-1].usage.completion_tokens == 5


# ---- prompts that are no chat, choices, log probabilities


async def test_prompts_of_text_and_of_ids(backend: LocalBackend, model: tuple[ModelFiles, Judge]) -> None:
    files, judge = model
    tokenizer = Tokenizer.load(files, read_meta(files))
    text = "the quick<|im_end|> brown"

    async def tokens(**more: Any) -> list[Delta]:
        return await run(backend, GenRequest(max_tokens=12, temperature=0.0, ignore_eos=True, **more))

    for request, ids in (
        ({"prompt": text}, tokenizer.encode(text, specials=False)),
        ({"prompt": text, "parse_special": True}, tokenizer.encode(text, specials=True)),
        ({"prompt": (5, 6, 7, 1)}, [5, 6, 7, 1]),
    ):
        deltas = await tokens(**request)
        wanted = Detokenizer(tokenizer)
        assert "".join(d.text for d in deltas) == wanted.push(judge.greedy(ids, 12)) + wanted.finish()
        assert deltas[-1].usage.prompt_tokens == len(ids)
    for prompt in ("", ()):
        with pytest.raises(InvalidRequest) as caught:
            await backend.prepare(GenRequest(prompt=prompt))
        assert caught.value.param == "prompt"
    with pytest.raises(ContextTooLong) as caught:
        await backend.prepare(GenRequest(prompt=(5,) * 600))
    assert caught.value.param == "prompt"


async def test_choices_are_what_their_seeds_give(backend: LocalBackend) -> None:
    hot = {"temperature": 1.5, "ignore_eos": True, "max_tokens": 12}
    prepared = await backend.prepare(ask(**hot, seed=40))

    async def text(choice: int) -> str:
        async with backend.open(prepared, choice=choice) as deltas:
            return "".join([delta.text async for delta in deltas])

    choices = await asyncio.gather(*map(text, range(4)))
    alone = [await run(backend, ask(**hot, seed=40 + i)) for i in range(4)]
    assert choices == ["".join(d.text for d in deltas) for deltas in alone]
    assert len(set(choices)) == 4


async def test_log_probabilities_come_with_the_text_of_their_token(
    backend: LocalBackend, model: tuple[ModelFiles, Judge]
) -> None:
    files, _ = model
    tokenizer = Tokenizer.load(files, read_meta(files))
    deltas = await run(backend, ask(max_tokens=60, ignore_eos=True, logprobs=3))
    entries = [entry for delta in deltas for entry in delta.logprobs]
    text = "".join(d.text for d in deltas)
    assert len(entries) == 60
    spoken = [entry for entry in entries if entry.data not in map(str.encode, tokenizer.special_ids)]
    assert b"".join(entry.data for entry in spoken).decode(errors="replace").startswith(text)
    assert all(len(entry.top) == 3 and entry.top[0] == (entry.data, entry.logprob) for entry in entries)  # greedy
    said = 0
    for delta in deltas:
        said += len(delta.text)
        assert all(entry.offset <= said for entry in delta.logprobs)
    assert [entry.offset for entry in entries] == sorted(entry.offset for entry in entries)


async def test_no_log_probability_tells_of_a_stop_string(backend: LocalBackend) -> None:
    whole = await run(backend, ask(max_tokens=60, ignore_eos=True, logprobs=0))
    entries = [entry for delta in whole for entry in delta.logprobs]
    text = "".join(d.text for d in whole)
    # Two characters long, so that its first one is held back until the second has come.
    at = next(i for i in range(5, len(text) - 1) if text[i : i + 2].isascii() and text.index(text[i : i + 2]) == i)
    deltas = await run(backend, ask(max_tokens=400, ignore_eos=True, logprobs=0, stop=(text[at : at + 2],)))
    assert "".join(d.text for d in deltas) == text[:at]
    assert [e for d in deltas for e in d.logprobs] == [entry for entry in entries if entry.offset < at]


# ---- thinking

THINKING = """{%- for m in messages -%}
<|im_start|>{{ m.role }}
{{ '<think>' + m.reasoning_content + '</think>' if m.reasoning_content }}{{ m.content }}<|im_end|>
{% endfor -%}<|im_start|>assistant
{{ '<think></think>' if enable_thinking is defined and not enable_thinking else '<think>' }}"""


async def test_thinking_is_told_from_content_and_can_be_switched_off(
    model: tuple[ModelFiles, Judge], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for file in model[0].path.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "chat_template.jinja").write_text(THINKING)
    async with local(ModelFiles("thinking", "hf", tmp_path)) as backend:
        await backend.wait_ready()
        fields = {"ignore_eos": True, "logprobs": 0}
        thought = await run(backend, ask(**fields))
        assert "".join(d.text for d in thought) == ""
        assert "".join(d.reasoning for d in thought)
        plain = await run(backend, ask(**fields, variables={"enable_thinking": False}))
        assert "".join(d.text for d in plain)
        assert "".join(d.reasoning for d in plain) == ""
        # Both are the model's words, and both have their log probabilities.
        assert sum(len(d.logprobs) for d in thought) == sum(len(d.logprobs) for d in plain) == 24
        with pytest.raises(InvalidRequest) as caught:
            await backend.prepare(ask(variables={"thinking": True}))
        assert caught.value.param == "chat_template_kwargs.thinking"
        with_thought = (Message("user", "a"), Message("assistant", "b", reasoning="fox"), Message("user", "c"))
        without = tuple(Message(m.role, m.content) for m in with_thought)
        longer, shorter = [(await backend.prepare(ask(messages=m))).n_tokens for m in (with_thought, without)]
        assert longer > shorter
        # A text completion is no chat: nothing is taken out of it.
        completion = await run(backend, GenRequest(prompt="<think>", max_tokens=8, temperature=0.0, ignore_eos=True))
        assert "".join(d.text for d in completion)
    assert "rewrites" not in caplog.text  # answers that think are shown as they were


# ---- conversations


async def test_a_template_that_only_appends_gets_no_warning(
    model: tuple[ModelFiles, Judge], caplog: pytest.LogCaptureFixture
) -> None:
    async with local(model[0]):
        assert "rewrites" not in caplog.text


async def test_one_that_leaves_the_thinking_of_earlier_answers_out_does(
    model: tuple[ModelFiles, Judge], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for file in model[0].path.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "chat_template.jinja").write_text(THINKING.replace("if m.reasoning_content", "if false"))
    async with local(ModelFiles("forgetful", "hf", tmp_path)):
        assert "rewrites earlier turns" in caplog.text


@pytest.mark.parametrize("ending", ["length", "stop token", "stop string", "left"])
async def test_the_next_turn_finds_all_that_was_read_and_written(backend: LocalBackend, ending: str) -> None:
    question = Message("user", f"the fox: {ending}")
    fields: dict[str, Any] = {"messages": (question,), "max_tokens": 100, "ignore_eos": True}
    whole = [delta async for delta in said(backend, await backend.prepare(ask(**fields)))]
    ids, text = [id for delta in whole for id in delta.ids], "".join(delta.text for delta in whole)
    if ending == "stop token":
        fields["stop_token_ids"] = (next(id for i, id in enumerate(ids) if i > 40 and id not in ids[:i]),)
    if ending == "stop string":
        fields["stop"] = (next(text[i : i + 3] for i in range(60, len(text)) if text.index(text[i : i + 3]) == i),)
    first = await backend.prepare(ask(**fields), Resume())
    ids, text = [], ""
    async with aclosing(said(backend, first)) as deltas:
        async for delta in deltas:
            ids += delta.ids
            text += delta.text
            if ending == "left" and len(ids) > 40:
                break
    assert 40 <= len(ids) <= 100
    assert ending == "length" or len(ids) < 100
    await idle(backend)
    fields |= {"messages": (question, Message("assistant", text), Message("user", "and?")), "max_tokens": 1}
    second = await backend.prepare(ask(**fields), Resume(2, ((first.resume, tuple(ids)),)))
    (last,) = [delta async for delta in said(backend, second)]
    # The last token's state is never computed; where a stop string began inside of a token, that one is another.
    known = first.n_tokens + len(ids) - (2 if ending == "stop string" else 1)
    assert last.usage.cached_tokens >= known // 16 * 16
    without = await backend.prepare(ask(**fields))
    assert without.key != second.key  # text alone would have been other tokens: those of random weights make none
    assert without.resume == b""


async def said(backend: LocalBackend, prepared: Prepared) -> AsyncIterator[Delta]:
    async with backend.open(prepared) as deltas:
        async for delta in deltas:
            yield delta


# ---- what the engine will find in its cache


async def guessed(backend: LocalBackend, prepared: Prepared) -> tuple[int, int, list[Delta]]:
    """(guess, truth, the answer)."""
    deltas = [delta async for delta in said(backend, prepared)]
    assert {delta.usage.cached_tokens for delta in deltas} == {deltas[-1].usage.cached_tokens}
    return prepared.cached, deltas[-1].usage.cached_tokens, deltas


async def test_what_is_cached_is_guessed_right(backend: LocalBackend) -> None:
    question = Message("user", "a cat that has nothing in its cache yet " * 3)
    fields: dict[str, Any] = {"salt": "guess", "messages": (question,), "max_tokens": 40, "ignore_eos": True}
    first = await backend.prepare(ask(**fields), Resume())
    assert first.max_tokens == 40
    guess, truth, deltas = await guessed(backend, first)
    assert (guess, truth) == (0, 0)
    again = await backend.prepare(ask(**fields), Resume())
    assert (await guessed(backend, again))[:2] == (((first.n_tokens - 1) // 16 * 16,) * 2)
    ids, text = [id for delta in deltas for id in delta.ids], "".join(delta.text for delta in deltas)
    more = (question, Message("assistant", text), Message("user", "and?"))
    next_turn = await backend.prepare(
        ask(**fields | {"messages": more, "max_tokens": None}), Resume(2, ((first.resume, tuple(ids)),))
    )
    assert next_turn.max_tokens == backend.card.max_context - next_turn.n_tokens
    assert (await guessed(backend, next_turn))[:2] == (((first.n_tokens + 39) // 16 * 16,) * 2)
    other = await backend.prepare(ask(**fields | {"salt": "another"}))
    assert (await guessed(backend, other))[:2] == (0, 0)


async def test_what_is_just_being_computed_is_guessed_right(backend: LocalBackend) -> None:
    request = ask("two who ask the same at once " * 4, salt="at once")
    first = await backend.prepare(request)
    async with backend.open(first) as deltas:
        second = await backend.prepare(request)
        guess, truth, _ = await guessed(backend, second)
        assert guess == truth == (first.n_tokens - 1) // 16 * 16
        assert [delta async for delta in deltas][-1].usage.cached_tokens == first.cached == 0


async def test_what_was_evicted_or_lost_is_guessed_wrong_once_at_most(model: tuple[ModelFiles, Judge]) -> None:
    engine = EngineSettings(dtype="float32", device="cpu", kv_memory=2**20, threads=1, max_batch=2, max_context=512)
    async with LocalBackend(model[0], Settings(engine=engine)) as backend:
        await backend.wait_ready()
        await run(backend, ask("wait for the first news"))
        pages = sum(backend.load().pages.values())

        async def guess(n: int, last: int = 1) -> tuple[int, int]:
            prompt = (*[10 + n] * 400, last)
            request = GenRequest(prompt=prompt, max_tokens=1, temperature=0.0, ignore_eos=True)
            return (await guessed(backend, await backend.prepare(request)))[:2]

        assert [await guess(0), await guess(0), await guess(0, 2)] == [(0, 0), (400, 400), (400, 400)]
        for n in range(1, pages // 25 + 2):  # more than the pool has room for, and less than twice that
            assert await guess(n) == (0, 0)
        assert [await guess(0), await guess(0), await guess(0, 2)] == [(400, 0), (400, 400), (400, 400)]
        assert backend._client.pid is not None
        os.kill(backend._client.pid, signal.SIGKILL)
        end = time.monotonic() + 60
        while not (backend.load().restarts and backend.load().ready):
            assert time.monotonic() < end
            await asyncio.sleep(0.05)
        assert [await guess(0), await guess(0)] == [(0, 0), (400, 400)]


async def test_a_system_message_that_is_declared_public_is_shared_and_nothing_behind_it(
    model: tuple[ModelFiles, Judge], tmp_path: Path
) -> None:
    text = "you are a clerk of the quick brown fox and answer in one short sentence " * 3
    (tmp_path / "system.txt").write_text(text + "\n")
    engine = EngineSettings(dtype="float32", device="cpu", kv_memory=2**22, threads=1, max_batch=2)
    paths = PathSettings(data_dir=tmp_path, public_system=tmp_path / "system.txt")
    async with LocalBackend(model[0], Settings(engine=engine, paths=paths)) as backend:
        await backend.wait_ready()

        async def cached(salt: str, system: str) -> int:
            said = (Message("system", system), Message("user", "the lazy dog " * 10))
            guess, truth, _ = await guessed(backend, await backend.prepare(ask(messages=said, salt=salt)))
            assert guess == truth
            return truth

        said = Message("system", text.strip())
        one, other = [(await backend.tokenize((said, Message("user", word)))).ids for word in ("cat", "dog")]
        public = next(i for i, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1])
        own = "another clerk " * 20
        assert [await cached(salt, text.strip()) for salt in ("a", "b")] == [0, public // 16 * 16]
        assert [await cached(salt, own) for salt in ("a", "b")] == [0, 0]
        assert await cached("b", text.strip()) > public


@pytest.mark.parametrize("content", [None, b"\xff"])
async def test_a_public_system_message_that_cannot_be_read_ends_the_start(
    model: tuple[ModelFiles, Judge], tmp_path: Path, content: bytes | None
) -> None:
    if content is not None:
        (tmp_path / "system.txt").write_bytes(content)
    paths = PathSettings(data_dir=tmp_path, public_system=tmp_path / "system.txt")
    with pytest.raises(Unsupported, match="public-system"):
        async with LocalBackend(model[0], Settings(paths=paths)):
            pass


def test_a_servers_secret_is_its_own_and_stays(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    secret = server_secret(tmp_path / "a")
    assert len(secret) == 32
    assert server_secret(tmp_path / "a") == secret != server_secret(tmp_path / "b")
    assert (tmp_path / "a" / "secret").stat().st_mode & 0o777 == 0o600
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["secret"]
    (tmp_path / "a" / "secret").write_bytes(b"short")
    assert server_secret(tmp_path / "a") != server_secret(tmp_path / "a")
    assert "damaged" in caplog.text
    (tmp_path / "file").write_text("")
    assert len(server_secret(tmp_path / "file")) == 32

"""The Backend that runs our own engine: text room on one side, engine client on the other."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import secrets
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from itertools import takewhile, zip_longest
from typing import Self, TypeVar

import msgspec

from ..catalog import ModelFiles, fingerprint, open_gguf, read_meta
from ..config import Settings
from ..contract import (
    ContextTooLong,
    Delta,
    GenRequest,
    InvalidRequest,
    Load,
    Message,
    ModelCard,
    Prepared,
    Resume,
    Tokens,
    Unsupported,
)
from ..engine.client import EngineClient
from ..engine.kv.pages import PAGE_SIZE
from ..engine.kv.tiers import Realm
from ..engine.sequence import GenSpec
from ..engine.wire import Hello
from ..text.detokenize import Detokenizer
from ..text.reasoning import Reasoning
from ..text.template import ChatTemplate
from ..text.tokenizer import Tokenizer
from ..text.turns import Turns
from .answer import deltas
from .prefixes import Prefixes, Trace, worth_remembering
from .secret import server_secret

log = logging.getLogger(__name__)

_T = TypeVar("_T")

#: Text longer than this (characters) is tokenized in a thread: below it the hop costs more than the work.
THREAD_FROM = 4096
#: Characters per token that no tokenizer exceeds on real text: longer text is refused before it is tokenized.
CHARS_PER_TOKEN = 32


@dataclass(frozen=True, slots=True)
class _Order:
    """What Prepared carries: the order without its id, and what the engine never sees: stop strings, and whether the
    answer is a chat's, in which thinking is told from content."""

    spec: GenSpec
    stop: tuple[str, ...]
    chat: bool


class LocalBackend:
    def __init__(self, files: ModelFiles, settings: Settings) -> None:
        self._files = files
        self._settings = settings
        self._client = EngineClient((files.id, files.kind, files.path, files.cache), settings.engine)
        self._prefixes = Prefixes(0)
        self._prefixes_of: Hello | None = None  # the engine that they are of

    async def __aenter__(self) -> Self:
        await self._client.start()
        try:
            await asyncio.to_thread(self._load_text)
        except BaseException:
            await self._client.stop()
            raise
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._client.stop()

    async def wait_ready(self) -> None:
        """Until the engine is warm. Raises Unsupported or EngineFailure if it cannot start."""
        await self._client.wait_ready()

    def _load_text(self) -> None:
        self._meta = read_meta(self._files)
        self._tokenizer = Tokenizer.load(self._files, self._meta)
        self._template = self._chat_template()
        self._reasoning = Reasoning.of(self._template, self._tokenizer) if self._template else None
        open_gguf.cache_clear()  # a parsed file is 140 MiB of small objects, and the front needs it no more
        self._fingerprint = fingerprint(self._files)
        self._secret = server_secret(self._settings.paths.data_dir)
        self._public = self._public_prefix()
        self._created = int(time.time())
        self._turns = self._conversations(self._template) if self._template else None

    def _chat_template(self) -> ChatTemplate | None:
        """Tried out. None for a base model: it brings none, and takes text completions only."""
        if self._meta.chat_template is None:
            log.warning("the model has no chat template: it serves /v1/completions, and chats are refused")
            return None
        template = ChatTemplate.of(self._meta)
        template.try_out(self._tokenizer)
        return template

    def _conversations(self, template: ChatTemplate) -> Turns:
        turns = Turns(template, self._tokenizer, self._fingerprint, self._meta.vocab_size)
        if not turns.appends(self._reasoning):
            log.warning(
                "the model's chat template rewrites earlier turns: of a conversation the prefix cache "
                "can keep only what stands before the last answer"
            )
        return turns

    @property
    def card(self) -> ModelCard:
        hello = self._client.hello
        return ModelCard(
            id=self._files.id,
            created=self._created,
            max_context=hello.max_context if hello else self._meta.context_length,
            vocab_size=self._meta.vocab_size,
            sampling=self._meta.sampling,
            summary=hello.summary if hello else {},
        )

    def load(self) -> Load:
        return self._client.load()

    def watch(self, callback: Callable[[], None]) -> None:
        self._client.watch(callback)

    async def prepare(self, request: GenRequest, resume: Resume | None = None) -> Prepared:
        limit = self.card.max_context
        prompt = request.prompt
        field = "messages" if prompt is None else "prompt"
        source = prompt if isinstance(prompt, str) else request.messages
        whole = self._checked_size(field, source) + sum(map(len, request.bad_words))

        def work() -> tuple[list[int], bytes, list[list[int]]]:
            read = b""
            if isinstance(prompt, tuple):
                ids = list(prompt)
            elif prompt is None and resume is not None and self._turns:
                ids, read = self._turns.encode(request.messages, resume, request.variables)
            else:
                ids = self._encode(source, parse_special=request.parse_special, variables=request.variables)
            return ids, read, self._bad_words(request.bad_words)

        ids, read, bad_words = await _aside(whole, work)
        if not ids:
            raise InvalidRequest(f"{field}: no tokens, so there is nothing to go on from", param=field)
        room = limit - len(ids)
        if room < 1:
            raise ContextTooLong(f"{field}: {len(ids)} tokens; the context holds {limit}, answer included", param=field)
        max_tokens = room if request.max_tokens is None else request.max_tokens
        if max_tokens > room:
            raise ContextTooLong(
                f"{field} has {len(ids)} tokens and max_tokens is {max_tokens}; the context holds {limit}",
                param="max_tokens",
            )
        if request.min_tokens > max_tokens:
            raise InvalidRequest(
                f"min_tokens {request.min_tokens} is more than the {max_tokens} tokens there is room for",
                param="min_tokens",
            )
        spec = GenSpec(
            id=0,
            ids=ids,
            max_tokens=max_tokens,
            min_tokens=request.min_tokens,
            temperature=request.temperature,
            top_k=request.top_k,
            top_p=request.top_p,
            seed=_seed(request),
            stop_ids=sorted({*request.stop_token_ids, *(() if request.ignore_eos else self._meta.eos_ids)}),
            salt=self._salt(request.salt),
            ttl=request.ttl,
            public=self._public_pages(ids),
            min_p=request.min_p,
            repetition_penalty=request.repetition_penalty,
            frequency_penalty=request.frequency_penalty,
            presence_penalty=request.presence_penalty,
            logit_bias={id: bias for id, bias in sorted(request.logit_bias.items()) if bias},
            bad_words=bad_words,
            logprobs=request.logprobs,
        )
        chat = prompt is None
        decides = msgspec.structs.replace(spec, ttl=0.0, public=0)
        key = hashlib.sha256(msgspec.msgpack.encode((self._fingerprint, decides, request.stop, chat))).digest()
        cached = self._recent().known(Realm(spec.salt, spec.public), ids)
        return Prepared(len(ids), key, _Order(spec, request.stop, chat), read, max_tokens, cached)

    def _recent(self) -> Prefixes:
        """What the engine that runs now has probably in its cache. Each begins with none: what lower tiers have from
        before is seldom much, and shows when it is asked for again."""
        hello, engine = self._client.hello, self._settings.engine
        if hello is not self._prefixes_of:
            self._prefixes_of = hello
            tiers = bool(engine.kv_disk or engine.kv_host)
            self._prefixes = Prefixes(worth_remembering(hello.n_pages, lower_tiers=tiers) if hello else 0)
        return self._prefixes

    def _checked_size(self, field: str, source: str | tuple[Message, ...]) -> int:
        """Characters to be tokenized. Raises ContextTooLong for more than the context could hold of any text."""
        size, limit = len(source) if isinstance(source, str) else sum(map(_length, source)), self.card.max_context
        if size > CHARS_PER_TOKEN * limit:
            raise ContextTooLong(f"{field}: {size} characters; the context holds {limit} tokens", param=field)
        return size

    def _encode(
        self,
        source: str | tuple[Message, ...],
        *,
        bos: bool = True,
        parse_special: bool = False,
        answer: bool = True,
        variables: Mapping[str, bool | str] | None = None,
    ) -> list[int]:
        """Text with a BOS in front, or messages through the template, up to where an answer begins."""
        if isinstance(source, str):
            ids = self._tokenizer.encode(source, specials=parse_special)
            # A text that brings its own BOS needs no second one.
            if bos and self._meta.add_bos and self._meta.bos_id is not None and ids[:1] != [self._meta.bos_id]:
                ids.insert(0, self._meta.bos_id)
            return ids
        if self._template is None:
            raise InvalidRequest("messages: this model has no chat template; use /v1/completions", param="messages")
        return self._template.encode(self._tokenizer, source, answer=answer, variables=variables)

    def _bad_words(self, texts: tuple[str, ...]) -> list[list[int]]:
        """The sequences of ids that bad words are written in: as they are, and with one space before.
        (Text of several tokens can be written in others; those are not looked for.)"""
        words = set()
        for word in texts:
            bare = word.lstrip() or word
            for text in (bare, " " + bare):
                words.add(tuple(self._tokenizer.encode_inside(text)))
        return [list(word) for word in sorted(words) if word]

    async def tokenize(
        self,
        source: str | tuple[Message, ...],
        *,
        bos: bool = True,
        parse_special: bool = False,
        generation_prompt: bool = True,
        variables: Mapping[str, bool | str] | None = None,
    ) -> Tokens:
        size = self._checked_size("prompt" if isinstance(source, str) else "messages", source)

        def work() -> Tokens:
            ids = self._encode(
                source, bos=bos, parse_special=parse_special, answer=generation_prompt, variables=variables
            )
            return Tokens(tuple(ids), tuple(map(self._tokenizer.token_text, ids)))

        return await _aside(size, work)

    async def detokenize(self, ids: Sequence[int]) -> str:
        def work() -> str:
            detokenizer = Detokenizer(self._tokenizer)
            return detokenizer.push(ids) + detokenizer.finish()

        return await _aside(len(ids), work)

    async def forget(self, salt: str, resume: Resume, spare: int = 0) -> None:
        if self._turns is None:
            return
        # The spared turns' contexts are the same ones, as far as they go.
        spared = [len(ids) for ids in self._turns.contexts(replace(resume, turns=resume.turns[:spare]))]
        for ids, kept in zip_longest(self._turns.contexts(resume), spared):
            keep = (kept or 0) // PAGE_SIZE
            if ids and len(ids) // PAGE_SIZE > keep:
                self._client.purge(self._salt(salt), ids, self._public_pages(ids), keep)

    def _public_prefix(self) -> list[int]:
        """Prompt ids of the system message that all tenants may share, up to where another message begins. Raises
        Unsupported for one that cannot be."""
        path = self._settings.paths.public_system
        if path is None or self._template is None:
            return []
        try:
            said = Message("system", path.read_text(encoding="utf-8").strip())
            one, other = (self._encode((said, Message("user", text))) for text in ("x", "y"))
        except (OSError, UnicodeDecodeError, InvalidRequest) as error:
            raise Unsupported(f"public-system {path}: {error}") from None
        return [id for id, _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False))]

    def _public_pages(self, ids: Sequence[int]) -> int:
        """How many whole pages of a prompt are of that message."""
        size = len(self._public)
        return size // PAGE_SIZE if size and list(ids[:size]) == self._public else 0

    def _salt(self, tenant: str) -> str:
        """What stands for a tenant in the engine and in the names of files, which so tell nobody whose they are."""
        return hmac.new(self._secret, tenant.encode(), hashlib.sha256).hexdigest()

    @asynccontextmanager
    async def open(
        self, prepared: Prepared, *, choice: int = 0, deadline: float | None = None
    ) -> AsyncIterator[AsyncIterator[Delta]]:
        order = prepared.order
        if not isinstance(order, _Order):
            raise TypeError("not prepared by this backend")
        spec = order.spec
        # Greedy answers have none, and are all the same.
        seed = spec.seed + choice if spec.temperature else 0
        stream = self._client.submit(lambda id: msgspec.structs.replace(spec, id=id, seed=seed, deadline=deadline))
        splitter = self._reasoning.splitter(spec.ids) if order.chat and self._reasoning else None
        trace = Trace(self._recent(), Realm(spec.salt, spec.public), spec.ids)
        answer = deltas(stream, self._tokenizer, order.stop, splitter, trace.hear)
        try:
            yield answer
        finally:
            self._client.release(stream)
            trace.end(stream.counted)
            await answer.aclose()


async def _aside(size: int, work: Callable[[], _T]) -> _T:
    """``work`` on text of ``size`` characters or tokens: off the event loop where that is much."""
    return await asyncio.to_thread(work) if size > THREAD_FROM else work()


def _length(message: Message) -> int:
    return len(message.content) + len(message.name or "") + len(message.reasoning or "")


def _seed(request: GenRequest) -> int:
    """Greedy answers need none, and must not differ in their key for it."""
    if request.temperature == 0:
        return 0
    return secrets.randbits(63) if request.seed is None else request.seed

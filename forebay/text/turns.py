"""The prompt of a conversation's next turn as an extension, token for token, of what the model has read and written.

Rendering the whole conversation again would not give it: text is tokenized otherwise than a model writes it, templates
trim it, and an answer may end inside of a character. So the ids of each turn are kept, and the template is asked only
for what comes behind the last answer: the end of that turn, the new messages, and where the next answer begins. It is
asked on a stub, the conversation's system messages and two turns, because a template may put in messages of its own or
refuse a conversation without a beginning.

A template may also rewrite the answers of earlier turns; most often it leaves their thinking out. Models are trained on
what their template writes, so its word counts: where it would not write the last answer as the model wrote it (white
space aside), all is rendered from text, as it is where ids are not there, or mean something else.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from itertools import takewhile

import msgspec

from ..contract import InvalidRequest, Message, Resume
from .detokenize import Detokenizer
from .reasoning import Reasoning
from .template import ChatTemplate
from .tokenizer import Tokenizer


class _Read(msgspec.Struct, frozen=True, array_like=True):
    """What a turn's prompt added to those before it, or ``whole``: all of it. Ids are of use only to who has the same
    ``meaning`` of them."""

    meaning: bytes
    whole: bool
    ids: list[int]


class Turns:
    """Prompts of one model's conversations. ``fingerprint`` is the model's; ids are below ``vocab_size``."""

    def __init__(self, template: ChatTemplate, tokenizer: Tokenizer, fingerprint: str, vocab_size: int) -> None:
        self._template = template
        self._tokenizer = tokenizer
        self._fingerprint = fingerprint
        self._vocab_size = vocab_size

    def encode(
        self, messages: Sequence[Message], resume: Resume, variables: Mapping[str, bool | str]
    ) -> tuple[list[int], bytes]:
        """Prompt ids of ``messages``, and what a later Resume is to have of them. Raises InvalidRequest as
        ChatTemplate.encode does."""
        # Variables may change what a template writes of all turns, so under others the ids are others'.
        known = (self._fingerprint, self._template.source, sorted(variables.items()))
        meaning = hashlib.sha256(repr(known).encode()).digest()[:16]
        ids = self._context(resume, meaning)
        if ids is not None:
            tail = self._tail(messages, resume.known, resume.turns[-1][1], variables)
            if tail is not None:
                return ids + tail, msgspec.msgpack.encode(_Read(meaning, False, tail))
        ids = self._template.encode(self._tokenizer, messages, variables=variables)
        return ids, msgspec.msgpack.encode(_Read(meaning, True, ids))

    def contexts(self, resume: Resume) -> list[list[int]]:
        """All that the model has read and written in these turns: each a prompt that began anew, and what came of it.
        What is not known in ids is left out, and what no ids can be is empty."""
        found: list[list[int]] = []
        at: list[int] | None = None
        for packed, answer in resume.turns:
            read = _read(packed)
            if read is None:
                at = None
                continue
            if read.whole:
                at = []
                found.append(at)
            if at is not None:
                at += [*read.ids, *answer]
        return [ids if self._possible(ids) else [] for ids in found]

    def _possible(self, ids: list[int]) -> bool:
        return min(ids, default=-1) >= 0 and max(ids) < self._vocab_size

    def appends(self, reasoning: Reasoning | None) -> bool:
        """Whether conversations are extended, judged on a sample: an answer with thinking, if the model thinks."""
        question = Message("user", "Name a colour.")
        try:
            prompt = self._template.encode(self._tokenizer, [question])
        except InvalidRequest:
            return False
        written, thought, said = "Blue, like the sea.", "", "Blue, like the sea."
        if reasoning is not None:
            written = reasoning.sample(prompt, "The sea is blue.", said)
            splitter = reasoning.splitter(prompt)
            parts = (splitter.push(written), splitter.finish())
            thought, said = ("".join(part) for part in zip(*parts, strict=True))
        answer = Message("assistant", said, reasoning=thought or None)
        ids = self._tokenizer.encode_inside(written)
        return self._tail([question, answer, Message("user", "Another?")], 2, ids, {}) is not None

    def _context(self, resume: Resume, meaning: bytes) -> list[int] | None:
        """What the model has read and written so far; None where that is not known."""
        parts: list[Sequence[int]] = []
        for packed, answer in reversed(resume.turns):
            read = _read(packed)
            if read is None or read.meaning != meaning:
                return None
            parts += [answer, read.ids]
            if read.whole:
                break
        else:
            return None
        ids = [id for part in reversed(parts) for id in part]
        return ids if self._possible(ids) else None

    def _tail(
        self, messages: Sequence[Message], known: int, written: Sequence[int], variables: Mapping[str, bool | str]
    ) -> list[int] | None:
        """The ids behind the answer ``messages[known - 1]``, which was ``written`` so; None if the template would write
        that answer otherwise, or goes on with something that its last token could merge with."""
        template, tokenizer = self._template, self._tokenizer
        answer, new = messages[known - 1], messages[known:]
        # Templates read switches out of the first system message ("/no_think").
        head = [*takewhile(lambda message: message.role == "system", messages[:known]), Message("user", "x")]
        detokenizer = Detokenizer(tokenizer)
        text = detokenizer.push(written) + detokenizer.finish()
        try:
            mark, stand_in = template.unused_characters(tokenizer, [*head, answer, *new], 2)

            def render(*more: Message) -> str:
                return template.render(tokenizer, [*head, *more], mark, variables=variables)

            before, whole = render(), render(answer, *new)
            stub = render(Message("assistant", stand_in), *new)
            tail = stub.rpartition(stand_in)[2]  # if it stands there more than once, what is compared below differs
            pieces = template.pieces(tokenizer, tail, mark)
            if not isinstance(pieces[0] if pieces else None, int):
                return None
            if _bare(whole, mark) != _bare(before, mark) + _bare(text, "") + _bare(tail, mark):
                return None
            return tokenizer.encode_pieces(pieces)
        except InvalidRequest:  # the whole conversation may still be to the template's liking
            return None


def _read(packed: bytes) -> _Read | None:
    """None where there was none, or the store is damaged: the text is there all the same."""
    try:
        return msgspec.msgpack.decode(packed, type=_Read)
    except msgspec.MsgspecError:
        return None


def _bare(text: str, mark: str) -> str:
    """Without white space and marks."""
    return "".join(text.replace(mark, "").split())

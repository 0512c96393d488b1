"""Thinking told from content in an answer as its text comes: ``<think>``...``</think>`` at its very beginning.

The markers are those of Qwen 3, QwQ, DeepSeek R1 and its distillates, SmolLM3 and GLM. Trimming is as in llama.cpp:
whitespace at both ends of the thinking and before the content goes.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Self

from .template import ChatTemplate
from .tokenizer import Tokenizer

_OPEN, _CLOSE = "<think>", "</think>"
_SPACE = " \t\r\n"  # no more: a Chinese paragraph begins with two ideographic spaces
#: Tokens at the end of a prompt in which its last marker is found: a marker in bytes, and whitespace.
_TAIL = 32


class Reasoning:
    """How the answers of one model that thinks are to be split."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    @classmethod
    def of(cls, template: ChatTemplate, tokenizer: Tokenizer) -> Self | None:
        """None for a model that marks no thinking: its template does not name both markers (the first ones of R1's
        distillates name the second only, because the model writes the first itself: then it is a token).

        None as well where a marker is a special token: those have no text in an answer.
        """
        if not tokenizer.special_ids.keys().isdisjoint((_OPEN, _CLOSE)):
            return None
        opens = _OPEN in template.source or len(tokenizer.encode(_OPEN, specials=False)) == 1
        return cls(tokenizer) if opens and _CLOSE in template.source else None

    def splitter(self, prompt: Sequence[int]) -> Splitter:
        """For one answer to ``prompt``."""
        tail: list[bytes] = []
        # Special tokens have no bytes: without the stop, "<think>" at the end of what a user wrote would stand last
        # where a template ends a turn with special tokens alone.
        for index in reversed(prompt[-_TAIL:]):
            if self._tokenizer.is_special(index):
                break
            tail.append(self._tokenizer.token_bytes(index))
        return Splitter(b"".join(reversed(tail)).decode(errors="replace"))

    def sample(self, prompt: Sequence[int], thought: str, said: str) -> str:
        """An answer to ``prompt`` as the model would write it."""
        return self.splitter(prompt).sample(thought, said)


class _At(enum.Enum):
    START = enum.auto()  # nothing but whitespace so far, and what may become the first marker
    THINKING = enum.auto()
    BETWEEN = enum.auto()  # behind the second marker; no content yet
    CONTENT = enum.auto()


class Splitter:
    """One answer's stream. The parts of all pushes and of finish() join to the same reasoning and the same content
    however the text is cut. Work per push is bounded by the new text."""

    def __init__(self, tail: str) -> None:
        """``tail`` is the end of the prompt. If it ends with the first marker, the answer begins inside of the thinking
        (and may repeat the marker). If it ends with the second, thinking is over or off: the answer is all content.
        Else the model writes the first marker itself, or does not think."""
        tail = tail.rstrip(_SPACE)
        self._opened = tail.endswith(_OPEN)
        self._at = _At.BETWEEN if tail.endswith(_CLOSE) else _At.START
        self._held = ""  # what may become a marker
        self._space: list[str] = []  # whitespace that goes out with the text behind it, or is dropped before a marker
        self._begun = False  # there is reasoning already: without it, whitespace does not count

    def sample(self, thought: str, said: str) -> str:
        """A whole answer that would be split into these."""
        if self._at is _At.BETWEEN:
            return said
        return ("" if self._opened else f"{_OPEN}\n") + f"{thought}\n{_CLOSE}\n\n{said}"

    def push(self, text: str) -> tuple[str, str]:
        """Take new text; return what is certain of it: reasoning and content."""
        text, self._held = self._held + text, ""
        reasoning = ""
        if self._at is _At.START:
            body = text.lstrip(_SPACE)
            self._space.append(text[: len(text) - len(body)])
            if body != _OPEN and _OPEN.startswith(body):
                self._held = body
                return "", ""
            if self._opened or body.startswith(_OPEN):
                self._at = _At.THINKING
                text = body.removeprefix(_OPEN)
            else:
                self._at = _At.CONTENT
                text = "".join(self._space) + body
        if self._at is _At.THINKING:
            thought, marker, rest = text.partition(_CLOSE)
            if not marker:
                # Only the last "<" can begin the marker, because there is none inside of it.
                at = text.rfind(_CLOSE[0])
                if at >= 0 and _CLOSE.startswith(text[at:]):
                    thought, self._held = text[:at], text[at:]
                return self._trimmed(thought), ""
            reasoning, text = self._trimmed(thought), rest
            self._at = _At.BETWEEN
        if self._at is _At.BETWEEN:
            text = text.lstrip(_SPACE)
            if text:
                self._at = _At.CONTENT
        return reasoning, text

    def finish(self) -> tuple[str, str]:
        """The end of the answer: what was held back. Thinking that was not ended is all reasoning."""
        if self._at is _At.START and not self._opened:
            return "", "".join(self._space) + self._held
        if self._at in (_At.START, _At.THINKING):
            return ("".join(self._space) if self._begun else "") + self._held, ""
        return "", ""

    def _trimmed(self, thought: str) -> str:
        """Without whitespace at the beginning of all reasoning, and at the end as long as more may follow."""
        kept = thought.rstrip(_SPACE)
        if not kept:
            if self._begun:
                self._space.append(thought)
            return ""
        ready = "".join(self._space) + kept if self._begun else kept.lstrip(_SPACE)
        self._begun, self._space = True, [thought[len(kept) :]]
        return ready

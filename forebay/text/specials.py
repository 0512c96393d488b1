"""Special tokens in text: where they are, and how to keep a writer's text from being taken for one."""

from __future__ import annotations

import re
from collections.abc import Mapping, Set


class Specials:
    """The special tokens of one model, ``ids`` by text.

    ``strip_left`` and ``strip_right`` hold the tokens that swallow the whitespace before or after them (a property
    of Hugging Face's added tokens).
    """

    def __init__(
        self, ids: Mapping[str, int], *, strip_left: Set[str] = frozenset(), strip_right: Set[str] = frozenset()
    ) -> None:
        self.ids = dict(ids)
        self._strip_left, self._strip_right = strip_left, strip_right
        # A special token of one character cannot be told from the character in text, so text never means it.
        texts = sorted((text for text in ids if len(text) > 1), key=len, reverse=True)
        any_of = "|".join(map(re.escape, texts)) or r"(?!)"
        self._token = re.compile(f"({any_of})")  # longest first: at one place the longest match wins
        self._first_character = re.compile(f"(?=(?:{any_of}))(.)", re.DOTALL)
        self._texts = "\0".join(texts)
        self._heads = tuple({text[:n] for text in texts for n in range(1, len(text))})
        self._tails = tuple({text[n:] for text in texts for n in range(1, len(text))})

    def split(self, text: str) -> list[str | int]:
        """Plain pieces (str, never empty) and ids of the special tokens between them, in order."""
        pieces: list[str] = self._token.split(text)  # plain, special, plain, ..., plain
        result: list[str | int] = []
        for n, piece in enumerate(pieces):
            if n % 2:
                result.append(self.ids[piece])
                continue
            if n > 0 and pieces[n - 1] in self._strip_right:
                piece = piece.lstrip()  # noqa: PLW2901
            if n + 1 < len(pieces) and pieces[n + 1] in self._strip_left:
                piece = piece.rstrip()  # noqa: PLW2901
            if piece:
                result.append(piece)
        return result

    def shield(self, text: str, mark: str) -> str:
        """``text`` with ``mark`` (one character, part of no special token) set so that split() finds nothing of it.

        A mark goes behind the first character of every occurrence, overlapping ones too; and to an end of the text
        where it could complete a special token together with what a template puts next to it, inside of surrounding
        whitespace, which templates trim. Removing the marks gives ``text`` back.
        """
        text = self._first_character.sub(rf"\1{mark}", text)
        body = text.strip()
        if not body:
            return text
        start = len(text) - len(text.lstrip())
        inside = body in self._texts  # the template could write what is around it
        front = mark if inside or body.startswith(self._tails) else ""
        back = mark if inside or body.endswith(self._heads) else ""
        return text[:start] + front + body + back + text[start + len(body) :]

"""Chat messages to prompt ids through the model's own chat template, such that no text becomes a control token.

The template is rendered to text, and that text is split at special tokens. What users wrote must not take part in the
split, so a mark, a private-use character that occurs nowhere else, is set into the writer's text wherever it could
match (``Specials.shield``); after the split the marks are taken out again.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, NoReturn, Self

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment

from ..catalog import ModelMeta
from ..contract import InvalidRequest, Message, Unsupported
from .tokenizer import Tokenizer

_PRIVATE_USE = (range(0xE000, 0xF900), range(0xF0000, 0xFFFFE))
_ROLES = frozenset({"system", "user", "assistant"})
MAX_CHARS = 4 << 20


class ChatTemplate:
    """A model's chat template.

    Templates see what the field gives them (messages, add_generation_prompt, bos_token, eos_token, tools and documents
    None, raise_exception, tojson) except ``strftime_now``: the date would make the prompt, and with it every cached
    prefix, depend on the day. Templates that ask for it fall back to a fixed date.
    """

    def __init__(self, source: str, *, bos: str = "", eos: str = "", bos_id: int | None = None) -> None:
        """``bos_id`` is put in front of every prompt that does not begin with it. Raises Unsupported if ``source``
        does not compile."""
        # No autoescape: the output is a prompt, not HTML.
        env = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        env.filters["tojson"] = _tojson
        env.globals["raise_exception"] = _raise_exception
        try:
            self._template = env.from_string(source)
        except Exception as error:  # the optimizer runs constant expressions, so anything can be raised
            raise Unsupported(f"the model's chat template does not compile: {error}") from error
        self._source = source
        self._tokens = {"bos_token": bos, "eos_token": eos}
        self._bos_id = bos_id

    @classmethod
    def of(cls, meta: ModelMeta) -> Self:
        """The template that the model brings. Raises Unsupported if it brings none."""
        if meta.chat_template is None:
            raise Unsupported("the model has no chat template, so it cannot be served as a chat model")
        bos_id = meta.bos_id if meta.add_bos else None
        return cls(meta.chat_template, bos=meta.bos_token, eos=meta.eos_token, bos_id=bos_id)

    def encode(
        self, tokenizer: Tokenizer, messages: Sequence[Message], *, answer: bool = True, max_chars: int = MAX_CHARS
    ) -> list[int]:
        """Prompt ids of a conversation; ``answer``: up to where the assistant's next answer begins.

        Raises InvalidRequest (param "messages") when the template refuses the messages or when the rendered text
        is longer than ``max_chars``.
        """
        mark = self._unused_character(tokenizer, messages)
        shown = []
        for message in messages:
            if message.role not in _ROLES:  # not shielded, because templates build special tokens from it
                raise InvalidRequest(f"unknown role {message.role!r}", param="messages")
            fields = {"role": message.role, "content": tokenizer.specials.shield(message.content, mark)}
            if message.name is not None:
                fields["name"] = tokenizer.specials.shield(message.name, mark)
            shown.append(fields)
        pieces: list[str | int] = []
        for piece in tokenizer.specials.split(self._render(shown, answer, max_chars)):
            clean = piece if isinstance(piece, int) else piece.replace(mark, "")
            if clean != "":
                pieces.append(clean)
        if self._bos_id is not None and pieces[:1] != [self._bos_id]:
            pieces.insert(0, self._bos_id)
        try:
            return tokenizer.encode_pieces(pieces)
        except InvalidRequest as error:
            raise InvalidRequest(error.message, param="messages") from error

    def prefix_stable(self, tokenizer: Tokenizer) -> bool:
        """Whether the tokens of a turn and its answer stay a prefix of the next turn's, judged on a sample.

        Where they do not (a template that rewrites earlier answers), the prefix cache loses the last turn.
        """
        first, answer = Message("user", "Name a colour."), Message("assistant", "Blue, like the sea.")
        try:
            before = self.encode(tokenizer, [first])
            after = self.encode(tokenizer, [first, answer, Message("user", "Another?")])
        except InvalidRequest:
            return False
        expected = before + tokenizer.encode_pieces([*before[-1:], answer.content])[1:]
        return after[: len(expected)] == expected

    def _render(self, messages: list[dict[str, str]], answer: bool, max_chars: int) -> str:
        parts, size = [], 0
        try:
            # Piece by piece, so that a template that loops is stopped at the limit.
            for part in self._template.generate(
                messages=messages, add_generation_prompt=answer, tools=None, documents=None, **self._tokens
            ):
                parts.append(part)
                size += len(part)
                if size > max_chars:
                    break
        except Exception as error:  # whatever a template does, it ends this request alone
            raise InvalidRequest(
                f"the model's chat template refuses these messages: {error}", param="messages"
            ) from error
        if size > max_chars:
            raise InvalidRequest(f"the messages are longer than {max_chars} characters", param="messages")
        return "".join(parts)

    def _unused_character(self, tokenizer: Tokenizer, messages: Sequence[Message]) -> str:
        used = set(self._source).union(*tokenizer.special_ids)
        for message in messages:
            used.update(message.content, message.name or "")
        for code in (code for block in _PRIVATE_USE for code in block):
            if chr(code) not in used:
                return chr(code)
        raise InvalidRequest("the messages use every private-use character of Unicode", param="messages")


def _tojson(value: Any, **options: Any) -> str:
    """Jinja's own filter escapes for HTML, which a prompt is not."""
    return json.dumps(value, ensure_ascii=options.pop("ensure_ascii", False), **options)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)

"""Chat messages to prompt ids through the model's own chat template, such that no text becomes a control token.

The template is rendered to text, and that text is split at special tokens. What users wrote must not take part in the
split, so a mark, a private-use character that occurs nowhere else, is set into the writer's text wherever it could
match (``Specials.shield``); after the split the marks are taken out again.
"""

from __future__ import annotations

import itertools
import json
import threading
from collections.abc import Mapping, Sequence
from datetime import date
from typing import Any, NoReturn, Self

import jinja2
from jinja2 import meta as jinja2_meta
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from ..catalog import ModelMeta
from ..contract import InvalidRequest, Message, Unsupported
from .tokenizer import Tokenizer

_PRIVATE_USE = (range(0xE000, 0xF900), range(0xF0000, 0xFFFFE))
_ROLES = frozenset({"system", "user", "assistant"})
MAX_CHARS = 4 << 20

_SWITCH = (True, False)
#: Variables of the field's templates that clients may set, and the values they may have. Values come from this closed
#: set alone, so no text of a client gets into a prompt unshielded, and no name is one that a template gets from us.
_VARIABLES: Mapping[str, tuple[bool, ...] | tuple[str, ...]] = {
    "clear_thinking": _SWITCH,  # GLM 4.7 and 5: leave the thinking of earlier answers out
    "enable_thinking": _SWITCH,  # Qwen 3, SmolLM3, GLM 4.5
    "preserve_thinking": _SWITCH,  # Qwen 3.6: keep the thinking of earlier answers
    "reasoning_effort": ("none", "minimal", "low", "medium", "high", "xhigh", "max"),  # GPT-OSS, GLM 5; as in vLLM
    "thinking": _SWITCH,  # DeepSeek V3.1, Granite 3
}
#: The day for templates that have none of their own to fall back to. SmolLM3's release: it is the model that needs it,
#: and must not be told a day before its training ended.
_DAY = date(2025, 7, 8)


class ChatTemplate:
    """A model's chat template.

    Templates see what the field gives them (messages, add_generation_prompt, bos_token, eos_token, tools and documents
    None, raise_exception, tojson) except the date: it would make the prompt, and with it every cached prefix, depend on
    the day. Templates that ask whether there is ``strftime_now`` are told no and fall back to a date of their own;
    those that call it without asking get a fixed day.

    ``source`` is its text. ``variables``: what a client may set, name -> possible values: known switches that this
    template really reads.
    """

    def __init__(self, source: str, *, bos: str = "", eos: str = "", bos_id: int | None = None) -> None:
        """``bos_id`` is put in front of every prompt that does not begin with it. Raises Unsupported if ``source``
        does not compile."""
        # No autoescape: the output is a prompt, not HTML. Not optimized: that runs constant expressions right here.
        env = ImmutableSandboxedEnvironment(
            trim_blocks=True,
            lstrip_blocks=True,
            optimized=False,
            extensions=["jinja2.ext.loopcontrols", _Generation],
        )
        env.filters["tojson"] = _tojson
        env.globals["raise_exception"] = _raise_exception
        try:
            self._template = env.from_string(source)
            read = jinja2_meta.find_undeclared_variables(env.parse(source))
        except Exception as error:  # a parser of somebody else's text: anything can be raised
            raise Unsupported(f"the model's chat template does not compile: {error}") from error
        self.source = source
        self.variables = {name: values for name, values in _VARIABLES.items() if name in read}
        self._given = {"bos_token": bos, "eos_token": eos, "strftime_now": _StandingClock(name="strftime_now")}
        self._bos_id = bos_id

    @classmethod
    def of(cls, meta: ModelMeta) -> Self:
        """The template that the model brings. Raises Unsupported if it brings none."""
        if meta.chat_template is None:
            raise Unsupported("the model has no chat template, so it cannot be served as a chat model")
        bos_id = meta.bos_id if meta.add_bos else None
        return cls(meta.chat_template, bos=meta.bos_token, eos=meta.eos_token, bos_id=bos_id)

    def encode(
        self,
        tokenizer: Tokenizer,
        messages: Sequence[Message],
        *,
        answer: bool = True,
        variables: Mapping[str, bool | str] | None = None,
        max_chars: int = MAX_CHARS,
    ) -> list[int]:
        """Prompt ids of a conversation; ``answer``: up to where the assistant's next answer begins. What ``variables``
        does not name is not defined, so that the template's own default holds.

        Raises InvalidRequest: for a variable that is none of ``self.variables`` or has another value
        (param "chat_template_kwargs.<name>"); when the template refuses the messages, or when the rendered text is
        longer than ``max_chars`` (param "messages").
        """
        (mark,) = self.unused_characters(tokenizer, messages, 1)
        text = self.render(tokenizer, messages, mark, answer=answer, variables=variables, max_chars=max_chars)
        pieces = self.pieces(tokenizer, text, mark)
        if self._bos_id is not None and pieces[:1] != [self._bos_id]:
            pieces.insert(0, self._bos_id)
        try:
            return tokenizer.encode_pieces(pieces)
        except InvalidRequest as error:
            raise InvalidRequest(error.message, param="messages") from error

    def render(
        self,
        tokenizer: Tokenizer,
        messages: Sequence[Message],
        mark: str,
        *,
        answer: bool = True,
        variables: Mapping[str, bool | str] | None = None,
        max_chars: int = MAX_CHARS,
    ) -> str:
        """As ``encode``, but the text, with ``mark`` in it wherever the messages' own text could match a special
        token. Raises InvalidRequest as ``encode`` does."""
        variables = variables or {}
        self._check(variables)
        shown = []
        for message in messages:
            if message.role not in _ROLES:  # not shielded, because templates build special tokens from it
                raise InvalidRequest(f"unknown role {message.role!r}", param="messages")
            fields = {"role": message.role, "content": tokenizer.specials.shield(message.content, mark)}
            if message.name is not None:
                fields["name"] = tokenizer.specials.shield(message.name, mark)
            if message.reasoning is not None:  # vLLM's and SGLang's name for it, which templates read
                fields["reasoning_content"] = tokenizer.specials.shield(message.reasoning, mark)
            shown.append(fields)
        return self._render(shown, answer, variables, max_chars)

    def pieces(self, tokenizer: Tokenizer, text: str, mark: str) -> list[str | int]:
        """What ``render`` gave, or a part of it, for ``Tokenizer.encode_pieces``: the marks have done their work."""
        split = tokenizer.specials.split(text)
        clean = (piece if isinstance(piece, int) else piece.replace(mark, "") for piece in split)
        return [piece for piece in clean if piece != ""]

    def unused_characters(self, tokenizer: Tokenizer, messages: Sequence[Message], n: int) -> list[str]:
        """``n`` characters for marks: neither in the messages nor in the template. Raises InvalidRequest."""
        used = set(self.source).union(*tokenizer.special_ids)
        for message in messages:
            used.update(message.content, message.name or "", message.reasoning or "")
        unused = (chr(code) for block in _PRIVATE_USE for code in block if chr(code) not in used)
        found = list(itertools.islice(unused, n))
        if len(found) < n:
            raise InvalidRequest("the messages use every private-use character of Unicode", param="messages")
        return found

    def try_out(self, tokenizer: Tokenizer, *, seconds: float = 10.0) -> None:
        """Raises Unsupported if it does not render a plain question, or takes longer than ``seconds`` for it: then it
        would fail each request, and the sandbox bounds what a template may reach but not how long it computes."""
        outcome: list[Exception | None] = []

        def render() -> None:
            try:
                self.encode(tokenizer, [Message("user", "Name a colour.")])
                outcome.append(None)
            except Exception as error:
                outcome.append(error)

        # A daemon, because what never ends must not keep the process from ending.
        thread = threading.Thread(target=render, daemon=True, name="template")
        thread.start()
        thread.join(seconds)
        if not outcome:
            raise Unsupported(f"the model's chat template does not come to an end within {seconds:g} s")
        if outcome[0] is not None:
            raise Unsupported(f"the model's chat template fails on a plain question: {outcome[0]}")

    def _check(self, variables: Mapping[str, bool | str]) -> None:
        for name, value in variables.items():
            field = f"chat_template_kwargs.{name[:64]}"
            values = self.variables.get(name)
            if values is None:
                known = ", ".join(sorted(self.variables))
                raise InvalidRequest(
                    f"{field}: this model's chat template takes " + (f"only {known}" if known else "no variables"),
                    param=field,
                )
            # 1 == True in Python, and yet "1" is what a template would write.
            if type(value) is not type(values[0]) or value not in values:
                wanted = "true or false" if values is _SWITCH else f"one of {', '.join(map(str, values))}"
                raise InvalidRequest(f"{field} must be {wanted}", param=field)

    def _render(
        self, messages: list[dict[str, str]], answer: bool, variables: Mapping[str, bool | str], max_chars: int
    ) -> str:
        parts, size = [], 0
        try:
            # Piece by piece, so that a template that loops is stopped at the limit.
            for part in self._template.generate(
                messages=messages,
                add_generation_prompt=answer,
                tools=None,
                documents=None,
                **self._given,
                **variables,
            ):
                parts.append(part)
                size += len(part)
                if size > max_chars:
                    break
        except Exception as error:  # whatever a template does, it ends this request alone
            what = f"these messages with {', '.join(variables)}" if variables else "these messages"
            raise InvalidRequest(f"the model's chat template refuses {what}: {error}", param="messages") from error
        if size > max_chars:
            raise InvalidRequest(f"the messages are longer than {max_chars} characters", param="messages")
        return "".join(parts)


class _Generation(Extension):
    """``{% generation %}``: where trainers find what a model wrote (SmolLM3). To a prompt it does nothing."""

    tags = {"generation"}  # noqa: RUF012 - so in jinja2

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        # A scope, because variables set inside stay inside in transformers too.
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


class _StandingClock(jinja2.Undefined):
    """``strftime_now`` on ``_DAY``: not there for a template that asks, and yet it may be called."""

    def __call__(self, format: str) -> str:  # type: ignore[override]  # an Undefined answers no call
        return _DAY.strftime(format)

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(name)  # jinja2 looks for marks of a callable, and its own Undefined fails at that


def _tojson(value: Any, **options: Any) -> str:
    """Jinja's own filter escapes for HTML, which a prompt is not."""
    return json.dumps(value, ensure_ascii=options.pop("ensure_ascii", False), **options)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)

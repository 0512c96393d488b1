"""What the engine says of one sequence, as text for the server."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable

from ..contract import (
    DeadlineExceeded,
    Delta,
    EngineFailure,
    EngineUnavailable,
    ForebayError,
    InvalidRequest,
    TokenLogprob,
    Usage,
)
from ..engine.client import Stream
from ..engine.sequence import Emit, End, Logprobs
from ..text.detokenize import Detokenizer
from ..text.reasoning import Splitter
from ..text.tokenizer import Tokenizer


class _Speech:
    """The text of an answer as its tokens come, with their log probabilities and ids. ``said`` characters are out."""

    def __init__(self, tokenizer: Tokenizer, stop: tuple[str, ...]) -> None:
        self._tokenizer = tokenizer
        self._detokenizer = Detokenizer(tokenizer, stop)
        self._said = 0
        self._waiting: list[TokenLogprob] = []  # until the first character of their token is out
        self._unspoken: list[tuple[int, int]] = []  # ids until their last character is out, and the number of that one
        self._begun = ""  # what is out of the first of them

    @property
    def stopped(self) -> bool:
        return self._detokenizer.stopped

    def push(self, token: int, known: Logprobs | None) -> str:
        begin = self._said + self._detokenizer.pending
        text = self._detokenizer.push([token])
        self._out(text)
        if not self.stopped:  # else it stands at least in part in the stop string
            end = self._said + self._detokenizer.pending + self._detokenizer.halved
            self._unspoken.append((token, end))
        if known is not None:
            top = zip(map(self._bytes, known.ids), known.values, strict=True)
            self._waiting.append(TokenLogprob(self._bytes(token), known.chosen, tuple(top), begin))
        return text

    def finish(self) -> str:
        text = self._detokenizer.finish()
        self._out(text)
        return text

    def ids(self, *, last: bool) -> tuple[int, ...]:
        """Those due now. Where a stop string began inside of a token, what came before it is tokenized anew."""
        if last and not self.stopped:  # also what ended inside of a character: the model goes on from it
            return tuple(id for id, _ in self._unspoken)
        due = sum(end <= self._said for _, end in self._unspoken)
        ready, self._unspoken = self._unspoken[:due], self._unspoken[due:]
        if ready:
            rest = self._said - ready[-1][1]
            self._begun = self._begun[len(self._begun) - rest :]
        more = self._tokenizer.encode_inside(self._begun) if self.stopped else ()
        return (*(id for id, _ in ready), *more)

    def logprobs(self, *, last: bool) -> tuple[TokenLogprob, ...]:
        """Those due now. None of a token that stands wholly in a stop string, or behind it."""
        due = len(self._waiting)
        if not last or self.stopped:
            due = sum(entry.offset < self._said for entry in self._waiting)
        ready, self._waiting = self._waiting[:due], self._waiting[due:]
        return tuple(ready)

    def _out(self, text: str) -> None:
        self._said += len(text)
        self._begun += text

    def _bytes(self, token: int) -> bytes:
        return self._tokenizer.token_bytes(token) or self._tokenizer.token_text(token).encode()


async def deltas(
    stream: Stream,
    tokenizer: Tokenizer,
    stop: tuple[str, ...],
    splitter: Splitter | None,
    heard: Callable[[Emit], None] = lambda emit: None,
) -> AsyncGenerator[Delta]:
    """Text as it comes, until the ending. What piled up while nobody read comes as one delta. ``heard`` is told of
    all that the engine says."""
    speech = _Speech(tokenizer, stop)
    n_prompt, n_done = len(stream.spec.ids), 0
    while True:
        emit = await stream.get()
        heard(emit)
        # The token that ends the answer is counted but is no text.
        speaking = emit.tokens[:-1] if emit.end is End.STOP else emit.tokens
        text = ""
        n_new = len(emit.tokens)
        for i, token in enumerate(speaking):
            text += speech.push(token, emit.logprobs[i] if emit.logprobs else None)
            if speech.stopped:
                n_new = i + 1
                break
        n_done += n_new
        if emit.end not in (None, End.STOP, End.LENGTH) and not speech.stopped:
            raise _error(emit, lost=stream.lost)
        last = speech.stopped or emit.end is not None
        if last:
            text += speech.finish()
        reasoning, content = ("", text) if splitter is None else splitter.push(text)
        if last and splitter is not None:
            more = splitter.finish()
            reasoning, content = reasoning + more[0], content + more[1]
        ids = speech.ids(last=last)
        stream.counted += len(ids)
        yield Delta(
            content,
            n_new,
            Usage(n_prompt, n_done, emit.cached, emit.tier or "none"),
            emit.started,
            ("stop" if emit.end is End.STOP or speech.stopped else "length") if last else None,
            reasoning,
            speech.logprobs(last=last),
            ids,
        )
        if last:
            return


def _error(emit: Emit, *, lost: bool) -> ForebayError:
    if lost:
        return EngineUnavailable(emit.detail, retry_after=2)
    if emit.end is End.EXPIRED:
        return DeadlineExceeded("the server is busy: the request waited longer than it may", retry_after=2)
    if emit.end is End.REFUSED:
        return InvalidRequest(emit.detail)
    return EngineFailure(emit.detail or "the request was cancelled")

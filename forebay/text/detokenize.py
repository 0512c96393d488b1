"""Token ids to text as they come: never half a character, never a part of a stop string."""

from __future__ import annotations

import codecs
from collections.abc import Iterable

from .tokenizer import Tokenizer


class Detokenizer:
    """One answer's stream. ``stopped``: a stop string was found; its text and all after it is dropped.

    Of several stop strings the one that starts earliest ends the text. Work per push is bounded by the new text and
    the longest stop string.
    """

    def __init__(self, tokenizer: Tokenizer, stop: tuple[str, ...] = ()) -> None:
        self.stopped = False
        self._tokenizer = tokenizer
        self._stop = tuple(text for text in stop if text)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._strip_space = tokenizer.strips_first_space
        self._held = ""  # the end of the text so far, as far as a stop string may begin in it

    def push(self, ids: Iterable[int]) -> str:
        """Take the next tokens; return the new text that is certain."""
        if self.stopped:
            return ""
        data = b"".join(map(self._tokenizer.token_bytes, ids))
        if self._strip_space and data:
            data = data.removeprefix(b" ")
            self._strip_space = False
        window = self._held + self._decoder.decode(data)
        match = self._first_match(window)
        hold = min((_possible_start(window, stop) for stop in self._stop), default=len(window))
        if match < len(window) and match <= hold:
            return self._stop_at(window, match)
        self._held = window[hold:]
        return window[:hold]

    def finish(self) -> str:
        """The end of the answer: return what was held back. An incomplete last character is dropped."""
        window, self._held = self._held, ""
        match = self._first_match(window)  # held back for a longer stop string that did not come
        if match < len(window):
            return self._stop_at(window, match)
        return window

    @property
    def pending(self) -> int:
        """Characters held back."""
        return len(self._held)

    @property
    def halved(self) -> bool:
        """Whether the last token ended inside of a character."""
        return bool(self._decoder.getstate()[0])

    def _first_match(self, window: str) -> int:
        """Where the first stop string begins in ``window``; its length if there is none."""
        return min((at for stop in self._stop if (at := window.find(stop)) >= 0), default=len(window))

    def _stop_at(self, window: str, at: int) -> str:
        self.stopped = True
        self._held = ""
        return window[:at]


def _possible_start(window: str, stop: str) -> int:
    """The first index from which the rest of ``window`` is a proper beginning of ``stop``; its length if none."""
    at = window.find(stop[0], max(0, len(window) - len(stop) + 1))
    while at >= 0 and not stop.startswith(window[at:]):
        at = window.find(stop[0], at + 1)
    return at if at >= 0 else len(window)

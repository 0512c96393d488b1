"""Who is measured: a name, and how to start its server."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Start:
    """What a server is started for: so many requests at once, of so many tokens each (prompt and answer)."""

    port: int
    slots: int
    context: int


def _never(_: Start) -> list[str]:
    raise RuntimeError("skipped contestants are not started")


@dataclass(frozen=True, slots=True)
class Contestant:
    """``ready`` answers 200 once it serves. ``fixed_slots``: how many it serves at once is settled at its start, so it
    is started anew for suites that send more. ``skipped``: why it does not take part."""

    name: str
    about: str
    command: Callable[[Start], list[str]] = _never
    ready: str = "/ready"
    environ: Mapping[str, str] = field(default_factory=dict)
    fixed_slots: bool = False
    skipped: str = ""


#: As patient as the peers, whose queues have no end: a burst is to be measured here, not refused.
_PATIENCE = ("--max-queue", "1024", "--queue-timeout", "3600", "--state-url", "off")
_FOREBAY = re.compile(r"forebay(?::(?P<name>[\w.-]+))?(?:=(?P<flags>.*))?", re.DOTALL)


class BadContestant(ValueError):
    """Not a contestant; the message says what one looks like."""


def forebay(text: str, model: str) -> Contestant | None:
    """``forebay[:NAME][=FLAGS]``, with more flags for ``forebay serve``; None if it is something else."""
    match = _FOREBAY.fullmatch(text)
    if match is None:
        return None
    try:
        flags = shlex.split(match["flags"] or "")
    except ValueError as error:
        raise BadContestant(f"{text!r}: {error}") from None

    def command(start: Start) -> list[str]:
        serve = [sys.executable, "-m", "forebay", "serve", model, "--port", str(start.port)]
        return [*serve, *_PATIENCE, *flags]

    name = f"forebay:{match['name']}" if match["name"] else "forebay"
    return Contestant(name, f"forebay serve {shlex.join(flags)}".rstrip(), command)

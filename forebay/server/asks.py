"""What a request asks of the gate: whose it is, by when it wants to be answered, and what that is to cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import inf

from fastapi import Request

from ..admission.ask import Ask, Rank
from ..config import Settings
from ..contract import InvalidRequest, Prepared
from .auth import caller_of
from .conversation import own_key
from .sampling import Call

_SLO = "x-slo-ttft-ms"
_LONGEST = 3_600_000  # milliseconds


def ask_of(request: Request, arrival: float) -> Ask:
    """As far as its headers say. ``arrival`` is in seconds on time.monotonic(). Raises InvalidRequest."""
    settings: Settings = request.app.state.settings
    caller = caller_of(request.scope)
    rank = Rank.BATCH if caller.batch else Rank.FIRST
    patience = settings.admission.queue_timeout
    sent = request.headers.get(_SLO)
    if sent is not None:
        slo = _milliseconds(sent) / 1000
        return Ask(arrival, (caller.tenant, ""), rank, slo=slo, strict=True, patience=min(patience, slo))
    slo = settings.admission.slo_ttft if caller.slo_ttft is None else caller.slo_ttft
    return Ask(arrival, (caller.tenant, ""), rank, slo=inf if caller.batch or not slo else slo, patience=patience)


def _milliseconds(sent: str) -> int:
    known = sent.isascii() and sent.isdecimal() and len(sent) <= len(str(_LONGEST))
    if not known or not 1 <= int(sent) <= _LONGEST:
        raise InvalidRequest(f"the header {_SLO} must be a whole number from 1 to {_LONGEST}", param=_SLO)
    return int(sent)


def of_head(ask: Ask, request: Request) -> Ask:
    """Of a request whose body says no more of whose it is. Raises InvalidRequest."""
    return replace(ask, user=(ask.user[0], own_key(request.headers, caller_of(request.scope), "").user))


def of_call(ask: Ask, request: Request, call: Call) -> Ask:
    """With what its body says. Raises InvalidRequest."""
    user = own_key(request.headers, caller_of(request.scope), "", call.user).user
    ask = replace(ask, user=(ask.user[0], user), most=max(one.max_tokens or 1 for one in call.requests))
    goes_on = any(message.role == "assistant" for one in call.requests for message in one.messages)
    return going_on(ask) if goes_on else ask


def going_on(ask: Ask) -> Ask:
    """As a turn of a conversation that was begun before."""
    return ask if ask.rank is Rank.BATCH else replace(ask, rank=Rank.LIVE)


def priced(ask: Ask, prompts: Sequence[Prepared], places: int) -> Ask:
    """For so many answers to these."""
    owed = sum(max(one.n_tokens - one.cached, 1) for one in prompts)
    return replace(ask, prompt=owed, most=max(one.max_tokens for one in prompts) or ask.most, places=places)


def deadline(ask: Ask) -> float:
    """When who asked wants to wait no longer, in seconds on time.monotonic()."""
    return ask.arrival + ask.patience

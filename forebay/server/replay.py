"""An answer that was kept as a turn, told again."""

from __future__ import annotations

from collections.abc import Mapping

from starlette.responses import Response

from ..state.sessions import Turn
from . import sse
from .conversation import replayed
from .formats import Collected, Format


def replay(turn: Turn, form: Format, *, stream: bool, headers: Mapping[str, str]) -> Response:
    """``headers``: more of them."""
    delta = replayed(turn)
    if not stream:
        whole = Collected()
        whole.add(delta)
        return Response(form.whole([whole], delta.usage), media_type="application/json", headers=headers)
    frames = [form.opening(0), form.delta(0, delta), form.finish(0, turn.finish or "length")]
    body = b"".join([*frames, form.ending(delta.usage)])
    own = {name.decode(): value.decode() for name, value in sse.HEADERS}
    return Response(body, headers={**own, **headers})

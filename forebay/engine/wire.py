"""The wall between front and engine: one msgpack message each way per step, length-prefixed, over a local socket.

front -> engine: Submit, Cancel, Purge. engine -> front: Hello (once, when warm), Frame (each step, and twice a second
when idle: the heartbeat), Failed (it cannot start). A closed socket ends the engine.
"""

from __future__ import annotations

import struct

import msgspec

from .sequence import Emit, GenSpec

#: A message longer than this is a broken stream, not a message.
MAX_MESSAGE = 64 * 2**20

_LENGTH = struct.Struct("<I")


class Submit(msgspec.Struct, frozen=True, array_like=True, tag=1):
    spec: GenSpec


class Cancel(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """``tokens``: so many of prompt and answer count; None: all."""

    id: int
    tokens: int | None = None


class Purge(msgspec.Struct, frozen=True, array_like=True, tag=6):
    """Keep nothing that only this sequence of tokens has, in any tier; but its first ``spare`` pages."""

    salt: str
    ids: list[int]
    public: int = 0
    spare: int = 0


class Hello(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """The engine is warm. ``summary`` maps a label to a human line; ``max_context`` is what the pool can hold;
    ``slowest`` is the longest step of the warm-up, in seconds."""

    n_pages: int
    page_size: int
    max_context: int
    vocab_size: int
    summary: dict[str, str]
    slowest: float


class Frame(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """News of one step. ``received`` counts all Submits ever seen, so that the front knows what is in transit;
    the other numbers are those after the step; counters are cumulative. ``step_tokens`` 0: a heartbeat. ``owed``:
    prompt tokens that are to be computed yet. ``pace``: base, decode, prefill, chunk of contract.Pace, or nothing."""

    emits: list[Emit]
    received: int
    running: int
    waiting: int
    credits: int
    pages: dict[str, int]
    prefix_queries: int
    prefix_hits: int
    preemptions: int
    steps: int
    step_tokens: int
    tiers: dict[str, int]
    owed: int = 0
    pace: tuple[float, float, float, int] | None = None


class Failed(msgspec.Struct, frozen=True, array_like=True, tag=5):
    """The engine cannot start. ``unsupported``: the model or a setting is at fault, trying again is no use."""

    detail: str
    unsupported: bool


ToEngine = Submit | Cancel | Purge
ToFront = Hello | Frame | Failed

_encode = msgspec.msgpack.Encoder().encode
_decode_to_engine = msgspec.msgpack.Decoder(ToEngine)
_decode_to_front = msgspec.msgpack.Decoder(ToFront)


def pack(message: ToEngine | ToFront) -> bytes:
    """The message with its length before it."""
    body = _encode(message)
    return _LENGTH.pack(len(body)) + body


class Unpacker:
    """Cuts a byte stream into message bodies. Raises ValueError on a length that cannot be."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        self._buffer += data
        bodies = []
        at = 0
        while len(self._buffer) - at >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._buffer, at)
            if length > MAX_MESSAGE:
                raise ValueError(f"a message of {length} bytes")
            if len(self._buffer) - at - _LENGTH.size < length:
                break
            at += _LENGTH.size
            bodies.append(bytes(self._buffer[at : at + length]))
            at += length
        del self._buffer[:at]
        return bodies


def to_engine(body: bytes) -> ToEngine:
    message: ToEngine = _decode_to_engine.decode(body)
    return message


def to_front(body: bytes) -> ToFront:
    message: ToFront = _decode_to_front.decode(body)
    return message

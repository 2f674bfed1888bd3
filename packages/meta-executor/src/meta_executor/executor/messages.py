"""Frames between the ranks of one instance: new work, schedules with activations, results, answers.

New work is a list of items in the order that rank 0 decided; that order is authoritative (it numbers the incarnations). It
may overtake schedules on its way down the pipeline, never the other way round: a rank forwards new work at once and a
schedule only with its activations. So a rank has heard of every request that a schedule names.

Everything here is msgspec msgpack with token ids and block ids as packed little-endian arrays; sizes are bounded by
the reader (:data:`FRAME_BYTES_MAX`).
"""

from __future__ import annotations

from enum import IntEnum
from typing import TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from meta_executor.executor.ownership import Outcome
from meta_executor.executor.request import Answers, Request, decoder, encoder
from meta_executor.wire import TokenLogprobs

#: Largest header of one frame (bytes); activations travel beside it.
FRAME_BYTES_MAX = 64 * 1024 * 1024


class FrameKind(IntEnum):
    """What a frame carries."""

    WORK = 1
    SCHEDULE = 2
    RESULT = 3
    ANSWERS = 4
    STATUS = 5


class FrameError(Exception):
    """A rank sent what is not a frame: our bug or a foreign process. The rank stops."""


class _Frame(msgspec.Struct, frozen=True, array_like=True):
    """Base: positional on the wire, immutable."""


# -- new work ---------------------------------------------------------------------------------------------------------


class Admit(_Frame, frozen=True, array_like=True, tag=1):
    """A request enters: everything that rank 0 decided about it. ``target_rank``: who generates it; -1: every rank."""

    request: Request
    incarnation: int
    target_rank: int


class Stop(_Frame, frozen=True, array_like=True, tag=2):
    """End a request early, or settle that no peer will fetch it.

    ``last_step_id``: the last schedule that names
    the request; a rank is quiescent only after that step has retired on it. -1: no schedule names it.
    """

    request_id: int
    outcome: Outcome
    reason: str
    error_code: str
    last_step_id: int


class Peer(_Frame, frozen=True, array_like=True, tag=3):
    """A peer instance whose ranks will write to us: how they lay their KV out and where they listen.

    ``name`` is "instance_id/generation". ``layout`` is an encoded ``kv_bounce_planner.InstanceLayout``. ``processes``: per
    rank "host/pid/start", by which a host knows whether that very process still runs. ``replaces``: the name of the earlier
    lifetime behind the same address, which is gone for good; "" for none.
    """

    name: str
    layout: bytes
    control_addresses: tuple[str, ...]
    processes: tuple[str, ...] = ()
    replaces: str = ""


class Drain(_Frame, frozen=True, array_like=True, tag=4):
    """No request after this item. ``last_incarnation``: the last that was admitted; 0 for none."""

    last_incarnation: int
    deadline_s: float


class Leave(_Frame, frozen=True, array_like=True, tag=5):
    """Everything is terminal everywhere, or the deadline of the drain has passed: write evidence and leave."""

    drained: bool


WorkItem: TypeAlias = Admit | Stop | Peer | Drain | Leave


# -- schedules and results --------------------------------------------------------------------------------------------


class Part(_Frame, frozen=True, array_like=True):
    """One sequence's part of a step.

    ``blocks`` is packed int64: the sequence's whole table, sent with its first part; later parts send none.
    ``shared_count``: leading blocks that came from the prefix cache.
    """

    request_id: int
    start: int
    count: int
    wants_token: bool
    first: bool
    blocks: bytes
    shared_count: int


class Schedule(_Frame, frozen=True, array_like=True):
    """One step as rank 0 planned it. Parts in order; ``first`` parts activate their request, in this order.

    ``failed``: an earlier stage could not compute it; it is retired without being computed. The activations travel
    beside this frame as float32 (tokens, hidden).
    """

    step_id: int
    parts: tuple[Part, ...]
    failed: str = ""


class Result(_Frame, frozen=True, array_like=True):
    """What the last stage made of a step: the tokens that were wanted, as (request_id, token), and what is told of those whose
    request asks for it, and of the tokens of prompts."""

    step_id: int
    tokens: tuple[tuple[int, int], ...]
    failed: str = ""
    logprobs: tuple[tuple[int, TokenLogprobs], ...] = ()
    prompt_logprobs: tuple[tuple[int, tuple[TokenLogprobs, ...]], ...] = ()


# -- the ranks' word to rank 0 ------------------------------------------------------------------------------------------


class Status(_Frame, frozen=True, array_like=True):
    """A rank's counters for rank 0, as JSON of :class:`meta_executor.wire.RankStatistics`, and what it asks of rank 0.

    ``given_up``: (request_id, why) that this rank's peer does not want any more: rank 0 stops them everywhere.
    ``drained``: nothing is open on this rank after a Drain.
    """

    rank: int
    statistics: bytes
    given_up: tuple[tuple[int, str], ...] = ()
    drained: bool = False


class Work(_Frame, frozen=True, array_like=True):
    """New work, in order."""

    items: tuple[WorkItem, ...]


FrameBody: TypeAlias = Work | Schedule | Result | Answers | Status

_TYPES: dict[FrameKind, type[FrameBody]] = {
    FrameKind.WORK: Work,
    FrameKind.SCHEDULE: Schedule,
    FrameKind.RESULT: Result,
    FrameKind.ANSWERS: Answers,
    FrameKind.STATUS: Status,
}
_KINDS: dict[type[FrameBody], FrameKind] = {body: kind for kind, body in _TYPES.items()}
_ENCODER = encoder()
_DECODERS: dict[FrameKind, msgspec.msgpack.Decoder[FrameBody]] = {kind: decoder(body) for kind, body in _TYPES.items()}


def encode_frame(body: FrameBody) -> tuple[FrameKind, bytes]:
    """Kind and bytes of a frame."""
    return _KINDS[type(body)], _ENCODER.encode(body)


def decode_frame(kind: int, data: bytes | bytearray | memoryview) -> FrameBody:
    """The frame.

    Raises:
        FrameError: Unknown kind, too long, or not that kind's fields.
    """
    if len(data) > FRAME_BYTES_MAX:
        raise FrameError(f"frame of {len(data)} bytes, at most {FRAME_BYTES_MAX}")
    try:
        return _DECODERS[FrameKind(kind)].decode(data)
    except (ValueError, msgspec.DecodeError) as error:
        raise FrameError(f"not a frame of kind {kind}: {error}") from error


def pack_blocks(block_ids: list[int]) -> bytes:
    """Block ids as packed int64."""
    return np.asarray(block_ids, dtype="<i8").tobytes()


def unpack_blocks(data: bytes) -> list[int]:
    """The opposite of :func:`pack_blocks`."""
    blocks: npt.NDArray[np.int64] = np.frombuffer(data, dtype="<i8")
    return [int(block) for block in blocks]

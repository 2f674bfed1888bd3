"""What ranks agree on at construction: checked on each rank first, then compared in one small collective.

A rank's own mistake is as public as a difference: a rank that raised by itself would leave the others in the constructor.
"""

from __future__ import annotations

import hashlib
import os
import platform
from collections.abc import Generator, Mapping, Sequence, Sized
from dataclasses import dataclass
from typing import Any

from comm_broadcast._block import TRAILER_BYTES
from comm_broadcast._codec import Codec
from comm_broadcast._comm import Comm, Run
from comm_broadcast._config import BroadcastConfig
from comm_broadcast._errors import BroadcastConfigError
from comm_broadcast._failure import Failure, shown
from comm_broadcast._frame import VERSION
from comm_broadcast._pool import Sink

_DIGEST_BYTES, _MACHINE_BYTES, _PLACE_BYTES = 16, 8, 16
_TEXT_START = _DIGEST_BYTES + 1 + _PLACE_BYTES
#: What each rank contributes (bytes): digest, whether it refuses, where it runs, text.
CONTRIBUTION_BYTES = 1024
_VALUE_CHARACTERS_MAX = 160
_COMM_METHODS = ("ibcast", "iallgather", "igather", "isend", "irecv", "test", "forget", "free")
#: What a codec has, and of which type; None: something that can be called.
_CODEC_PARTS = (("encode", None), ("decode", None), ("name", str), ("views", bool), ("head_only", bool))


@dataclass(frozen=True)
class ChosenCodec:
    """A codec as exchanges use it: what it says of itself is read once, where a mistake can still be told.

    Attributes:
        name, views, head_only: As the codec had them.
        digest: What stands for the name in a frame.
    """

    codec: Codec
    name: str
    views: bool
    head_only: bool
    digest: int


@dataclass(frozen=True)
class Settings:
    """What one rank was constructed with.

    Attributes:
        values: What has to be equal on all ranks.
        codec, sink: None if there is a problem.
        problem: This rank's own mistake.
        interrupt: What this rank raises in the end instead of telling its own mistake.
    """

    values: Mapping[str, object]
    codec: ChosenCodec | None = None
    sink: Sink | None = None
    problem: str | None = None
    interrupt: BaseException | None = None


def comm_problem(comm: Any) -> str | None:
    """Why this cannot be an adapter of one's own; without one there is nobody to agree with."""
    missing = [name for name in _COMM_METHODS if not callable(getattr(comm, name, None))]
    if isinstance(comm, type) or missing or not isinstance(getattr(comm, "posted", None), Sized):
        what = f"the class {comm.__name__}" if isinstance(comm, type) else type(comm).__name__
        return f"comm must be an adapter (MpiComm, TorchComm, testing.FakeComm), got {what}"
    if len(comm.posted):
        return (
            f"comm must be used by nobody else, got a {type(comm).__name__} with operations under way "
            "(of another Broadcaster, or of a constructor that was interrupted)"
        )
    return None


def choose(codec: Any) -> ChosenCodec:
    """Look at a codec; runs its code.

    Raises:
        BroadcastConfigError: It cannot be used; names what is wrong with it.
    """
    try:
        problem, parts = _codec_problem(codec)
    except Exception as error:
        raise BroadcastConfigError(f"codec: {Failure.of(error).cause}") from error
    if problem is not None:
        raise BroadcastConfigError(problem)
    return ChosenCodec(codec, parts["name"], parts["views"], parts["head_only"], digest(parts["name"]))


def _codec_problem(codec: Any) -> tuple[str | None, dict[str, Any]]:
    parts: dict[str, Any] = {}
    if isinstance(codec, type):
        return f"codec must be an instance, got the class {codec.__name__}", parts
    for name, kind in _CODEC_PARTS:
        value = parts[name] = getattr(codec, name, None)
        if not (callable(value) if kind is None else type(value) is kind):
            wanted = "a method" if kind is None else kind.__name__
            return f"codec must have {name} ({wanted}), got {type(codec).__name__} with {shown(value)}", parts
    problem = getattr(codec, "problem", None)
    text = problem() if callable(problem) else None
    return (None if text is None else f"codec: {text}"), parts


def timeout_problem(timeout_s: Any) -> str | None:
    """Why this cannot be a time to wait, naming the value."""
    if timeout_s is None:
        return None
    try:
        if isinstance(timeout_s, (int, float)) and not isinstance(timeout_s, bool) and float(timeout_s) >= 0:
            return None
    except OverflowError:
        pass
    return f"timeout_s must be a number of seconds of at least 0, or None, got {shown(timeout_s)}"


def check_waiting(wait: Any, timeout_s: Any) -> None:
    """Refuse what cannot be waited with.

    Raises:
        BroadcastConfigError: Names the value.
    """
    problem = timeout_problem(timeout_s)
    if problem is None and wait is not None and not callable(wait):
        problem = f"wait must be a function of the longest time to wait (s), or None, got {shown(wait)}"
    if problem is not None:
        raise BroadcastConfigError(problem)


def digest(text: str) -> int:
    """32 bits that stand for a text in a frame."""
    return int.from_bytes(hashlib.blake2b(text.encode("utf-8", "replace"), digest_size=4).digest(), "little")


def settings_of(size: int, root: Any, config: Any, codec: Any, timeout_s: Any) -> Settings:
    """What has to be equal on all ranks, and this rank's own mistake; whatever a foreign object raises is one, too."""
    values: dict[str, object] = {"version": VERSION, "size": size}
    try:
        problem = _problem(size, root, config) or timeout_problem(timeout_s)
        if problem is not None:
            return Settings(values, problem=problem)
        chosen = choose(codec)
        sink = Sink(config.chunk_bytes + TRAILER_BYTES)
    except BroadcastConfigError as error:
        return Settings(values, problem=str(error))
    except BaseException as error:  # noqa: BLE001 - told to everybody, as any other mistake; an interrupt is raised afterwards
        failure = Failure.of(error)
        return Settings(values, problem=failure.cause, interrupt=failure.error if failure.is_interrupt else None)
    values |= {
        "root": root, "frame_bytes": config.frame_bytes, "agree": config.agree, "ahead_max": config.ahead_max,
        "shared_slot_bytes": config.shared_slot_bytes, "codec": chosen.name,
    }  # fmt: skip
    return Settings(values, chosen, sink)


def _problem(size: int, root: Any, config: Any) -> str | None:
    if not isinstance(config, BroadcastConfig):
        return f"config must be a BroadcastConfig, got {shown(config)}"
    if not (type(root) is int and 0 <= root < size):
        return BroadcastConfig.problem(config) or f"root must be a rank of 0..{size - 1}, got {shown(root)}"
    return BroadcastConfig.problem(config)


def _place() -> bytes:
    """Which machine this is, and which process."""
    machine = hashlib.blake2b(platform.node().encode("utf-8", "replace"), digest_size=_MACHINE_BYTES).digest()
    return machine + os.getpid().to_bytes(_PLACE_BYTES - _MACHINE_BYTES, "little")


def is_crowded(places: Sequence[bytes], rank: int, cores: int) -> bool:
    """Whether a rank that polls may keep another from running: more ranks than cores, or threads of one process."""
    here = [place for place in places if place[:_MACHINE_BYTES] == places[rank][:_MACHINE_BYTES]]
    return len(here) > cores or here.count(places[rank]) > 1


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def compare(comm: Comm, settings: Settings) -> Generator[None, None, bool]:
    """Refuse together: if a rank has a problem, or the settings differ.

    The digest covers the settings whole; the texts, cut to what fits, are for the message.

    Returns:
        See :func:`is_crowded`.

    Raises:
        BroadcastConfigError: On every rank, naming field and ranks.
    """
    problem = settings.problem
    lines = [f"{key}={value}" for key, value in settings.values.items()]
    whole = hashlib.blake2b("\n".join(lines).encode("utf-8", "replace"), digest_size=_DIGEST_BYTES).digest()
    shown = "\n".join(
        line if len(line) <= _VALUE_CHARACTERS_MAX else line[:_VALUE_CHARACTERS_MAX] + "…" for line in lines
    )
    text = (shown if problem is None else problem).encode("utf-8", "replace")[: CONTRIBUTION_BYTES - _TEXT_START]
    send = bytearray((whole + bytes([problem is not None]) + _place() + text).ljust(CONTRIBUTION_BYTES, b"\0"))
    receive = bytearray(CONTRIBUTION_BYTES * comm.size)
    run = Run(comm)
    yield from run.wait(run.start(comm.iallgather, send, receive))
    comm.forget(0)
    parts = [bytes(receive[r * CONTRIBUTION_BYTES : (r + 1) * CONTRIBUTION_BYTES]) for r in range(comm.size)]
    texts = [part[_TEXT_START:].rstrip(b"\0").decode("utf-8", "replace") for part in parts]
    if settings.interrupt is not None:
        raise settings.interrupt
    refused = [f"rank {rank}: {texts[rank]}" for rank, part in enumerate(parts) if part[_DIGEST_BYTES]]
    if refused:
        raise BroadcastConfigError("; ".join(refused))
    for rank, part in enumerate(parts):
        if part[:_DIGEST_BYTES] != parts[0][:_DIGEST_BYTES]:
            for theirs, first in zip(texts[rank].splitlines(), texts[0].splitlines(), strict=False):
                if theirs != first:
                    raise BroadcastConfigError(f"ranks disagree: rank 0 has {first}, rank {rank} has {theirs}")
            raise BroadcastConfigError(
                f"ranks disagree: rank {rank} differs from rank 0 where the texts are cut, likely in the codec's types"
            )
    return is_crowded([part[_DIGEST_BYTES + 1 : _TEXT_START] for part in parts], comm.rank, _cores())

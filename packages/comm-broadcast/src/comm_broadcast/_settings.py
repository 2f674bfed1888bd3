"""What ranks agree on at construction: checked on each rank first, then compared in one small collective.

A rank's own mistake is as public as a difference: a rank that raised by itself would leave the others in the constructor.
"""

from __future__ import annotations

import hashlib
from collections.abc import Generator, Mapping
from typing import Any

from comm_broadcast._comm import Comm, Run
from comm_broadcast._config import BroadcastConfig
from comm_broadcast._errors import BroadcastConfigError
from comm_broadcast._failure import Failure
from comm_broadcast._frame import VERSION

_DIGEST_BYTES = 16
#: What each rank contributes (bytes): digest, whether it refuses, text.
CONTRIBUTION_BYTES = 1024
_VALUE_CHARACTERS_MAX = 160
_COMM_METHODS = ("ibcast", "iallgather", "isend", "irecv", "test", "forget", "free")


def comm_problem(comm: Any) -> str | None:
    """Why this cannot be an adapter; without one there is nobody to agree with."""
    missing = [name for name in _COMM_METHODS if not callable(getattr(comm, name, None))]
    if isinstance(comm, type) or missing:
        what = f"the class {comm.__name__}" if isinstance(comm, type) else type(comm).__name__
        return f"comm must be an adapter (MpiComm, TorchComm, testing.FakeComm), got {what}"
    return None


def codec_problem(codec: Any) -> str | None:
    """Why this cannot be a codec, naming what is wrong with it; runs its code, and says so if that fails."""
    try:
        if isinstance(codec, type):
            return f"codec must be an instance, got the class {codec.__name__}"
        for name, kind in (("encode", None), ("decode", None), ("name", str), ("views", bool), ("head_only", bool)):
            value = getattr(codec, name, None)
            if not (callable(value) if kind is None else type(value) is kind):
                wanted = "a method" if kind is None else kind.__name__
                return f"codec must have {name} ({wanted}), got {type(codec).__name__} with {value!r}"
        problem = getattr(codec, "problem", None)
        text = problem() if callable(problem) else None
    except Exception as error:  # noqa: BLE001 - told to everybody, as any other mistake
        return f"codec: {Failure.of(error).cause}"
    return None if text is None else f"codec: {text}"


def digest(text: str) -> int:
    """32 bits that stand for a text in a frame."""
    return int.from_bytes(hashlib.blake2b(text.encode("utf-8", "replace"), digest_size=4).digest(), "little")


def settings_of(size: int, root: Any, config: Any, codec: Any) -> tuple[dict[str, object], str | None]:
    """What has to be equal on all ranks, and this rank's own mistake, if there is one."""
    problem = (
        config.problem()
        if isinstance(config, BroadcastConfig)
        else f"config must be a BroadcastConfig, got {config!r:.200}"
    )
    if problem is None and not (type(root) is int and 0 <= root < size):
        problem = f"root must be a rank of 0..{size - 1}, got {root!r:.200}"
    problem = problem or codec_problem(codec)
    settings: dict[str, object] = {"version": VERSION, "size": size}
    if problem is None:
        settings |= {
            "root": root, "frame_bytes": config.frame_bytes, "agree": config.agree,
            "shared_slot_bytes": config.shared_slot_bytes, "codec": codec.name,
        }  # fmt: skip
    return settings, problem


def compare(comm: Comm, settings: Mapping[str, object], problem: str | None) -> Generator[None, None, None]:
    """Refuse together: if a rank has a problem, or the settings differ.

    The digest covers the settings whole; the texts, cut to what fits, are for the message.

    Raises:
        BroadcastConfigError: On every rank, naming field and ranks.
    """
    lines = [f"{key}={value}" for key, value in settings.items()]
    whole = hashlib.blake2b("\n".join(lines).encode("utf-8", "replace"), digest_size=_DIGEST_BYTES).digest()
    shown = "\n".join(
        line if len(line) <= _VALUE_CHARACTERS_MAX else line[:_VALUE_CHARACTERS_MAX] + "…" for line in lines
    )
    text = (shown if problem is None else problem).encode("utf-8", "replace")[: CONTRIBUTION_BYTES - _DIGEST_BYTES - 1]
    send = bytearray((whole + bytes([problem is not None]) + text).ljust(CONTRIBUTION_BYTES, b"\0"))
    receive = bytearray(CONTRIBUTION_BYTES * comm.size)
    run = Run(comm)
    yield from run.wait(run.start(comm.iallgather, send, receive))
    comm.forget()
    parts = [bytes(receive[r * CONTRIBUTION_BYTES : (r + 1) * CONTRIBUTION_BYTES]) for r in range(comm.size)]
    texts = [part[_DIGEST_BYTES + 1 :].rstrip(b"\0").decode("utf-8", "replace") for part in parts]
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

"""The comparison of settings: one small collective, in which a rank's own mistake is as public as a difference."""

from __future__ import annotations

import hashlib
from collections.abc import Generator, Mapping

from comm_broadcast._comm import Comm, Request
from comm_broadcast._errors import BroadcastConfigError

_DIGEST_BYTES = 16
#: What each rank contributes (bytes): digest, whether it refuses, text.
CONTRIBUTION_BYTES = 1024
_VALUE_CHARACTERS_MAX = 160


def compare(comm: Comm, settings: Mapping[str, object], problem: str | None) -> Generator[Request, None, None]:
    """Refuse together: if a rank has a problem, or the settings differ.

    The digest covers the settings whole; the texts, cut to what fits, are for the message.

    Raises:
        BroadcastConfigError: On every rank, naming field and ranks.
    """
    lines = [f"{key}={value}" for key, value in settings.items()]
    digest = hashlib.blake2b("\n".join(lines).encode(), digest_size=_DIGEST_BYTES).digest()
    shown = "\n".join(
        line if len(line) <= _VALUE_CHARACTERS_MAX else line[:_VALUE_CHARACTERS_MAX] + "…" for line in lines
    )
    text = (shown if problem is None else problem).encode("utf-8", "replace")[: CONTRIBUTION_BYTES - _DIGEST_BYTES - 1]
    send = bytearray((digest + bytes([problem is not None]) + text).ljust(CONTRIBUTION_BYTES, b"\0"))
    receive = bytearray(CONTRIBUTION_BYTES * comm.size)
    yield comm.iallgather(send, receive)
    parts = [bytes(receive[r * CONTRIBUTION_BYTES : (r + 1) * CONTRIBUTION_BYTES]) for r in range(comm.size)]
    texts = [part[_DIGEST_BYTES + 1 :].rstrip(b"\0").decode("utf-8", "replace") for part in parts]
    for rank, part in enumerate(parts):
        if part[_DIGEST_BYTES]:
            raise BroadcastConfigError(f"rank {rank}: {texts[rank]}")
    for rank, part in enumerate(parts):
        if part[:_DIGEST_BYTES] != parts[0][:_DIGEST_BYTES]:
            for theirs, first in zip(texts[rank].splitlines(), texts[0].splitlines(), strict=False):
                if theirs != first:
                    raise BroadcastConfigError(f"ranks disagree: rank 0 has {first}, rank {rank} has {theirs}")
            raise BroadcastConfigError(
                f"ranks disagree: rank {rank} differs from rank 0 where the texts are cut, likely in the codec's types"
            )

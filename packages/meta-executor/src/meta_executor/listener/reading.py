"""A body: read within its bound, looked at, decoded where it does not hold up others."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from starlette.requests import Request

from meta_executor.listener.protocol import BODY_DECODED
from meta_executor.listener.structure import StructureError, look, without_blanks

_Decoded = TypeVar("_Decoded")
#: Bodies up to this size are decoded where they are read (bytes): a millisecond at most, whatever they hold.
INLINE_BYTES_MAX = 32 * 1024
#: Deepest nesting of a body (count); nothing that is understood needs five levels.
DEPTH_MAX = 32
#: White space outside strings of more bytes is taken out before decoding.
_BLANKS_MAX = 16 * 1024


class BodyTooLarge(Exception):
    """A body is larger than its bound; the rest of it was not read."""


async def read_body(request: Request, bytes_max: int) -> bytes:
    """Read a request's body.

    Raises:
        BodyTooLarge: It is larger.
        ClientDisconnect: The client left, or was refused, before it was whole.
    """
    parts, size = [], 0
    async for part in request.stream():
        size += len(part)
        if size > bytes_max:
            raise BodyTooLarge(f"the body is larger than {bytes_max} bytes")
        parts.append(part)
    return b"".join(parts)


def body_decoded(request: Request) -> None:
    """Nothing of the request's body is kept any more: others may send as many bytes."""
    done = request.scope.get("state", {}).get(BODY_DECODED)
    if done is not None:
        done()


class BodyDecoder:
    """Decodes bodies of one listener; large ones one after the other in a thread of their own.

    A decoder holds the interpreter's lock, also in a thread. So what it is given was looked at first: a text that is nested
    deep or has many members is refused, and one that is mostly white space is made short.
    """

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="bodies")

    async def decoded(
        self, body: bytes, decode: Callable[[bytes], _Decoded], *, elements_max: Callable[[], int]
    ) -> _Decoded:
        """What ``decode`` makes of a body.

        Args:
            body: JSON.
            decode: Reads it.
            elements_max: Members of arrays and objects that a body may have (count).

        Raises:
            StructureError: It is too deep, or has too many members.
            Exception: What ``decode`` raises.
        """
        if len(body) <= INLINE_BYTES_MAX:
            return decode(body)
        most = elements_max()
        return await asyncio.get_running_loop().run_in_executor(self._pool, _looked_at, body, decode, most)

    def close(self) -> None:
        """End the thread. Idempotent."""
        self._pool.shutdown(wait=False, cancel_futures=True)


def _looked_at(body: bytes, decode: Callable[[bytes], _Decoded], elements_max: int) -> _Decoded:
    found = look(body, depth_max=DEPTH_MAX, elements_max=elements_max)
    return decode(without_blanks(body) if found.blanks > _BLANKS_MAX else body)


__all__ = ["BodyDecoder", "BodyTooLarge", "StructureError", "body_decoded", "read_body"]

"""What every request has, whoever answers it: a name, and a line in the access log.

The client's own ``x-request-id`` is kept where it is short and printable; else a name is made. It goes back with every answer,
errors and refusals included, and is in every line that is logged of the request.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from starlette.types import ASGIApp, Receive, Scope, Send

from meta_executor.listener.access import CALLER

ACCESS_LOGGER = "meta_executor.front.access"
_LOG = logging.getLogger(ACCESS_LOGGER)
#: Under this key a request's ``scope["state"]`` has its name.
REQUEST_ID = "request_id"
_HEADER = b"x-request-id"
_LENGTH_MAX = 128
#: What of a path is logged (bytes).
_PATH_MAX = 200
_VISIBLE = frozenset(range(0x21, 0x7F))


def name_of(headers: list[tuple[bytes, bytes]]) -> str:
    """The client's name for its request, or a made one."""
    for header, value in headers:
        if header == _HEADER and 1 <= len(value) <= _LENGTH_MAX and _VISIBLE.issuperset(value):
            return value.decode("ascii")
    return secrets.token_hex(16)


class Envelope:
    """ASGI middleware; see the module.

    Args:
        app: What answers.
        access_log: Write a line for each request.
        clock: Monotonic time (s).
    """

    def __init__(self, app: ASGIApp, *, access_log: bool, clock: Callable[[], float] = time.monotonic) -> None:
        self._app = app
        self._access_log = access_log
        self._clock = clock

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        name = name_of(scope["headers"])
        state = scope.setdefault("state", {})
        state[REQUEST_ID] = name
        status = 0

        def sending(message: MutableMapping[str, Any]) -> Awaitable[None]:
            # No coroutine of its own: a stream comes through here with every token.
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", ()), (_HEADER, name.encode("ascii"))]
            return send(message)

        began_s = self._clock()
        try:
            await self._app(scope, receive, sending)
        finally:
            if self._access_log:
                self._log(scope, status, self._clock() - began_s, name)

    @staticmethod
    def _log(scope: Scope, status: int, took_s: float, name: str) -> None:
        caller = scope["state"].get(CALLER)
        path = (scope.get("raw_path") or scope["path"].encode())[:_PATH_MAX]
        _LOG.info(
            "%s %s %s %s %.1f ms %s",
            "-" if caller is None else caller.account,
            scope["method"],
            path.decode("latin-1").encode("unicode_escape").decode("ascii"),
            status or "none",
            took_s * 1000,
            name,
        )

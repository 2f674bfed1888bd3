"""What happens now, for a person who watches: one look a second at the front and its instances, told to everybody who watches.

Nobody watches: nothing is asked. However many do, the instances are asked once. A watcher that reads slowly misses looks and
delays nobody. The page that shows it is ``live.html``, without anything from elsewhere.
"""

from __future__ import annotations

import asyncio
import base64
import functools
import hashlib
import logging
from collections.abc import Awaitable, Callable
from importlib import resources
from typing import Any

import msgspec
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from meta_executor import wire
from meta_executor.front.legs import LegClient, LegError
from meta_executor.front.servers import Servers

_LOG = logging.getLogger("meta_executor.front")
#: Between two looks (s).
LOOK_EVERY_S = 1.0
#: Who may watch at once (count).
WATCHERS_MAX = 32


class TooManyWatch(Exception):
    """As many watch as may."""


class Live:
    """See the module.

    Args:
        look: Everything that is known now, as what becomes JSON.
        every_s: Between two looks (s).
    """

    def __init__(self, look: Callable[[], Awaitable[dict[str, Any]]], *, every_s: float = LOOK_EVERY_S) -> None:
        self._look = look
        self._every_s = every_s
        self._looking: asyncio.Task[None] | None = None
        self._seen = asyncio.Condition()
        self._newest = b""
        self._number = 0
        #: Looks up to this one were for those who watched before.
        self._stale = 0
        self._watchers = 0
        self._closed = False

    def watch(self) -> Watch:
        """Looks as server-sent events, until the watcher leaves or this is closed.

        Raises:
            TooManyWatch: At once, before anything is given.
        """
        if self._watchers >= WATCHERS_MAX:
            raise TooManyWatch
        self._watchers += 1
        return Watch(self)

    @property
    def watchers(self) -> int:
        """Who watch now (count)."""
        return self._watchers

    async def close(self) -> None:
        """End every watch. Idempotent."""
        self._closed = True
        looking, self._looking = self._looking, None
        if looking is not None:
            looking.cancel()
            await asyncio.wait((looking,))
        async with self._seen:
            self._seen.notify_all()

    async def after(self, number: int) -> tuple[int, bytes] | None:
        """The newest look that came after this one; None when there will be none."""
        if self._closed:
            return None
        if self._looking is None:
            self._stale = self._number
            self._looking = asyncio.create_task(self._go_on(), name="live")
        looking = self._looking
        async with self._seen:
            await self._seen.wait_for(lambda: self._looking is not looking or self._number > max(number, self._stale))
            return (self._number, self._newest) if self._looking is looking else None

    def left(self) -> None:
        """A watcher has gone; the last one ends the looking."""
        self._watchers -= 1
        if not self._watchers and self._looking is not None:
            self._looking.cancel()
            self._looking = None

    async def _go_on(self) -> None:
        try:
            while True:
                event = b"data: " + msgspec.json.encode(await self._look()) + b"\n\n"
                async with self._seen:
                    self._newest, self._number = event, self._number + 1
                    self._seen.notify_all()
                await asyncio.sleep(self._every_s)
        except Exception:  # noqa: BLE001 - whatever it was: nobody may wait for a look that never comes
            _LOG.exception("a look at the service failed: those who watch are sent away")
            async with self._seen:
                # One that was ended, and fails then, may have a successor.
                if self._looking is asyncio.current_task():
                    self._looking = None
                self._seen.notify_all()


class Watch:
    """One watcher; closed when it leaves, also before it has begun."""

    def __init__(self, live: Live) -> None:
        self._live = live
        self._number = 0
        self._left = False

    def __aiter__(self) -> Watch:
        return self

    async def __anext__(self) -> bytes:
        found = None if self._left else await self._live.after(self._number)
        if found is None:
            await self.aclose()
            raise StopAsyncIteration
        self._number, event = found
        return event

    async def aclose(self) -> None:
        """Idempotent."""
        if not self._left:
            self._left = True
            self._live.left()


class WatchResponse(StreamingResponse):
    """Tells what a watcher sees; the watch ends with it, also when it was never begun."""

    def __init__(self, watch: Watch) -> None:
        super().__init__(watch, media_type="text/event-stream", headers={"cache-control": "no-store"})
        self._watch = watch

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve it to its end."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self._watch.aclose()


async def looked_at(servers: Servers, legs: LegClient) -> list[dict[str, Any]]:
    """Each instance with what it says of itself, or why it cannot be asked."""
    known = [(server, servers.condition(server.url)) for server in servers]
    told = await asyncio.gather(*(_statistics(legs, server.url) for server, _ in known))
    return [
        {
            "owner_id": server.owner_id,
            "role": server.role,
            "status": condition.status,
            "generation": condition.generation,
            "legs": condition.legs,
            "statistics": statistics,
            "why": why,
        }
        for (server, condition), (statistics, why) in zip(known, told, strict=True)
    ]


async def _statistics(legs: LegClient, server: str) -> tuple[wire.InstanceStatistics | None, str]:
    try:
        return await legs.statistics(server), ""
    except LegError as error:
        return None, error.message


@functools.cache
def page() -> tuple[bytes, str]:
    """The page, and the policy under which a browser runs nothing but what is in it."""
    text = resources.files("meta_executor.front").joinpath("live.html").read_text("utf-8")
    script = text.partition("<script>")[2].partition("</script>")[0]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = (
        f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; connect-src 'self'; img-src data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return text.encode(), policy

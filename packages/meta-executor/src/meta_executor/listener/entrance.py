"""A connection on its way in: counted and bounded from the moment when it was accepted.

Connections are accepted one by one, each when there is a place to be refused in (:mod:`~meta_executor.listener.lingering`):
it is let in, or told why not. Until there is such a place they stay in the kernel's queue, where they cost no descriptor. A
server of asyncio accepts whatever comes and, where the process has no descriptor left, closes it without a word.

A server of asyncio also tells its protocol of a TLS connection after the handshake. A client that connects and says nothing
would until then hold a descriptor that nobody counts, and a few thousand of them would take all that the process may have.
Here each handshake has its place in the ledger; one without a place is closed at once: there is no way yet to tell its client
why.
"""

from __future__ import annotations

import asyncio
import errno
import functools
import logging
import socket
import ssl
from collections.abc import Callable

from meta_executor.listener.bounds import Ledger, client_of

_LOG = logging.getLogger("meta_executor.listener")
#: Where no connection can be accepted (no descriptor, no memory) it is tried again after so long (s).
_EXHAUSTED_S = 1.0


class Entrance:
    """Accepts at one listener; in the place of an :class:`asyncio.Server`. Construction, inside a running loop, begins.

    Args:
        listener: Listens, and does not block.
        context: The server's certificate; None: no TLS.
        make: Makes a connection's protocol.
        ledger: Of this listener.
        handshake_s: A handshake must be over within this time (s).
    """

    def __init__(
        self,
        listener: socket.socket,
        context: ssl.SSLContext | None,
        make: Callable[[], asyncio.Protocol],
        ledger: Ledger,
        *,
        handshake_s: float,
    ) -> None:
        self._given = listener
        # What is waited at is closed when the waiting has ended, a moment after ``close``.
        self._listener = listener.dup()
        self._context = context
        self._make = make
        self._ledger = ledger
        self._handshake_s = handshake_s
        self._shaking: set[asyncio.Task[None]] = set()
        self._accepting = asyncio.create_task(self._accept(), name="entrance")
        self._accepting.add_done_callback(lambda _: self._listener.close())

    def close(self) -> None:
        """Accept no more, close the listener, and end handshakes that are under way. Idempotent."""
        self._given.close()
        self._accepting.cancel()
        for task in self._shaking:
            task.cancel()

    async def wait_closed(self) -> None:
        """Wait until no handshake is left; after :meth:`close`."""
        await asyncio.wait((self._accepting, *self._shaking))

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await self._ledger.lingering.place()
            try:
                connection, address = await loop.sock_accept(self._listener)
            except OSError as error:
                if error.errno != errno.ECONNABORTED:
                    self._ledger.refused["not_accepted"] += 1
                    await asyncio.sleep(_EXHAUSTED_S)
                continue
            if self._context is None:
                await self._let_in(connection)
            else:
                self._begin_handshake(connection, client_of(address[0]), self._context)

    async def _let_in(self, connection: socket.socket) -> None:
        """The protocol has it when this returns, and has refused it where it is one too many."""
        try:
            await asyncio.get_running_loop().connect_accepted_socket(self._make, connection)
        except OSError:
            # It is gone already.
            connection.close()
        except Exception:  # noqa: BLE001 - logged: what is wrong with one connection must not keep out all others
            connection.close()
            _LOG.exception("a connection could not be let in")
        except BaseException:
            connection.close()
            raise

    def _begin_handshake(self, connection: socket.socket, client: str, context: ssl.SSLContext) -> None:
        if not self._ledger.shake(client):
            connection.close()
            return
        task = asyncio.create_task(self._shake(connection, context))
        self._shaking.add(task)
        task.add_done_callback(functools.partial(self._shaken, connection, client))

    async def _shake(self, connection: socket.socket, context: ssl.SSLContext) -> None:
        await asyncio.get_running_loop().connect_accepted_socket(
            self._make, connection, ssl=context, ssl_handshake_timeout=self._handshake_s
        )

    def _shaken(self, connection: socket.socket, client: str, task: asyncio.Task[None]) -> None:
        self._shaking.discard(task)
        self._ledger.shaken(client)
        error = None if task.cancelled() else task.exception()
        if not task.cancelled() and error is None:
            return  # it is its protocol's from here on
        connection.close()
        if isinstance(error, OSError):
            # No TLS, an old one, too slow, or gone.
            self._ledger.refused["tls_handshake"] += 1
        elif error is not None:
            _LOG.error("a TLS handshake failed here", exc_info=error)

"""Sockets, TLS and uvicorn's settings: how both listeners are opened."""

from __future__ import annotations

import contextlib
import functools
import ipaddress
import logging
import socket
import ssl
from collections.abc import Iterator
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from meta_executor.addresses import resolved
from meta_executor.config import HttpConfig
from meta_executor.listener.bounds import Ledger, Worded
from meta_executor.listener.entrance import Entrance
from meta_executor.listener.protocol import BoundedProtocol

#: Connections that wait to be accepted (count); the system may have a lower bound of its own (``net.core.somaxconn``).
BACKLOG = 2048
#: A connection whose client says nothing is accepted after about so long (s).
DEFER_S = 1


def listen(hostname: str, port: int) -> socket.socket:
    """Listen at one address and nowhere else.

    Args:
        hostname: A name (its first IPv4 address, else its first), an IPv4 or IPv6 address; "" for every IPv4 address,
            ``::`` for every address.
        port: 0 for any.

    Raises:
        OSError: The address is not one of this machine, or is taken.
    """
    family, address = resolved(hostname, port)
    # With the protocol named asyncio switches Nagle's algorithm off; otherwise each answer's body waits 40 ms for the
    # acknowledgement of its head.
    listener = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_CLOEXEC, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        # Who has said nothing yet waits in the kernel, where he costs no descriptor; after so long he is accepted all the same.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_DEFER_ACCEPT, DEFER_S)
        listener.bind(address)
        listener.listen(BACKLOG)
        listener.setblocking(False)
    except BaseException:
        listener.close()
        raise
    return listener


def url_of(listener: socket.socket, *, tls: bool = False) -> str:
    """Where processes of this machine reach a listener."""
    host, port = listener.getsockname()[:2]
    address = ipaddress.ip_address(host.split("%")[0])
    if address.is_unspecified:
        host = "::1" if address.version == 6 else "127.0.0.1"
    return f"{'https' if tls else 'http'}://{f'[{host}]' if ':' in host else host}:{port}"


def server_of(
    app: ASGIApp,
    bounds: HttpConfig,
    ledger: Ledger,
    *,
    body_bytes_max: int,
    worded: Worded,
    loop: str = "asyncio",
    tls: ssl.SSLContext | None = None,
    close_s: int = 3,
) -> uvicorn.Server:
    """A server whose connections are bounded; its ``serve(sockets=[...])`` runs it.

    Args:
        app: What is served.
        bounds, ledger, body_bytes_max, worded: See :class:`~meta_executor.listener.protocol.BoundedProtocol`.
        loop: ``asyncio`` or ``uvloop``.
        tls: Speak TLS with it.
        close_s: After the end connections may take so long to close (s).
    """
    protocol: Any = functools.partial(
        BoundedProtocol, bounds=bounds, body_bytes_max=body_bytes_max, ledger=ledger, worded=worded
    )
    # One line per malformed request would let anybody fill the disk; they are counted instead.
    logging.getLogger("uvicorn.error").setLevel(logging.ERROR)
    config = uvicorn.Config(
        app,
        loop=loop,
        http=protocol,
        ws="none",
        log_config=None,
        access_log=False,
        lifespan="off",
        timeout_keep_alive=bounds.idle_timeout_s,  # type: ignore[arg-type]
        timeout_graceful_shutdown=close_s,
        backlog=BACKLOG,
        server_header=False,
        # An address that a client wrote into a header is not whom we count.
        proxy_headers=False,
        ssl_context_factory=None if tls is None else lambda *_: tls,
    )
    return _Server(config, ledger, bounds.header_timeout_s)


class _Server(uvicorn.Server):
    """Leaves signals to its process, and lets connections in through :class:`Entrance`."""

    def __init__(self, config: uvicorn.Config, ledger: Ledger, handshake_s: float) -> None:
        super().__init__(config)
        self._ledger = ledger
        self._handshake_s = handshake_s

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        protocol: Any = self.config.http_protocol_class
        make = functools.partial(protocol, config=self.config, server_state=self.server_state, app_state={})
        entrances = [
            Entrance(one, self.config.ssl, make, self._ledger, handshake_s=self._handshake_s) for one in sockets or ()
        ]
        self.servers = entrances  # type: ignore[assignment]
        self.started = True

"""Who may have how much of a listener: pure accounts, and the refusals that follow from them.

A *client* is an address: an IPv4 address, or the /64 network of an IPv6 address (one host can take any address of it). What
counts is what really arrived: a client that announces a large body and does not send it holds nothing that others need.
"""

from __future__ import annotations

import ipaddress
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from meta_executor.config import HttpConfig
from meta_executor.listener.lingering import Lingering

#: An error as a listener words it: status, code, message to body.
Worded = Callable[[int, str, str], bytes]


@dataclass(frozen=True)
class Refusal:
    """What a client is told instead of an answer; its connection ends with it.

    Attributes:
        status: HTTP status.
        code: A word for programs; also the name under which it is counted.
        message: For a person.
        retry_after_s: When it may try again (s); None: trying again does not help.
    """

    status: int
    code: str
    message: str
    retry_after_s: int | None = None


def client_of(host: str | None) -> str:
    """The client that an address belongs to; "" for a socket without one."""
    try:
        address = ipaddress.ip_address((host or "").split("%")[0])
    except ValueError:
        return host or ""
    if isinstance(address, ipaddress.IPv6Address):
        if address.ipv4_mapped is not None:
            return str(address.ipv4_mapped)
        return str(ipaddress.ip_network((address, 64), strict=False))
    return str(address)


def lingering_max(config: HttpConfig) -> int:
    """Refused connections that may still read why, beside those that were let in (count)."""
    return max(1, min(256, config.connections_max // 4))


class Ledger:
    """Accounts of one listener.

    Args:
        config: The bounds.
    """

    def __init__(self, config: HttpConfig) -> None:
        self._config = config
        self._connections: Counter[str] = Counter()
        self._reading_bytes: Counter[str] = Counter()
        #: Connections that are open (count).
        self.connections = 0
        #: Bytes of bodies that nobody has decoded yet.
        self.reading_bytes = 0
        self._handshakes: Counter[str] = Counter()
        #: TLS handshakes that have begun and not ended (count).
        self.handshakes = 0
        #: Connections that were refused and may still read why.
        self.lingering = Lingering(lingering_max(config))
        #: Refusals by code (count).
        self.refused: Counter[str] = Counter()

    def connect(self, client: str) -> Refusal | None:
        """A connection has come. It counts until :meth:`disconnect`, unless it is refused."""
        most = self._config.connections_max
        if self.connections >= most:
            return self.refuse(Refusal(503, "too_many_connections", f"{most} connections are open", 1))
        most = self._config.connections_per_client_max
        if self._connections[client] >= most:
            return self.refuse(Refusal(429, "too_many_connections", f"{most} connections of this client are open", 1))
        self.connections += 1
        self._connections[client] += 1
        return None

    def disconnect(self, client: str) -> None:
        """A connection that was not refused has ended."""
        self.connections -= 1
        _less(self._connections, client, 1)

    def shake(self, client: str) -> bool:
        """A TLS handshake may begin, and counts until :meth:`shaken`; False: it may not, and does not count.

        As many may be under way as connections may be open, in all and per client: who stops in the middle of a handshake holds
        as much as who is connected, and nobody can tell him anything yet.
        """
        most = self._config.connections_max, self._config.connections_per_client_max
        if self.handshakes >= most[0] or self._handshakes[client] >= most[1]:
            self.refused["too_many_handshakes"] += 1
            return False
        self.handshakes += 1
        self._handshakes[client] += 1
        return True

    def shaken(self, client: str) -> None:
        """A TLS handshake has ended, well or not."""
        self.handshakes -= 1
        _less(self._handshakes, client, 1)

    def read(self, client: str, count: int) -> Refusal | None:
        """So many bytes of a body have come; they count until :meth:`release`, also where they are refused."""
        self.reading_bytes += count
        self._reading_bytes[client] += count
        if self.reading_bytes > self._config.reading_bytes_max:
            return self.refuse(Refusal(503, "too_many_bytes", "too many bytes of other requests are being read", 1))
        if self._reading_bytes[client] > self._config.reading_bytes_per_client_max:
            return self.refuse(
                Refusal(429, "too_many_bytes", "too many bytes of this client's requests are being read", 1)
            )
        return None

    def release(self, client: str, count: int) -> None:
        """So many bytes of a body are needed no more."""
        if count:
            self.reading_bytes -= count
            _less(self._reading_bytes, client, count)

    def refuse(self, refusal: Refusal) -> Refusal:
        """Count a refusal."""
        self.refused[refusal.code] += 1
        return refusal


def _less(counter: Counter[str], client: str, count: int) -> None:
    """Clients that have nothing any more are forgotten: there are more addresses than memory."""
    counter[client] -= count
    if not counter[client]:
        del counter[client]

"""Where an instance's sockets listen, and how others are told of them: one rule for the front's stream and KV control.

An instance at the loopback, or at every address without saying at which one it is reached, has its peers on its own host:
its sockets are in the run folder. Any other listens over TCP at its ``hostname`` and at nothing else, and is announced by its
``advertised_host``, which is the ``hostname`` unless something else is configured.
"""

from __future__ import annotations

import ipaddress
import re
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_LOOPBACK_NAMES = ("127.0.0.1", "localhost", "::1")
_NAME = re.compile(r"[A-Za-z0-9_.-]+")


def is_loopback_name(hostname: str) -> bool:
    """Whether peers of an instance that listens there are on its own host, in its own account."""
    return hostname in _LOOPBACK_NAMES


def is_wildcard(hostname: str) -> bool:
    """Whether it means every address, however it is written; no name is looked up."""
    if not hostname:
        return True
    try:
        return not any(socket.inet_aton(hostname))
    except OSError:
        pass
    try:
        address = ipaddress.ip_address(hostname.partition("%")[0])
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return address.is_unspecified or (mapped is not None and mapped.is_unspecified)


def is_host(text: str) -> bool:
    """Whether it can stand for a host in an address: a name, or an IPv4 or IPv6 address without port and brackets."""
    if _NAME.fullmatch(text):
        return True
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


def resolved(hostname: str, port: int) -> tuple[socket.AddressFamily, Any]:
    """The one address at which a listener binds: of a name its first IPv4 address, else its first; of "" every IPv4 address.

    Raises:
        OSError: The name has none.
    """
    if not hostname:
        return socket.AF_INET, ("", port)
    found = socket.getaddrinfo(hostname, port, type=socket.SOCK_STREAM)
    family, _, _, _, address = min(found, key=lambda one: one[0] != socket.AF_INET)
    return family, address


@dataclass(frozen=True)
class Place:
    """One socket: where it listens, and how it is announced."""

    #: What its server is given; over TCP the port is 0.
    address: str
    #: The host in the announced address; "": it is announced as it is bound.
    host: str = ""

    def announced(self, bound: str) -> str:
        """What others are told.

        Args:
            bound: The address that the server got.
        """
        return f"tcp://{_bracketed(self.host)}:{bound.rpartition(':')[2]}" if self.host else bound


def place_of(hostname: str, advertised_host: str | None, path: Path) -> Place:
    """Where a socket of an instance listens.

    Args:
        hostname, advertised_host: The instance's settings.
        path: The socket in the run folder, where peers are on the same host.

    Raises:
        OSError: The hostname cannot be resolved.
    """
    host = _reached_at(hostname, advertised_host)
    if not host:
        return Place(f"ipc://{path}")
    # ZeroMQ binds to addresses, not to names.
    return Place(f"tcp://{_bracketed(resolved(hostname, 0)[1][0] or '0.0.0.0')}:0", host)  # noqa: S104 - what "" means


def advertised_url(hostname: str, advertised_host: str | None, url: str) -> str:
    """Where others reach an HTTP listener.

    Args:
        hostname, advertised_host: The instance's settings.
        url: Where processes of its own host reach it.
    """
    host = _reached_at(hostname, advertised_host)
    return f"{url.partition(':')[0]}://{_bracketed(host)}:{url.rpartition(':')[2]}" if host else url


def _reached_at(hostname: str, advertised_host: str | None) -> str:
    """The host by which others reach the instance; "": only its own host does."""
    if is_loopback_name(hostname):
        return ""
    return advertised_host or ("" if is_wildcard(hostname) else hostname)


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host

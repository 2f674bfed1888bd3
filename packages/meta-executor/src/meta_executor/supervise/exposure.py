"""Who can reach a listener: said aloud where that is more than this machine."""

from __future__ import annotations

import ipaddress
import socket


def beyond_loopback(hostname: str) -> bool:
    """Whether a listener at this name or address can be reached from other machines.

    A name counts by every address that it has; one that cannot be resolved counts as reachable.
    """
    if not hostname:  # every address of this machine
        return True
    try:
        found = socket.getaddrinfo(hostname, 0, type=socket.SOCK_STREAM)
    except OSError:
        return True
    return not all(ipaddress.ip_address(str(address[0]).split("%")[0]).is_loopback for *_, address in found)


def shown_url(hostname: str, url: str) -> str:
    """The address at which it listens, for a reader: ``url`` is one at which this machine reaches it."""
    if not beyond_loopback(hostname):
        return url
    host = hostname or "0.0.0.0"  # noqa: S104 - what an empty name means
    return f"http://{f'[{host}]' if ':' in host else host}:{url.rpartition(':')[2]}"


def warning(what: str, hostname: str) -> str | None:
    """What to tell the person who starts a listener, or None if only this machine can reach it.

    Args:
        what: ``front``, or an instance's name.
        hostname: Where it will listen.
    """
    if not beyond_loopback(hostname):
        return None
    where = f"WARNING: {what} listens on {hostname or 'every address'}, which other machines may reach"
    if what == "front":
        return (
            f"{where}, and asks for no key: whoever reaches it can use it and read its statistics. Set hostname to 127.0.0.1, "
            "or let only a proxy that checks who asks reach it."
        )
    return (
        f"{where}, without TLS: its addresses and statistics are shown to whoever asks, and the run's key crosses the network "
        "in clear. Use a network that only the service's machines are on."
    )

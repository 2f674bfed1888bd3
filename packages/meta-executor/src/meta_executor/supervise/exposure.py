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
    return f"{url.partition(':')[0]}://{f'[{host}]' if ':' in host else host}:{url.rpartition(':')[2]}"


def warning(what: str, hostname: str, *, keys: bool = False, tls: bool = False) -> str | None:
    """What to tell the person who starts a listener, or None if nothing is amiss with it.

    Args:
        what: ``front``, or an instance's name.
        hostname: Where it will listen.
        keys: The front asks for API keys.
        tls: The front speaks TLS.
    """
    if not beyond_loopback(hostname):
        return None
    where = f"WARNING: {what} listens on {hostname or 'every address'}, which other machines may reach"
    if what != "front":
        return (
            f"{where}, without TLS: its statistics are shown to whoever asks, and the run's key crosses the network in clear. "
            "Use a network that only the service's machines are on."
        )
    if not keys:
        return (
            f"{where}, and asks for no key: whoever reaches it can use it and read its statistics. Set hostname to 127.0.0.1, "
            "set front.api_keys_file, or let only a proxy that checks who asks reach it."
        )
    if not tls:
        return (
            f"{where}, without TLS: API keys, prompts and answers cross the network in clear. Set front.tls_certificate_file "
            "and front.tls_key_file, or let only a proxy that speaks TLS reach it."
        )
    return None

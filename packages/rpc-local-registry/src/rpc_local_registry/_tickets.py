"""Tickets: what a client shows before the transport takes any message of it. Pure: no socket, no clock.

libzmq's PLAIN handshake carries a name and a password and lets nothing else through until the server has agreed. Here the
name is a fresh nonce and the password its code under the shared key: it proves the key and tells nothing of it. That keeps
strangers from filling the server's memory; who may call is still decided by the session's handshake, message by message.
Whoever can read the network can copy a ticket, and is a stranger with a connection for as long as it is good.
"""

from __future__ import annotations

import hmac
from typing import Final

from rpc_local_registry._wire import NONCE_BYTES

#: A ticket is good this long after it was first shown: a client reconnects with the one that it has until its session is open.
TICKET_S: Final = 60.0
#: Tickets remembered; beyond it the oldest are forgotten.
TICKETS_MAX: Final = 65536
_NAME_CHARS: Final = 2 * NONCE_BYTES


def _code(key: bytes, name: str) -> str:
    return hmac.digest(key, b"rpc-local-registry ticket " + name.encode("ascii"), "sha256").hex()


def issue(key: bytes, nonce: bytes) -> tuple[str, str]:
    """(name, password) for one connection."""
    name = nonce.hex()
    return name, _code(key, name)


class TicketCheck:
    """The server's side; remembers what it has seen."""

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._first_seen_s: dict[bytes, float] = {}
        #: Connections turned away.
        self.refused = 0

    def admits(self, name: bytes, password: bytes, now_s: float) -> bool:
        """Whether a connection with this ticket may speak."""
        good = (
            len(name) == _NAME_CHARS
            and name.isalnum()
            and hmac.compare_digest(_code(self._key, name.decode("ascii")).encode("ascii"), password)
        )
        if good:
            good = now_s - self._first_seen_s.setdefault(name, now_s) <= TICKET_S
            if len(self._first_seen_s) > TICKETS_MAX:
                del self._first_seen_s[next(iter(self._first_seen_s))]
        self.refused += not good
        return good

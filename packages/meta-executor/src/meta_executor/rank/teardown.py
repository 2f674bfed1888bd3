"""Closing a rank's transfers at its end: everything is released on proof of quiescence, or nothing is."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Protocol

#: Tries before the registered memory is left as it is, and the wait between them (s).
TRIES = 3
WAIT_S = 0.1


class ClosableSession(Protocol):
    """What of ``kv_bounce_planner.TransferSession`` is needed here."""

    def poll(self) -> Any:
        """Take in what has arrived."""
        ...

    def close(self) -> Any:
        """End it, or raise because something is not proven to be over."""
        ...


def close_transfers(
    session: ClosableSession,
    release: tuple[Callable[[], object], ...],
    say: Callable[[str], object],
    *,
    tries: int = TRIES,
    wait: Callable[[float], object] = time.sleep,
) -> bool:
    """Close the session, then carry out ``release`` in order, once.

    Without proof after ``tries`` nothing of ``release`` is done: a peer may still write, so the agent and the registered
    memory stay until the process ends.

    Args:
        session: The rank's transfers.
        release: What gives memory and agent back: control channel, registration, transport.
        say: Gets one line per failed try.
        tries: How often closing is tried, at least once.
        wait: Sleeps between two tries (s).

    Returns:
        Whether quiescence was proven and everything released.

    Raises:
        Exception: Whatever a step of ``release`` raises; the session is closed then, and later steps are not carried out.
    """
    for attempt in range(1, tries + 1):
        try:
            session.poll()
            session.close()
        except Exception as error:  # noqa: BLE001 - whatever it is, memory stays registered and that is said
            say(f"transfers are open (try {attempt} of {tries}): {error}")
            if attempt < tries:
                wait(WAIT_S)
            continue
        for step in release:
            step()
        return True
    return False

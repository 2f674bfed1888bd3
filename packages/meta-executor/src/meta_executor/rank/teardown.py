"""A rank's end: its transfers are closed on proof of quiescence, or not at all; after a fault the others are told why."""

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


#: After a fault the others' agreement is told for so long (s), and the wait between two polls.
TELL_S = 0.3
TELL_EVERY_S = 0.005


class FailingAgreement(Protocol):
    """What of an agreement is needed to tell the others of a fault."""

    mode: str

    def fail(self, detail: str) -> None:
        """Stop the domain for that reason."""
        ...

    def poll(self) -> Any:
        """Send what is queued."""
        ...


def tell_fault(agreement: FailingAgreement | None, fault: str, *, wait: Callable[[float], object] = time.sleep) -> None:
    """Let the other ranks hear the cause from the one that knows it, not only that its process has ended.

    Args:
        agreement: Over the instance's ranks. Polls of the blocking kind are collectives: a rank that leaves enters none.
        fault: The first diagnosis.
        wait: Sleeps between two polls (s).
    """
    if agreement is None or agreement.mode == "allgather":
        return
    agreement.fail(fault)
    for _ in range(int(TELL_S / TELL_EVERY_S)):
        agreement.poll()
        wait(TELL_EVERY_S)


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

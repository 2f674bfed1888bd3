"""The package's one error tree. Whether the object is still usable after each is a table in README.md."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StoryEntry:
    """One thing that happened to an owner, a server or a reservation, in order."""

    sequence: int
    event: str
    state: str
    detail: str = ""

    def __str__(self) -> str:
        return f"#{self.sequence} {self.event} -> {self.state}" + (f" ({self.detail})" if self.detail else "")


class EndpointError(Exception):
    """Base of every error that this package raises on purpose.

    Attributes:
        story: What had happened to the object until then, oldest first; empty where there is nothing to tell.
    """

    def __init__(self, message: str, *, story: tuple[StoryEntry, ...] = ()) -> None:
        self.message = message
        self.story = story
        super().__init__(message)

    def __str__(self) -> str:
        if not self.story:
            return self.message
        return self.message + "\n  story:\n" + "\n".join(f"    {entry}" for entry in self.story)


# -- the caller broke the contract --------------------------------------------------------------------------------------


class LocalProtocolError(EndpointError):
    """The caller did something that the state does not allow. Nothing was changed."""


class InvalidTransition(LocalProtocolError):
    """An event that the owner's state has no row for."""

    def __init__(self, owner_id: str, state: str, event: str, *, story: tuple[StoryEntry, ...] = ()) -> None:
        self.owner_id = owner_id
        self.state = state
        self.event = event
        super().__init__(f"{owner_id}: {event} is not allowed in state {state}", story=story)


class NotFinal(InvalidTransition):
    """A runtime that is not the final one tried to publish."""


class AlreadyOwned(LocalProtocolError):
    """The publish capability was claimed before, or the slot has another published generation."""


class ProtocolViolation(LocalProtocolError):
    """A different record was published under a generation that already stands."""


class EstimationNotClosed(LocalProtocolError):
    """The estimation runtime still holds resources; the fields say which."""

    def __init__(self, owner_id: str, resources: tuple[str, ...], *, story: tuple[StoryEntry, ...] = ()) -> None:
        self.owner_id = owner_id
        self.resources = resources
        super().__init__(f"{owner_id}: estimation runtime still holds {', '.join(resources)}", story=story)


class InFlight(LocalProtocolError):
    """Retiring was refused: admitted work has not finished."""

    def __init__(self, owner_id: str, count: int, *, story: tuple[StoryEntry, ...] = ()) -> None:
        self.owner_id = owner_id
        self.count = count
        super().__init__(f"{owner_id}: {count} admissions are in flight", story=story)


class ReservationError(LocalProtocolError):
    """A reservation was used after its release, or is unknown."""


class ConfigError(LocalProtocolError):
    """A configuration field is out of range; ``field`` names it."""

    def __init__(self, field: str, reason: str) -> None:
        self.field = field
        self.reason = reason
        super().__init__(f"{field}: {reason}")


class IdSpaceExhausted(LocalProtocolError):
    """More ids were asked for than the stated bound allows at this time. Waiting a little helps."""


# -- the other side did -------------------------------------------------------------------------------------------------


class RemoteProtocolError(EndpointError):
    """What a peer sent cannot be accepted."""


class RecordInvalid(RemoteProtocolError):
    """A record failed validation; ``field`` names the first offending field."""

    def __init__(self, field: str, reason: str, *, server: str = "") -> None:
        self.field = field
        self.reason = reason
        self.server = server
        super().__init__(f"{server + ': ' if server else ''}{field}: {reason}")


class StaleGeneration(RemoteProtocolError):
    """The generation asked for is not the live one. Nothing was touched; refresh and send again."""

    def __init__(self, expected: str | None, current: str | None, *, story: tuple[StoryEntry, ...] = ()) -> None:
        self.expected = expected
        self.current = current
        super().__init__(f"generation {expected!r} is not the live one ({current!r})", story=story)


# -- nobody is wrong, it is just not there ------------------------------------------------------------------------------


class Unavailable(EndpointError):
    """Nothing can serve this now. A later try may succeed."""


class NotReady(Unavailable):
    """The instance has published nothing yet, or no longer."""


class Draining(Unavailable):
    """The instance finishes what it has and takes nothing new."""


class NoServer(Unavailable):
    """No server of that role can be picked."""

    def __init__(self, role: str, detail: str) -> None:
        self.role = role
        super().__init__(f"no {role} server: {detail}")


class ServerGone(Unavailable):
    """The server was removed from the directory."""

    def __init__(self, server: str) -> None:
        self.server = server
        super().__init__(f"{server} is not in the directory")


class NotSent(Unavailable):
    """Raised by a caller's ``send`` when it could not connect: nothing left, so another server may be tried."""


class Overloaded(Unavailable):
    """A bound was met (waiters of one refresh, reservations); the caller should shed load."""


class RefreshFailed(EndpointError):
    """A server's record could not be fetched within the bounds. The cause is chained."""

    def __init__(self, server: str, attempts: int, reason: str) -> None:
        self.server = server
        self.attempts = attempts
        self.reason = reason
        super().__init__(f"{server}: refresh failed after {attempts} attempts: {reason}")


class EndpointTimeout(EndpointError, TimeoutError):
    """A wait of ours ended by its deadline."""


class DirectoryClosed(EndpointError):
    """The directory was closed; it serves nothing any more."""


class StoreError(EndpointError):
    """The lease store could not be reached or answered with an error (mapped; cause kept)."""


class StoreCompacted(StoreError):
    """A watch asked for a revision that the store no longer has: list again."""
